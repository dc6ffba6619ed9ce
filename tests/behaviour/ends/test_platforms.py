"""Runs that a platform starts, without a key of `launch`: the losses are those of one host.

torchrun is everywhere where torch is; Slurm and Open MPI are tried where they are installed.
"""

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from flowrun.launcher.commands.start.manifest import write_manifest
from support.checks.thorough import few
from support.runs.command import FLOWRUN, Command, Ended, free_port, losses, run_folder, workplace
from support.runs.linked_hosts import LinkedHosts, find_obstacle
from support.runs.slurm import Slurm, find_lack

pytestmark = pytest.mark.processes

RUN = ("recipe=small", "launch.transport=gloo")
ENDLESS = ("recipe=small", "train.steps=1000000")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--no-python")
MPIRUN = ("mpirun", "--bind-to", "none")
# Open MPI starts a host by ssh, and refuses root; here a host is a name of its own
NO_SSH = """\
#!/bin/sh
host=$1; shift
exec unshare --uts sh -c "hostname $host; exec sh -c \\"\\$0\\"" "$*"
"""
AS_ROOT = {
    "TTY_COMPATIBLE": "0",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one host that nothing but a person started."""
    place = workplace(tmp_path_factory.mktemp("one"))
    assert Command(place, *RUN, run_folder(place / "out")).end().status == 0
    return losses(place / "out")


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts agree on a secret by themselves, or by a common folder."""
    monkeypatch.setenv("FLOWRUN_TOKEN", "")


def the_run(place: Path) -> Path:
    """The folder of the only run there is."""
    (recipe,) = place.glob("outputs/*/*/recipe.yaml")
    return recipe.parent


def check_hosts(place: Path, ends: list[Ended], one: list[float]) -> None:
    assert [ended.status for ended in ends] == [0] * len(ends), ends[0].err
    folder = the_run(place)
    assert losses(folder) == losses(folder / "host1") == one
    assert (folder / "weights.safetensors").exists()


def check_processes(place: Path, ended: Ended, name: str, one: list[float]) -> None:
    assert ended.status == 0, ended.err
    assert losses(the_run(place)) == one
    assert ended.out.count("step 0/4") == 1
    plan = (the_run(place) / "plan.txt").read_text()
    assert f"note: {name} started 2 processes on this host: one launches" in plan


def pid_of_host(folder: Path) -> int:
    """The launcher of host 0."""
    return int(json.loads((folder / ".lease").read_text())["process"])


# ---- torchrun ------------------------------------------------------------------------------------


def torchrun(place: Path, *words: str) -> list[Command]:
    """The same command in two shells."""
    nodes = ("--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1")
    port = f"--master_port={free_port()}"
    return [
        Command(place, *words, by=(*TORCHRUN, *nodes, port, f"--node_rank={k}")) for k in range(2)
    ]


@pytest.mark.thorough
def test_torchrun_starts_two_hosts(place: Path, one: list[float]) -> None:
    check_hosts(place, [command.end() for command in torchrun(place, *RUN)], one)


@pytest.mark.thorough
def test_torchrun_starts_two_processes_of_a_host_and_one_run(place: Path, one: list[float]) -> None:
    ended = Command(place, *RUN, by=(*TORCHRUN, "--nproc_per_node=2")).end()
    check_processes(place, ended, "torchrun", one)


@pytest.mark.thorough
def test_a_host_of_torchrun_that_is_killed_ends_the_other(place: Path) -> None:
    both = torchrun(place, *ENDLESS)
    for command in both:
        command.until("step 0/")
    os.kill(pid_of_host(the_run(place)), signal.SIGKILL)
    ends = [command.end() for command in both]
    assert [ended.status for ended in ends] == [1, 1]  # whatever a process ends with
    assert "its launcher has ended: it was killed, or its machine failed." in ends[1].err


# ---- Open MPI ------------------------------------------------------------------------------------


no_mpi = not (shutil.which("mpirun") and os.getuid() == 0)
needs_mpi = pytest.mark.skipif(no_mpi, reason="mpirun is missing, or nobody may name a host")


def mpirun(place: Path, *words: str, by: tuple[str, ...] = ()) -> Command:
    """mpirun of two hosts."""
    (place / "no_ssh").write_text(NO_SSH)
    (place / "no_ssh").chmod(0o755)
    here = os.uname().nodename
    hosts = ("-N", "1", "--host", f"{here}:1,other:1")
    agent = ("--mca", "plm_rsh_agent", str(place / "no_ssh"))
    return Command(place, *words, by=(*MPIRUN, *hosts, *agent, *by), variables=AS_ROOT)


@pytest.mark.thorough
@needs_mpi
def test_mpirun_starts_two_hosts(place: Path, one: list[float]) -> None:
    check_hosts(place, [mpirun(place, *RUN).end()], one)


@needs_mpi
@pytest.mark.parametrize("nnodes", few([None, 2], often=[None]))
def test_mpirun_starts_two_processes_of_a_host(
    place: Path, nnodes: int | None, one: list[float]
) -> None:
    """They are one run; or two hosts, if launch.nnodes says so."""
    by, words = (*MPIRUN, "--oversubscribe", "-np", "2"), ()
    if nnodes:
        words = (f"launch.nnodes={nnodes}",)
    ended = Command(place, *RUN, *words, by=by, variables=AS_ROOT).end()
    if nnodes:
        check_hosts(place, [ended], one)
    else:
        check_processes(place, ended, "Open MPI", one)


@pytest.mark.thorough
@needs_mpi
def test_a_host_of_mpirun_that_is_killed_ends_the_job(place: Path) -> None:
    command = mpirun(place, *ENDLESS)
    command.until("step 0/")
    os.kill(pid_of_host(the_run(place)), signal.SIGKILL)
    assert command.end().status == 128 + signal.SIGKILL


@needs_mpi
@pytest.mark.thorough
def test_mpirun_passes_on_that_the_run_was_asked_to_end(place: Path) -> None:
    command = mpirun(place, *ENDLESS)
    command.until("step 0/")
    command.send(signal.SIGUSR2)  # which mpirun passes on; SIGTERM leaves a second
    assert command.end().status == 75
    assert json.loads((the_run(place) / "ended.json").read_text())["status"] == "preempted"
    assert any((the_run(place) / "checkpoints").iterdir())


# ---- Slurm ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two nodes of a cluster, on this machine."""
    if lack := find_lack():
        pytest.skip(lack)
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def test_srun_starts_two_hosts(slurm: Slurm, place: Path, one: list[float]) -> None:
    check_hosts(place, [Command(place, *RUN, by=slurm.srun("-N2")).end()], one)
    assert re.fullmatch(r"\d+\.0_small", the_run(place).name)


@pytest.mark.thorough
def test_srun_starts_two_processes_of_a_host(slurm: Slurm, place: Path, one: list[float]) -> None:
    ended = Command(place, *RUN, by=slurm.srun("-N1", "-n2")).end()
    check_processes(place, ended, "Slurm", one)


@pytest.mark.thorough
def test_a_host_of_slurm_that_is_killed_ends_the_other(slurm: Slurm, place: Path) -> None:
    command = Command(place, *ENDLESS, by=slurm.srun("-N2"))
    command.until("step 0/")
    os.kill(pid_of_host(the_run(place)), signal.SIGKILL)
    ended = command.end()
    assert ended.status == 128 + signal.SIGKILL  # the highest
    assert "its launcher has ended: it was killed, or its machine failed." in ended.err


@pytest.mark.thorough
def test_hosts_of_slurm_that_are_left_go_on(slurm: Slurm, place: Path) -> None:
    keys = ("launch.nnodes=1:2", "train.save_every=10", "train.steps=300", "train.log_every=10")
    command = Command(place, "recipe=small", *keys, by=slurm.srun("-N2"))
    command.until("step 20/")
    os.kill(pid_of_host(the_run(place)), signal.SIGKILL)
    ended = command.end()
    assert ended.status == 128 + signal.SIGKILL
    assert len(losses(the_run(place))) == 300
    assert "1 host from step" in ended.out


@pytest.mark.thorough
def test_scancel_saves_and_ends_all_with_75(slurm: Slurm, place: Path) -> None:
    command = Command(place, *ENDLESS, by=slurm.srun("-N2"))
    command.until("step 0/")
    job = the_run(place).name.partition("_")[0]
    slurm.call("scancel", "--signal=TERM", job)
    assert command.end().status == 75
    assert any((the_run(place) / "checkpoints").iterdir())


@pytest.mark.thorough
def test_a_script_for_sbatch_is_put_back_and_continues(
    slurm: Slurm, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job ends with 75, and begins again in the same folder."""
    commands = place / "bin"
    commands.mkdir()
    (commands / "flowrun").write_text(f'#!/bin/sh\nexec {" ".join(FLOWRUN)} "$@"\n')
    (commands / "flowrun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    once = "+data.fail='preempt once'"
    words = ["recipe=small", "train.steps=20", once, "launch.transport=gloo"]
    (place / "job").write_text(write_manifest("slurm", words, 2, "", "", ""))
    assert slurm.submit(place, "job") == 0
    (log,) = place.glob("slurm-*.out")
    assert "note: goes on from step" in log.read_text()
    (folder,) = place.glob("outputs/slurm/*_small")
    assert len(losses(folder)) == 20


# ---- variables alone -----------------------------------------------------------------------------


def by_variables(port: int, *addresses: str) -> Mapping[str, tuple[Mapping[str, str], str]]:
    """What each host has in its environment, and the variable with its number.

    addresses: of the hosts' networks.
    """
    master = {"MASTER_ADDR": addresses[0], "MASTER_PORT": str(port)}
    pet = {f"PET_{key}": value for key, value in master.items()}
    sky = {"SKYPILOT_NODE_IPS": "\n".join(addresses), "SKYPILOT_TASK_ID": str(port)}
    return {
        "Kubeflow": ({**pet, "PET_NNODES": "2"}, "PET_NODE_RANK"),
        "JobSet": ({**master, "NNODES": "2"}, "JOB_COMPLETION_INDEX"),
        "SkyPilot": (sky, "SKYPILOT_NODE_RANK"),
    }


@pytest.fixture
def networks() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Namespaces of two hosts and their addresses; both on loopback where nobody may make any."""
    if find_obstacle():
        yield ("", ""), ("127.0.0.1", "127.0.0.2")
        return
    linked = LinkedHosts()
    yield linked.namespaces, linked.addresses
    linked.close()


@pytest.mark.parametrize("name", few(["Kubeflow", "JobSet", "SkyPilot"], often=["JobSet"]))
def test_variables_of_a_platform_make_two_hosts(
    place: Path, name: str, one: list[float], networks: tuple[tuple[str, str], tuple[str, str]]
) -> None:
    namespaces, addresses = networks
    common, number = by_variables(free_port(), *addresses)[name]
    folder = run_folder(place / "outputs" / "a" / "b")  # on a disk that all pods see
    ends = [
        Command(place, *RUN, folder, variables={**common, number: str(k)}, namespace=namespace)
        for k, namespace in enumerate(namespaces)
    ]
    check_hosts(place, [command.end() for command in ends], one)
    assert f"note: {name} started 2 hosts" in (the_run(place) / "plan.txt").read_text()


@pytest.mark.thorough
def test_processes_of_a_host_end_with_the_status_of_the_first(place: Path) -> None:
    task = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}
    task |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2"}
    task |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n0"}

    def both(*words: str) -> list[Command]:
        numbers = ({"SLURM_PROCID": str(k), "SLURM_LOCALID": str(k)} for k in range(2))
        return [Command(place, *words, variables={**task, **each}) for each in numbers]

    virtual = [command.end() for command in both("recipe=small", "launch=virtual")]
    assert [(ended.status, bool(ended.out)) for ended in virtual] == [(0, True), (0, False)]
    refused = [command.end() for command in both("recipe=small", "train.steps=0")]
    assert [(ended.status, bool(ended.err)) for ended in refused] == [(2, True), (2, False)]
    asked = both(*ENDLESS)
    asked[0].until("step 0/")
    for command in asked:
        command.send(signal.SIGTERM)
    ends = [command.end() for command in asked]
    assert [ended.status for ended in ends] == [75, 75]
    assert (ends[1].out, ends[1].err) == ("", "")
