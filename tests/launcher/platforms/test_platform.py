"""Each row of the table by the variables that its starter sets, and what a run makes of them."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrun.launcher.platforms.platform import ROWS, Platform, Seat, decide, read_platform
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.device import device_type

URI = "1255342080.0;tcp://192.0.2.2,10.0.0.2:40819;tcp6://[fd00::2]:36845"


def of_torchrun(hosts: int, here: int, host: int, process: int) -> dict[str, object]:
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 3,
        "GROUP_WORLD_SIZE": hosts,
        "GROUP_RANK": host,
        "LOCAL_WORLD_SIZE": here,
        "LOCAL_RANK": process,
        "WORLD_SIZE": hosts * here,
        "RANK": host * here + process,
        "MASTER_ADDR": "node0",
        "MASTER_PORT": 29500,
    }


def of_open_mpi(hosts: int, here: int, host: int, process: int) -> dict[str, object]:
    return {
        "OMPI_COMM_WORLD_SIZE": hosts * here,
        "OMPI_COMM_WORLD_RANK": process * hosts + host,  # --map-by node
        "OMPI_COMM_WORLD_LOCAL_SIZE": here,
        "OMPI_COMM_WORLD_LOCAL_RANK": process,
        "OMPI_MCA_orte_hnp_uri": URI,
        "OMPI_MCA_orte_precondition_transports": "99538e7b496956a0-36bc30478412a1c8",
        "PMIX_NAMESPACE": 1255342081,
    }


def of_mpich(hosts: int, here: int, host: int, process: int) -> dict[str, object]:
    return {
        "PMI_SIZE": hosts * here,
        "PMI_RANK": host * here + process,
        "MPI_LOCALNRANKS": here,
        "MPI_LOCALRANKID": process,
        "SLURM_JOB_NODELIST": "node[0-9]",  # mpiexec in a batch script
    }


def of_slurm(hosts: int, here: int, host: int, process: int) -> dict[str, object]:
    return {
        "SLURM_JOB_ID": 17,
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_NUM_NODES": hosts,
        "SLURM_STEP_NUM_TASKS": hosts * here,
        "SLURM_STEP_TASKS_PER_NODE": f"{here}(x{hosts})",
        "SLURM_STEP_NODELIST": "node[0-9]",
        "SLURM_JOB_NODELIST": "login,node[0-9]",  # of which the step has some
        "SLURM_NODEID": host,
        "SLURM_LOCALID": process,
        "SLURM_PROCID": host * here + process,
        "SLURM_TASKS_PER_NODE": "1",
    }


def of_kubeflow(hosts: int, host: int) -> dict[str, object]:
    return {
        "PET_NNODES": hosts,
        "PET_NODE_RANK": host,
        "PET_NPROC_PER_NODE": "auto",
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": 29400,
        "JOB_COMPLETION_INDEX": host,  # a TrainJob is a JobSet
    }


def of_elastic(hosts: int, host: int) -> dict[str, object]:
    return {"PET_NNODES": f"1:{hosts}", "PET_RDZV_ENDPOINT": "job-worker-0:29400", "HOSTNAME": host}


def of_jobset(hosts: int, host: int) -> dict[str, object]:
    address = "run-host-0-0.run"
    return {"JOB_COMPLETION_INDEX": host, "NNODES": hosts, "MASTER_ADDR": address}


def of_skypilot(hosts: int, host: int) -> dict[str, object]:
    ips = "\n".join(f"10.0.0.{k + 1}" for k in range(hosts))
    return {"SKYPILOT_NODE_IPS": ips, "SKYPILOT_NODE_RANK": host, "SKYPILOT_TASK_ID": "sky-1"}


DEALS = {"torchrun": of_torchrun, "Open MPI": of_open_mpi, "MPICH": of_mpich, "Slurm": of_slurm}
ONE_EACH = {
    "elastic PyTorchJob": of_elastic,
    "Kubeflow": of_kubeflow,
    "JobSet": of_jobset,
    "SkyPilot": of_skypilot,
}


def read(variables: dict[str, object]) -> Platform | None:
    return read_platform({key: str(value) for key, value in variables.items()})


FOUND = {
    "torchrun": (of_torchrun(2, 1, 1, 0), "node0:", 1),
    "torchrun, processes": (of_torchrun(2, 2, 1, 1), "node0:", 1),
    "Open MPI": (of_open_mpi(2, 1, 1, 0), "192.0.2.2:", None),
    "Open MPI, processes": (of_open_mpi(2, 2, 1, 1), "192.0.2.2:", None),
    "Open MPI, IPv6": (
        of_open_mpi(2, 1, 1, 0) | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp6://[fd00::2]:36845"},
        "[fd00::2]:",
        None,
    ),
    "Open MPI in a job of Slurm": (
        of_open_mpi(2, 1, 1, 0) | {"SLURM_JOB_NODELIST": "n[08-09,11],z"},
        "n08:",
        None,
    ),
    "Open MPI 5": (of_open_mpi(2, 1, 1, 0) | {"OMPI_MCA_orte_hnp_uri": ""}, "", None),
    "MPICH": (of_mpich(2, 1, 1, 0), "node0:", None),
    "Slurm": (of_slurm(2, 1, 1, 0), "node0:", 1),
    "Slurm, processes": (of_slurm(2, 2, 1, 1), "node0:", 1),
    "Kubeflow": (of_kubeflow(2, 1), "job-node-0-0.job:29400", 1),
    "elastic PyTorchJob": (of_elastic(2, 1), "job-worker-0:29400", None),
    "JobSet": (of_jobset(2, 1), "run-host-0-0.run:29500", 1),
    "SkyPilot": (of_skypilot(2, 1), "10.0.0.1:", 1),
}


@pytest.mark.parametrize(("variables", "endpoint", "host"), FOUND.values(), ids=FOUND)
def test_a_row_is_read(
    variables: dict[str, object], endpoint: str, host: int | None, request: Any
) -> None:
    found = read(variables)
    assert found is not None and found.name == request.node.callspec.id.partition(",")[0].split(
        " in "
    )[0].removesuffix(" 5")
    assert (found.hosts, found.host) == (2, host)
    assert found.endpoint.startswith(endpoint) and bool(found.endpoint) == bool(endpoint)


def test_jobs_of_an_mpi_in_slurm_have_ports_of_their_own() -> None:
    found = [read(of_mpich(2, 1, 1, 0) | {"SLURM_JOB_ID": job}) for job in (17, 18)]
    assert found[0] and found[1] and found[0].port != found[1].port


def test_each_row_has_a_sample() -> None:
    assert {*DEALS, *ONE_EACH} == {*ROWS}


INNER = {
    "torchrun in srun": ("torchrun", of_slurm(2, 1, 1, 0) | of_torchrun(2, 4, 1, 3)),
    "mpirun in sbatch": ("Open MPI", of_slurm(2, 1, 1, 0) | of_open_mpi(2, 4, 1, 3)),
    "torchrun in a TrainJob": ("torchrun", of_kubeflow(2, 1) | of_torchrun(2, 4, 1, 3)),
    "torchrun on SkyPilot": ("torchrun", of_skypilot(2, 1) | of_torchrun(2, 4, 1, 3)),
    "srun with PMI": ("Slurm", of_slurm(2, 4, 1, 3) | {"PMI_RANK": 7, "PMI_SIZE": 8}),
}


@pytest.mark.parametrize(("name", "variables"), INNER.values(), ids=INNER)
def test_the_innermost_starter_counts(name: str, variables: dict[str, object]) -> None:
    found = read(variables)
    assert found is not None
    assert (found.name, found.processes, found.process) == (name, 4, 3)


def without(variables: dict[str, object], *keys: str) -> dict[str, object]:
    return {key: value for key, value in variables.items() if key not in keys}


_ITS_TASK = ("SLURM_STEP_ID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS")
STRAY = {
    "nothing": {},
    "a batch script, or a shell in salloc": without(of_slurm(2, 1, 0, 0), *_ITS_TASK),
    "srun --pty": of_slurm(1, 1, 0, 0) | {"SLURM_PTY_PORT": 4711},
    "the step of salloc's shell": of_slurm(1, 1, 0, 0) | {"SLURM_STEP_ID": 0xFFFFFFFA},
    "exported ranks": dict(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, MASTER_ADDR="a", MASTER_PORT=1),
    "ranks of flowrun": without(of_torchrun(2, 1, 1, 0), "TORCHELASTIC_MAX_RESTARTS"),
    "one variable of torchrun": {"PET_NPROC_PER_NODE": 8, "PET_NNODES": 2},
    "pods of an array": {"JOB_COMPLETION_INDEX": 3, "MASTER_ADDR": "a"},
    "hosts that come and go": of_kubeflow(2, 1) | {"PET_NNODES": "1:4"},
    "numbers that are none": of_slurm(2, 1, 1, 0) | {"SLURM_NODEID": "x"},
    "numbers that are not there": without(of_slurm(2, 1, 1, 0), "SLURM_STEP_TASKS_PER_NODE"),
}


@pytest.mark.parametrize("variables", STRAY.values(), ids=STRAY)
def test_variables_that_only_stand_there_are_not_read(variables: dict[str, object]) -> None:
    assert read(variables) is None
    keys = 2, 1, "a:1"
    assert decide(None, *keys) == Seat(*keys)


def test_unequal_tasks_of_slurm_are_counted_for_each_node() -> None:
    for host, count in enumerate((2, 2, 1)):
        found = read(of_slurm(3, 2, host, 0) | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"})
        assert found is not None and found.processes == count


def seats(name: str, hosts: int, here: int, nnodes: int | str | None) -> list[list[Seat]]:
    """The seats of a job: for each host those of its processes."""
    found = []
    for host in range(hosts):
        places = [(host, k) for k in range(here)]
        deal, one = DEALS.get(name), ONE_EACH.get(name)
        all_ = [deal(hosts, here, *p) if deal else one(hosts, p[0]) for p in places]  # type: ignore[misc]
        found.append([decide(read(each), nnodes, None, "") for each in all_])
    return found


@given(st.sampled_from([*ROWS]), st.integers(1, 5), st.integers(1, 5), st.data())
def test_processes_of_a_host_never_start_runs_of_their_own(
    name: str, hosts: int, here: int, data: st.DataObject
) -> None:
    here = here if name in DEALS else 1
    asked = st.sampled_from([None, hosts, hosts * here, f"1:{hosts}", f"1:{hosts * here}", 7])
    nnodes = data.draw(asked)
    found = seats(name, hosts, here, nnodes)
    run = [[seat for seat in host if not seat.waits] for host in found]
    most = hosts if nnodes is None else int(str(nnodes).rpartition(":")[2])
    each = here if most == hosts * here != hosts else 1
    assert [len(host) for host in run] == [each] * hosts
    assert all(host[0].others == here - each for host in run)
    launchers = [seat for host in run for seat in host]
    assert len({(str(seat.nnodes), seat.endpoint) for seat in launchers}) == 1
    numbers = [seat.node_rank for seat in launchers]
    if most != hosts * each or most == 1 or ":" in str(launchers[0].nnodes):
        assert set(numbers) == {None}
    elif name in ("Open MPI", "MPICH", "elastic PyTorchJob") and each == 1:
        assert set(numbers) == {None}  # the meeting numbers them
    else:
        assert sorted(numbers) == list(range(most))  # type: ignore[type-var]
    if most == hosts * each > 1:
        assert launchers[0].endpoint and str(launchers[0].nnodes) in (
            str(nnodes or hosts),
            f"1:{hosts}",
        )


def test_keys_given_by_hand_win_and_a_contradiction_is_a_note() -> None:
    found = read(of_slurm(2, 1, 1, 0))
    assert found is not None
    seat = decide(found, None, None, "")
    assert (seat.nnodes, seat.node_rank) == (2, 1)
    assert seat.notes == (f"Slurm started 2 hosts, which meet at {found.endpoint}; this is host 1",)
    assert decide(found, 2, 1, "other:1") == replace(
        seat,
        endpoint="other:1",
        notes=("Slurm started 2 hosts, which meet at other:1; this is host 1",),
    )
    alone = decide(found, 1, None, "")
    assert (alone.nnodes, alone.node_rank, alone.endpoint) == (1, None, "")
    assert alone.notes == ("launch.nnodes=1 counts, though Slurm started 2 hosts",)
    turned = decide(found, None, 0, "")
    assert turned.node_rank == 0
    assert "launch.node_rank=0 counts, though Slurm numbered it 1" in turned.notes


def test_one_process_of_one_host_is_as_if_started_by_hand() -> None:
    for name in DEALS:
        assert seats(name, 1, 1, None) == [[Seat(None, None, "")]]


def test_a_recipe_has_the_hosts_of_its_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text has what was given by hand, so that it can be resumed on other hosts."""
    for key, value in of_slurm(2, 1, 1, 0).items():
        monkeypatch.setenv(key, str(value))
    recipe = load(["recipe=gpt_hybrid"])
    assert (recipe.launch.nnodes, recipe.launch.node_rank) == (2, 1)
    assert recipe.launch.rdzv_endpoint.startswith("node0:")
    assert "nnodes: null" in recipe.to_yaml() and "node0" not in recipe.to_yaml()
    assert load(["recipe=gpt_hybrid", "launch=virtual"]).launch.num_hosts == 1
    assert device_type(recipe.launch, 1) == "cpu"  # fewer ranks than hosts
