"""A run's folder: what is in it after a run on the virtual cluster, and weights on disk."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrun.engine.errors import RecipeError, RunError
from flowrun.engine.runtime.rank.rank import Rank
from flowrun.engine.runtime.rank.shards import choose_shards
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.report.report import advise
from flowrun.launcher.run import run
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import lock_run_folder
from support.runs.command import losses
from support.runs.workplace import working_in


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with working_in(tmp_path_factory.mktemp("run")) as place:
        run(load(["recipe=small", "launch=virtual", "eval.every=2"]), place / "out")
        yield place / "out"


def test_the_run_leaves_tensorboard_events(folder: Path) -> None:
    assert list(folder.glob("events.out.tfevents.*"))


def test_one_run_writes_to_a_folder(tmp_path: Path) -> None:
    with (
        lock_run_folder(tmp_path, hosts=1),
        lock_run_folder(tmp_path, hosts=2),  # hosts of one run may share it
        pytest.raises(RecipeError, match="another run is writing"),
    ):
        lock_run_folder(tmp_path, hosts=1).__enter__()
    with lock_run_folder(tmp_path, hosts=1):
        pass


def lines_of(folder: Path, evaluated: bool) -> list[dict[str, Any]]:
    """Of metrics.jsonl, for steps or for evaluations."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if ("validation" in line) == evaluated]


@pytest.fixture
def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


def test_a_line_of_metrics_for_each_step(folder: Path) -> None:
    steps = lines_of(folder, evaluated=False)
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    assert all({"step", "loss", "step_s", "tokens_per_s"} <= line.keys() for line in steps)


def test_a_line_of_metrics_for_each_evaluation(folder: Path, report: dict[str, Any]) -> None:
    found = lines_of(folder, evaluated=True)
    assert [line["step"] for line in found] == [1, 3]
    assert found[0]["validation"] != found[1]["validation"] == report["validation"]


def test_losses_are_written_in_full_precision(folder: Path, report: dict[str, Any]) -> None:
    assert (report["first_loss"], report["last_loss"]) == (losses(folder)[0], losses(folder)[-1])


def test_the_report_has_the_same_keys_foreseen_and_measured(report: dict[str, Any]) -> None:
    keys = {"step_s", "peak_bytes", "sent_bytes"}
    assert keys <= report["foreseen"].keys() & report["measured"].keys()


def test_nothing_is_said_of_the_time_of_ranks_in_one_process(report: dict[str, Any]) -> None:
    assert report["advice"] == ""


@pytest.mark.parametrize(
    ("measured_s", "said"), [(0.1, "0.5 x as long"), (0.25, ""), (0.16, ""), (0.5, "2.5 x as long")]
)
def test_a_profile_that_does_not_fit_is_named(measured_s: float, said: str) -> None:
    found = advise("cpu", 0.2, measured_s, read_s=0.01)
    assert bool(found) == bool(said) and said in found
    assert not said or "flowrun calibrate" in found
    assert advise("", 0.2, measured_s, read_s=0.01) == ""  # this machine's own
    samples = advise("", 0.2, measured_s, read_s=0.09)
    assert ("waits 90.0 ms of it for samples" in samples) == (measured_s == 0.5)


def test_bytes_measured_are_the_bytes_foreseen(report: dict[str, Any]) -> None:
    assert report["measured"]["sent_bytes"] == report["foreseen"]["sent_bytes"]


def test_a_failed_step_names_rank_actor_and_the_users_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    recipe = load(["recipe=small", "launch=virtual", "train.steps=8", "+data.fail=raise"])
    said = (
        r"rank \d, actor batch\n  ValueError: sample 40 is not there\n"
        r"  item \d+ of the data set\n  samples.py:\d+ in "
    )
    with pytest.raises(RunError, match=said):
        run(recipe, folder.parent / "failed")


# ---- weights -------------------------------------------------------------------------------------


@pytest.fixture
def shards(folder: Path, workplace: Path) -> Path:
    """A folder with the shards of both ranks of `small`, cut from its trained weights."""
    job = Job(load([f"recipe={folder / 'recipe.yaml'}"]))
    plan = job.training.plan
    trained = weights.load(folder)
    for rank in (0, 1):
        body = Rank(plan, rank, job.materials.sampler, trained, torch.device("cpu"))
        shards = choose_shards(plan, rank, body.variables)
        weights.save_shards(workplace, rank, shards, job.about(4))
    return workplace


def test_what_the_file_cannot_hold_is_refused_before_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    recipe = load(["recipe=small", "launch=virtual"])
    wide = {name: ((1,), torch.complex128) for name in weights.load(folder)}
    monkeypatch.setattr(Job, "saved", wide)
    with pytest.raises(
        RecipeError, match=r"^train\.save\n  hidden\.weight is of torch\.complex128"
    ):
        run(recipe, folder.parent / "refused")
    assert not (folder.parent / "refused").exists()


def test_joined_shards_are_the_weights(folder: Path, shards: Path) -> None:
    weights.join_shards(shards, 2)
    joined, trained = weights.load(shards), weights.load(folder)
    assert joined.keys() == trained.keys()
    assert all(torch.equal(joined[name], trained[name]) for name in trained)


def test_joining_removes_the_shards(shards: Path) -> None:
    weights.join_shards(shards, 2)
    assert [file.name for file in shards.glob("weights*")] == [weights.FILE]


def test_a_missing_shard_leaves_the_others_alone(shards: Path) -> None:
    (shards / "weights.rank00001.safetensors").unlink()
    with pytest.raises(RunError, match="rank00001"):
        weights.join_shards(shards, 2)
    assert (shards / "weights.rank00000.safetensors").exists()
