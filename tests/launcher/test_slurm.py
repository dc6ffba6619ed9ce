"""launch=slurm: what sbatch would be given, and a job of submitit's local executor."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.recipe import load
from flowrun.launcher.slurm import Agent, submit
from support.command import Command, losses, run_folder, workplace

# Stands where Slurm would: keeps the batch file and answers as sbatch does.
SBATCH = """#!/bin/sh
cp "$1" "$SEEN"
echo "Submitted batch job 4711"
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
