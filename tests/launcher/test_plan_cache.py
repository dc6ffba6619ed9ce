"""A plan that was made before: the same plan and the same numbers, or made anew with a word why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flowrun.engine import compile as compiler
from flowrun.launcher import job as jobs
from flowrun.launcher import plan_cache, weights
from flowrun.launcher.job import Job
from flowrun.launcher.recipe import load
from flowrun.launcher.run import run
from support.command import Command, losses, run_folder, workplace


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the recipe `small`, and a module `samples` of its own."""
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("samples", None)
    yield workplace(tmp_path)
    sys.modules.pop("samples", None)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled, not taken from the cache."""
    made: list[str] = []
    for name in ("compile_training", "planned_evaluation"):
        whole = getattr(compiler, name)

        def counted(*arguments: object, whole=whole, name=name) -> object:  # type: ignore[no-untyped-def]
            made.append(name)
            return whole(*arguments)

        monkeypatch.setattr(jobs, name, counted)
    return made


def job(*overrides: str) -> Job:
    """A job with both of its plans."""
    found = Job(load(["recipe=small", "launch=virtual", *overrides]))
    assert found.training and found.evaluation
    return found


def test_a_second_job_takes_both_plans_as_they_were(place: Path, compiled: list[str]) -> None:
    first, second = job(), job()
    assert compiled == ["compile_training", "planned_evaluation"]
    assert (first.training, first.evaluation) == (second.training, second.evaluation)
    assert second.plans.notes == []


def test_a_run_with_a_kept_plan_is_the_same_to_the_last_bit(place: Path) -> None:
    for name in ("made", "kept"):
        run(load(["recipe=small", "launch=virtual"]), place / name)
    assert losses(place / "made") == losses(place / "kept")
    made, kept = (weights.load(place / name) for name in ("made", "kept"))
    assert made.keys() == kept.keys()
    assert all(torch.equal(made[name], kept[name]) for name in made)


@pytest.mark.parametrize(
    ("override", "again"),
    [
        ("train.steps=9", False),
        ("train.save=false", False),
        ("engine.trace=true", False),
        ("eval.batches=1", False),
        ("model.hidden=32", True),
        ("train.batch_size=16", True),
        ("train.seed=1", True),
        ("placement.axes.tensor=4", True),
        ("optim.lr=0.5", True),
        ("optim.schedule={name: LinearLR, total_iters: 3}", True),
        ("engine.register_slots=3", True),
        ("hardware.fp32.flops=1e9", True),
        ("engine.cache=false", True),
    ],
)
def test_what_makes_another_plan_is_compiled(
    place: Path, compiled: list[str], override: str, again: bool
) -> None:
    job()
    compiled.clear()
    job(override)
    assert bool(compiled) == again


def test_a_changed_source_file_makes_the_plan_anew(place: Path, compiled: list[str]) -> None:
    job()
    compiled.clear()
    imported = sys.modules["samples"].__file__
    assert imported
    os.utime(imported, ns=(1, 1))
    found = job()
    assert compiled == ["compile_training", "planned_evaluation"]
    assert "samples.py has changed" in found.plans.notes[0]
    assert job().plans.notes == []


def test_a_broken_file_is_made_anew(
    place: Path, compiled: list[str], no_plans_of_other_tests: Path
) -> None:
    job()
    for file in no_plans_of_other_tests.iterdir():
        file.write_bytes(file.read_bytes()[:-100])
    compiled.clear()
    found = job()
    assert compiled == ["compile_training", "planned_evaluation"]
    assert "is broken" in found.plans.notes[0]
    assert job().plans.notes == []


def test_a_folder_that_cannot_be_written_is_told(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "samples.py"))
    assert "no plan is kept" in job().plans.notes[0]


def test_the_longest_unused_files_go(
    place: Path, monkeypatch: pytest.MonkeyPatch, no_plans_of_other_tests: Path
) -> None:
    monkeypatch.setattr(plan_cache, "MOST_FILES", 2)
    job()
    kept = set(no_plans_of_other_tests.iterdir())
    for file in kept:
        os.utime(file, ns=(1, 1))
    job("model.hidden=32")
    left = set(no_plans_of_other_tests.iterdir())
    assert len(left) == 2
    assert not left & kept


@pytest.mark.processes
def test_processes_train_alike_with_a_kept_plan(place: Path) -> None:
    for name in ("made", "kept"):
        ended = Command(place, "recipe=small", run_folder(place / name)).end()
        assert (ended.status, ended.err) == (0, "")
    assert losses(place / "made") == losses(place / "kept")
    reports = [json.loads((place / name / "report.json").read_text()) for name in ("made", "kept")]
    assert reports[0]["foreseen"] == reports[1]["foreseen"]


def test_a_kept_plan_needs_neither_capture_nor_checkpoints(place: Path) -> None:
    loaded = (
        "import sys; import flowrun.launcher.run\n"
        "from flowrun.launcher.job import Job; from flowrun.launcher.recipe import load\n"
        "job = Job(load(['recipe=small', 'launch=virtual'])); job.training; job.evaluation\n"
        "from flowrun.engine.runtime.live_bytes import LiveBytes\n"
        "with LiveBytes(): job.model.hidden.weight + 1\n"
        "heavy = ('torch._dynamo', 'torch.distributed.checkpoint', 'sympy')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    seen = [
        subprocess.run(
            [sys.executable, "-c", loaded], cwd=place, text=True, capture_output=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert "torch._dynamo" in seen[0]
    assert seen[1] == "[]\n"
