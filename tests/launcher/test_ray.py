"""launch=ray: what a host needs of its node, and runs on a cluster of this machine."""

import csv
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.command_line import ray_jobs
from flowrun.launcher.command_line.ray_host import RayHost
from flowrun.launcher.command_line.ray_jobs import submit
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from support.runs.command import Command, free_port, losses, run_folder
from support.runs.ray_cluster import another_node, ray_cluster

RUN = ("recipe=small", "launch.transport=gloo")
SENT = ("recipe=small", "launch=ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="ray is not installed", exc_type=ImportError)
    with ray_cluster() as found:
        yield found


def on(cluster: Any, place: Path, *words: str) -> Command:
    """A command that finds the cluster as on one of its nodes."""
    return Command(place, *words, variables={"RAY_ADDRESS": cluster.address, "FLOWRUN_TOKEN": ""})


@pytest.mark.parametrize(
    ("keys", "need"),
    [
        (["placement.axes.tensor=4", "launch.threads=3"], {"CPU": 6}),
        (["launch.data_workers=2"], {"CPU": 3}),
        (["launch.device=cuda"], {"CPU": 1, "GPU": 1}),
        (["launch.ray.resources.CPU=8", "launch.ray.resources.A100=1"], {"CPU": 8, "A100": 1}),
    ],
    ids=["threads", "data workers", "GPUs", "by hand"],
)
def test_a_host_needs_what_its_ranks_need(
    place: Path, keys: list[str], need: dict[str, float]
) -> None:
    assert ray_jobs._need(load([*SENT, "launch.nnodes=2", *keys])) == need


def test_nothing_but_a_run_is_submitted(place: Path) -> None:
    with pytest.raises(RecipeError, match="which submits a job"):
        run(load([*SENT]), place / "out")


def test_ray_that_is_not_installed_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RecipeError, match=r"flowrun\[ray\]"):
        submit(load([*SENT]), place / "out", None)


def test_a_node_that_does_not_see_the_folder_is_named(place: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"does not see .*nowhere.yaml: start the command"):
        RayHost().start(place / "nowhere.yaml", [], {})


def test_an_address_without_a_cluster_is_refused_at_once(place: Path) -> None:
    pytest.importorskip("ray", exc_type=ImportError)
    address = f"launch.ray.address=127.0.0.1:{free_port()}"
    with pytest.raises(RecipeError, match=r"no Ray cluster at 127[.]0[.]0[.]1:.*refused"):
        submit(load([*SENT, address]), place / "out", None)


def test_a_signal_while_a_job_is_planned_ends_the_command_with_its_status() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR2):
        with pytest.raises(SystemExit) as ended:
            ray_jobs._pass_on(number, None)
        assert ended.value.code == 75
    with pytest.raises(KeyboardInterrupt):
        ray_jobs._pass_on(signal.SIGINT, None)
    ray_jobs._pass_on(signal.SIGUSR1, None)


