"""launch=slurm: what sbatch would be given, and jobs of submitit's local executor."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from flowrun.engine.errors import RecipeError, RunError
from flowrun.launcher.command_line.slurm import Agent, submit
from flowrun.launcher.commands import resume
from flowrun.launcher.commands.resume import find_continuation
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from flowrun.launcher.store.checkpoint import FOLDER, Checkpoint
from flowrun.launcher.store.run_files import RECIPE
from support.runs.command import Command, losses, run_folder

# Stands where Slurm would: keeps the batch file and answers as sbatch does.
SBATCH = """#!/bin/sh
cp "$1" "$SEEN"
echo "Submitted batch job 4711"
"""


# In the fourth step of its first run, rank 1 sends what Slurm sends before a job goes: to all
# processes of the job, of which only the launcher does something about it.
REQUEUED = """\
import os
import signal
from pathlib import Path

import samples


class Samples(samples.Samples):
    def __getitem__(self, index):
        if self.read == 28 and os.environ.get("RANK") == "1" and not Path("warned").exists():
            Path("warned").touch()
            for process in (os.getpid(), os.getppid()):
                os.kill(process, signal.SIGTERM)
                os.kill(process, signal.SIGUSR2)
        return super().__getitem__(index)
"""


@pytest.fixture
def batch_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the file that is given to sbatch can be read."""
    commands = place / "bin"
    commands.mkdir()
    for name in ("sbatch", "srun"):
        (commands / name).write_text(SBATCH)
        (commands / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(place / "batch.sh"))
    return place / "batch.sh"


def submitted(*keys: str) -> Any:
    """What becomes of the recipe `small` as a job."""
    return submit(load(["recipe=small", "launch=slurm", *keys]), Path.cwd() / "out")


def test_one_task_a_node_with_what_its_ranks_need(batch_file: Path) -> None:
    slurm = ["partition=big", "minutes=90", "account=lab", "extra.constraint=fast"]
    keys = ["placement.axes.tensor=4", "launch.nnodes=2", "launch.threads=3"]
    made = submitted(*keys, *(f"launch.slurm.{text}" for text in slurm))
    assert made.job.job_id == "4711"
    lines = batch_file.read_text().splitlines()
    flags = (
        "nodes=2 ntasks-per-node=1 cpus-per-task=6 partition=big time=90 account=lab"
        " constraint=fast job-name=flowrun-small signal=USR2@120"
    )
    assert {f"#SBATCH --{flag}" for flag in flags.split()} <= set(lines)
    assert any(line.startswith("srun ") for line in lines)


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("train.steps=4", True),
        ("launch.device=cpu", False),
        ("launch.slurm.gpus_per_node=2", False),
    ],
)
def test_a_job_without_gpus_says_so(batch_file: Path, key: str, told: bool) -> None:
    assert ("no GPU was asked for" in str(submitted(key))) == told


def test_ranks_that_the_hosts_do_not_divide_are_not_submitted(batch_file: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be divided over 3 hosts"):
        submitted("launch.nnodes=3")
    assert not batch_file.exists()


def test_a_job_that_is_not_taken_is_told(batch_file: Path, place: Path) -> None:
    (place / "bin" / "sbatch").write_text("#!/bin/sh\necho no such partition >&2\nexit 1\n")
    with pytest.raises(RunError, match="Slurm refused the job"):
        submitted()


def test_nothing_but_a_run_is_submitted(batch_file: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="which submits a job"):
        run(load(["recipe=small", "launch=slurm"]), tmp_path / "out")


def test_what_cannot_run_is_not_submitted(batch_file: Path) -> None:
    with pytest.raises(RecipeError):
        submitted("sbp.hidden.weight.tensor=S(7)")
    assert not batch_file.exists()


def test_hosts_meet_at_the_first_on_a_port_of_the_job(batch_file: Path, tmp_path: Path) -> None:
    agent = Agent(load(["recipe=small", "launch=slurm", "launch.nnodes=2"]), tmp_path)
    hosts = [agent.on_host(host, "node7", "4711").launch for host in range(2)]
    assert [host.node_rank for host in hosts] == [0, 1]
    assert {host.rdzv_endpoint for host in hosts} == {"node7:22759"}
    assert {host.name for host in hosts} == {"local"}


def test_a_folder_with_checkpoints_is_not_submitted_to(batch_file: Path, place: Path) -> None:
    (place / "out" / FOLDER / "step_00000002").mkdir(parents=True)
    with pytest.raises(RecipeError, match="has checkpoints of another run"):
        submitted()
    assert not batch_file.exists()


def test_a_requeued_job_goes_on_from_the_last_checkpoint_with_steps_left(
    batch_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("damage", "about"):  # test_damaged_run.py has some
        monkeypatch.setattr(resume.Checkpoint, name, lambda checkpoint: "")
    recipe = load(["recipe=small", "train.steps=6", "model.weights=given.safetensors"])
    assert find_continuation(recipe, tmp_path) == (recipe, None)
    for name in ("step_00000002", "step_00000004", "step_00000005.partial", "step_00000006"):
        (tmp_path / FOLDER / name).mkdir(parents=True)
        (tmp_path / FOLDER / name / RECIPE).write_text(recipe.to_yaml())
    again, start = find_continuation(recipe, tmp_path)
    assert start == Checkpoint(tmp_path / FOLDER / "step_00000004", 4)
    assert again.weights == ""  # the checkpoint has them


def assert_trains_as_a_plain_run(place: Path, keys: list[str], *more: str) -> str:
    """A job of the local executor beside a run without one; return what the job has printed."""
    words = ["launch=slurm", "launch.slurm.cluster=local", "launch.slurm.wait=true", *more]
    job = Command(place, *keys, *words, run_folder(place / "job")).end(240)
    assert job.status == 0, job.err
    plain = Command(place, *keys, run_folder(place / "plain")).end(120)
    assert plain.status == 0, plain.err
    assert losses(place / "job") == losses(place / "plain")
    return job.out


@pytest.mark.processes
def test_a_job_that_is_put_back_into_the_queue_goes_on(place: Path) -> None:
    (place / "requeued.py").write_text(REQUEUED)
    data = "data._target_=requeued.Samples"
    # A step takes 2 ms, and a busy host's launcher some hundred of them to answer the signal.
    assert_trains_as_a_plain_run(place, ["recipe=small", "train.steps=1000"], data)
    assert (place / "warned").exists()
    report = json.loads((place / "job" / "report.json").read_text())
    assert report["first_step"] + report["steps"] == 1000
    assert 2 < report["first_step"] < 1000


@pytest.mark.processes
@pytest.mark.thorough
def test_a_job_of_two_hosts_by_the_local_executor(place: Path) -> None:
    small = ["recipe=small", "placement.axes.tensor=2"]
    said = assert_trains_as_a_plain_run(place, small, "launch.nnodes=2")
    assert "submitted: job" in said
    assert (place / "job" / "weights.safetensors").exists()
