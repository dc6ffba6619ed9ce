"""launch=slurm: what sbatch would be given, and jobs of submitit's local executor."""

import json
import os
import stat
from pathlib import Path

import pytest

from flowrun.engine.errors import RecipeError, RunError
from flowrun.launcher.command_line.slurm import Agent, submit
from flowrun.launcher.commands import resume
from flowrun.launcher.commands.resume import find_continuation
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from flowrun.launcher.store.checkpoint import FOLDER, RECIPE, Checkpoint
from support.runs.command import Command, losses, run_folder, workplace

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
def batch_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the file that is given to sbatch can be read."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("sbatch", "srun"):
        (commands / name).write_text(SBATCH)
        (commands / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(tmp_path / "batch.sh"))
    place = workplace(tmp_path)
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    return tmp_path / "batch.sh"


def test_one_task_a_node_with_what_its_ranks_need(batch_file: Path, tmp_path: Path) -> None:
    slurm = ["partition=big", "minutes=90", "account=lab", "extra.constraint=fast"]
    recipe = load(
        [
            "recipe=small",
            "launch=slurm",
            "placement.axes.tensor=4",
            "launch.nnodes=2",
            "launch.threads=3",
            *(f"launch.slurm.{text}" for text in slurm),
        ]
    )
    assert submit(recipe, tmp_path / "out").job.job_id == "4711"
    lines = batch_file.read_text().splitlines()
    for flag in (
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=6",
        "--partition=big",
        "--time=90",
        "--account=lab",
        "--constraint=fast",
        "--job-name=flowrun-small",
        "--signal=USR2@120",
    ):
        assert f"#SBATCH {flag}" in lines
    assert any(line.startswith("srun ") for line in lines)


@pytest.mark.parametrize(
    ("keys", "told"),
    [([], True), (["launch.device=cpu"], False), (["launch.slurm.gpus_per_node=2"], False)],
)
def test_a_job_without_gpus_says_so(
    batch_file: Path, tmp_path: Path, keys: list[str], told: bool
) -> None:
    submitted = submit(load(["recipe=small", "launch=slurm", *keys]), tmp_path / "out")
    assert ("no GPU was asked for" in str(submitted)) == told


def test_ranks_that_the_hosts_do_not_divide_are_not_submitted(
    batch_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="cannot be divided over 3 hosts"):
        submit(load(["recipe=small", "launch=slurm", "launch.nnodes=3"]), tmp_path / "out")
    assert not batch_file.exists()


def test_a_job_that_is_not_taken_is_told(batch_file: Path, tmp_path: Path) -> None:
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho no such partition >&2\nexit 1\n")
    with pytest.raises(RunError, match="Slurm refused the job"):
        submit(load(["recipe=small", "launch=slurm"]), tmp_path / "out")


def test_nothing_but_a_run_is_submitted(batch_file: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="which submits a job"):
        run(load(["recipe=small", "launch=slurm"]), tmp_path / "out")


def test_what_cannot_run_is_not_submitted(batch_file: Path, tmp_path: Path) -> None:
    recipe = load(["recipe=small", "launch=slurm", "sbp.hidden.weight.tensor=S(7)"])
    with pytest.raises(RecipeError):
        submit(recipe, tmp_path / "out")
    assert not batch_file.exists()


def test_hosts_meet_at_the_first_on_a_port_of_the_job(batch_file: Path, tmp_path: Path) -> None:
    agent = Agent(load(["recipe=small", "launch=slurm", "launch.nnodes=2"]), tmp_path)
    hosts = [agent.on_host(host, "node7", "4711").launch for host in range(2)]
    assert [host.node_rank for host in hosts] == [0, 1]
    assert {host.rdzv_endpoint for host in hosts} == {"node7:24711"}
    assert {host.name for host in hosts} == {"local"}


def test_a_folder_with_checkpoints_is_not_submitted_to(batch_file: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / FOLDER / "step_00000002").mkdir(parents=True)
    with pytest.raises(RecipeError, match="has checkpoints of another run"):
        submit(load(["recipe=small", "launch=slurm"]), tmp_path / "out")
    assert not batch_file.exists()


def test_a_requeued_job_goes_on_from_the_last_checkpoint_with_steps_left(
    batch_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume.Checkpoint, "damage", lambda checkpoint: "")  # test_damaged_run.py
    recipe = load(["recipe=small", "train.steps=6", "model.weights=given.safetensors"])
    assert find_continuation(recipe, tmp_path) == (recipe, None)
    for name in ("step_00000002", "step_00000004", "step_00000005.partial", "step_00000006"):
        (tmp_path / FOLDER / name).mkdir(parents=True)
        (tmp_path / FOLDER / name / RECIPE).write_text(recipe.to_yaml())
    again, start = find_continuation(recipe, tmp_path)
    assert start == Checkpoint(tmp_path / FOLDER / "step_00000004", 4)
    assert again.weights == ""  # the checkpoint has them


@pytest.mark.processes
def test_a_job_that_is_put_back_into_the_queue_goes_on(tmp_path: Path) -> None:
    place = workplace(tmp_path)
    (place / "requeued.py").write_text(REQUEUED)
    words = ["launch=slurm", "launch.slurm.cluster=local", "launch.slurm.wait=true"]
    small = ["recipe=small", "train.steps=200"]
    data = "data._target_=requeued.Samples"
    job = Command(place, *small, *words, data, run_folder(place / "job")).end(240)
    assert job.status == 0, job.err
    assert (place / "warned").exists()
    report = json.loads((place / "job" / "report.json").read_text())
    assert report["first_step"] + report["steps"] == 200
    assert 2 < report["first_step"] < 200
    plain = Command(place, *small, run_folder(place / "plain")).end(120)
    assert plain.status == 0, plain.err
    assert losses(place / "job") == losses(place / "plain")


@pytest.mark.processes
def test_a_job_of_two_hosts_by_the_local_executor(tmp_path: Path) -> None:
    place = workplace(tmp_path)
    words = ["launch=slurm", "launch.slurm.cluster=local", "launch.slurm.wait=true"]
    small = ["recipe=small", "placement.axes.tensor=2"]
    job = Command(place, *small, *words, "launch.nnodes=2", run_folder(place / "job")).end(240)
    assert job.status == 0, job.err
    assert "submitted: job" in job.out
    plain = Command(place, *small, run_folder(place / "plain")).end(120)
    assert plain.status == 0, plain.err
    assert losses(place / "job") == losses(place / "plain")
    assert (place / "job" / "weights.safetensors").exists()