@pytest.mark.parametrize(
    ("number", "job", "status"),
    [(signal.SIGINT, 1, 130), (signal.SIGTERM, 1, 75), (signal.SIGINT, None, 0), (0, 1, 0)],
)
def test_a_job_that_was_asked_to_end_ends_its_sweep_however_it_ends(
    number: int, job: int | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = object.__new__(ray_jobs.RayJob)
    asked.job, asked.status, asked._asked = job, 0, number
    report = object()
    monkeypatch.setattr(asked, "_wait", lambda: report)
    assert asked.outcome() is report and asked.status == status


@pytest.mark.processes
def test_two_hosts_have_the_losses_of_one(cluster: Any, place: Path) -> None:
    one = Command(place, *RUN, run_folder(place / "one"))
    with another_node(cluster):
        two = on(cluster, place, *RUN, "launch=ray", "launch.nnodes=2", run_folder(place / "two"))
        ended = two.end(120)
    assert (ended.status, one.end().status) == (0, 0), ended.err
    assert losses(place / "two") == losses(place / "two" / "host1") == losses(place / "one")
    assert "host 0 begins at" in ended.out
    assert ended.out.count("step 0/4") == 1
    assert "step 0/4" in (place / "two" / "ray" / "host_1.log").read_text()


@pytest.mark.thorough
@pytest.mark.processes
def test_hosts_that_never_fit_are_waited_for_by_name(cluster: Any, place: Path) -> None:
    """The only node has cores for both."""
    ended = on(cluster, place, *SENT, "launch.nnodes=2", "launch.join_s=4").end(60)
    assert ended.status == 1
    free = "free nodes of Ray with CPU 1"
    assert f"waiting for {free}: 2 needed, 1 of 1 large enough" in ended.out
    assert f"no {free} in launch.join_s=4 s: 2 needed, 1 of 1 large enough." in ended.err


def sweep(cluster: Any, place: Path, lrs: str, *keys: str) -> Command:
    """One job for each learning rate, each of one rank."""
    words = (*SENT, "placement.axes.tensor=1", f"optim.lr={lrs}", "hydra.sweep.dir=sweep", *keys)
    return on(cluster, place, "-m", *words)


@pytest.mark.thorough
@pytest.mark.processes
def test_jobs_of_a_sweep_run_on_the_cluster_and_the_one_that_fails_is_named(
    cluster: Any, place: Path
) -> None:
    ended = sweep(cluster, place, "0.1,1e30,-1").end(240)
    assert ended.status == 1, ended.err
    assert "failed: step 1, rank 0: its gradients are not finite" in " ".join(ended.out.split())
    table = (place / "sweep" / "comparison.csv").read_text().splitlines()[1:]
    assert [line.split(",")[5] for line in table] == ["ran", "failed", "skipped"]


@pytest.mark.thorough
@pytest.mark.processes
def test_twelve_jobs_on_four_cores(cluster: Any, place: Path) -> None:
    with another_node(cluster):
        lrs = [1e30, *(k / 100 for k in range(1, 12))]
        ended = sweep(cluster, place, ",".join(map(str, lrs))).end(240)
    assert ended.status == 1, ended.err
    said = " ".join(ended.out.split())
    assert "0 optim.lr=1e+30 failed: step 1, rank 0: its gradients are not finite" in said
    table = csv.DictReader((place / "sweep" / "comparison.csv").read_text().splitlines())
    found = [(float(row["optim.lr"]), row["status"], row["reason"][:14]) for row in table]
    assert found == [(1e30, "failed", "step 1, rank 0"), *((lr, "ran", "") for lr in lrs[1:])]
    most = running = 0
    for line in ended.out.splitlines():
        running += ("host 0 begins" in line) - (": complete" in line or ": ended" in line)
        most = max(most, running)
    assert most == 4


@pytest.mark.thorough
@pytest.mark.processes
def test_ctrl_c_ends_the_jobs_of_a_sweep_and_shows_them(cluster: Any, place: Path) -> None:
    command = sweep(cluster, place, "0.1,0.2,0.3", "train.steps=1000000")
    for _ in range(2):
        command.until("host 0 begins")
    while not (place / "sweep" / "2" / "ray" / "recipe.yaml").exists():
        time.sleep(0.1)  # job 2 may still be planned
    command.send(signal.SIGINT)
    ended = command.end()
    assert ended.status == 130, ended.err
    for job, said in enumerate(("ended with status", "ended with status", "stopped")):
        assert f"job {job}: {said}" in ended.out
    assert "recipe and changes" in ended.out


@pytest.mark.thorough
@pytest.mark.processes
def test_ctrl_c_ends_a_sweep_whose_jobs_wait_for_each_other(cluster: Any, place: Path) -> None:
    keys = ("train.steps=4,1000000,8", "sweep.objective=loss")
    command = sweep(cluster, place, "0.1", *keys)
    command.until("job 1: host 0 begins")
    command.send(signal.SIGINT)
    ended = command.end()
    assert ended.status == 130, ended.err
    assert "job 2" not in ended.out and "recipe and changes" in ended.out


@pytest.mark.thorough
@pytest.mark.processes
def test_sigterm_while_a_job_is_planned_ends_with_75(cluster: Any, place: Path) -> None:
    (place / "ended.py").write_text(
        "import os, signal\nfrom samples import Samples\n\n"
        "def make():\n    os.kill(os.getpid(), signal.SIGTERM)\n    return Samples()\n"
    )
    ended = on(cluster, place, *SENT, "data._target_=ended.make").end()
    assert (ended.status, ended.err) == (75, "stopped by SIGTERM\n")


@pytest.mark.thorough
@pytest.mark.processes
def test_a_node_that_comes_joins_and_one_that_is_lost_leaves(cluster: Any, place: Path) -> None:
    keys = ("launch.nnodes=1:2", "train.steps=1000000")
    command = on(cluster, place, *SENT, *keys, run_folder(place / "out"))
    command.until("step 0/")
    with another_node(cluster) as node:
        command.until("2 hosts from step")
        cluster.remove_node(node, allow_graceful=False)
        command.until("host 1 (")
        command.until("1 host from step")
    command.send(signal.SIGINT)
    ended = command.end()
    assert ended.status == 130, ended.err
    assert json.loads((place / "out" / "ended.json").read_text())["why"] == "Ctrl-C"
    assert any((place / "out" / "checkpoints").iterdir())


@pytest.mark.thorough
@pytest.mark.processes
def test_hosts_meet_again_where_the_first_is_lost(cluster: Any, place: Path) -> None:
    keys = ("launch.nnodes=1:2", "launch.ray.resources.slot=1")
    slot = {"slot": 1}  # the head has none: the command is there
    with another_node(cluster, slot) as node:
        words = (*SENT, *keys, "train.steps=1000000", run_folder(place / "out"))
        command = on(cluster, place, *words)
        command.until("step 0/")
        with another_node(cluster, slot):
            command.until("2 hosts from step")
            cluster.remove_node(node, allow_graceful=False)
            command.until("note: host 0 is lost:")
            command.until("1 host from step")
            command.send(signal.SIGINT)
            ended = command.end()
    assert ended.status == 130, ended.err
