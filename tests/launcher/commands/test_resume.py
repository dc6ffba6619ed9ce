import contextlib
import io
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from flowrun.engine.errors import RecipeError, RunError
from flowrun.launcher.commands.resume import checkpoint_of, compose_resumed
from flowrun.launcher.job.resumed import differ
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.report.progress import Progress
from flowrun.launcher.run import run
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import FOLDER, Checkpoint, find_all
from support.runs.workplace import working_in

RUN = ("recipe=small", "launch=virtual", "optim=adamw", "eval.every=4", "train.keep=0")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with `whole`, a run of 6 steps with checkpoints after 2, 4 and 6."""
    with working_in(tmp_path_factory.mktemp("runs")) as place:
        run(load([*RUN, "train.steps=6", "train.save_every=2"]), place / "whole")
        yield place


@pytest.fixture
def stopped(place: Path, tmp_path: Path) -> Path:
    """The folder of the run as it was when it had been killed in its fourth step."""
    folder = tmp_path / "stopped"
    shutil.copytree(place / "whole", folder)
    for step in (4, 6):
        shutil.rmtree(folder / FOLDER / f"step_{step:08d}")
    (folder / FOLDER / "step_00000004.partial").mkdir()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:3]) + '{"step": 3, "lo')
    return folder


def resume(folder: Path, *overrides: str, step: int | None = None) -> Any:
    start = checkpoint_of(folder, step)
    return run(compose_resumed(start, list(overrides)), folder, start=start)


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line.get("loss"), line.get("validation")) for line in lines]


def same_weights(one: Path, other: Path) -> bool:
    left, right = weights.load(one), weights.load(other)
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def test_a_run_saves_when_asked_and_at_its_end(place: Path) -> None:
    assert [checkpoint.step for checkpoint in find_all(place / "whole")] == [2, 4, 6]


def test_resumed_equals_never_stopped(place: Path, stopped: Path) -> None:
    resume(stopped)
    assert numbers(stopped) == numbers(place / "whole")
    assert same_weights(stopped, place / "whole")


def test_the_report_is_of_the_steps_since(stopped: Path) -> None:
    report = resume(stopped)
    assert (report.first_step, report.steps) == (2, 4)


def test_an_earlier_checkpoint_replaces_what_came_after_it(place: Path, stopped: Path) -> None:
    resume(stopped)
    resume(stopped, "train.steps=3", "train.save_every=3", step=2)
    assert numbers(stopped) == [*numbers(place / "whole")[:3], numbers(stopped)[-1]]
    assert [checkpoint.step for checkpoint in find_all(stopped)] == [2, 3]


def test_the_newest_checkpoints_stay(stopped: Path) -> None:
    resume(stopped, "train.keep=1", "train.save_every=1")
    assert [file.name for file in (stopped / FOLDER).iterdir()] == ["step_00000006"]


def test_a_checkpoint_says_what_it_is(place: Path) -> None:
    about = checkpoint_of(place / "whole", 4).about()
    assert (about.step, about.seed, about.batch_size) == (4, 0, 8)
    assert about.names["hidden.weight"] == "hidden.weight"


def test_what_was_half_written_goes(stopped: Path) -> None:
    resume(stopped, "train.steps=3", "train.save_every=0")
    assert [file.name for file in (stopped / FOLDER).iterdir()] == ["step_00000002"]


# ---- told ----------------------------------------------------------------------------------------


def told(recipe: Recipe, folder: Path, start: Checkpoint | None = None) -> str:
    """What a person reads of a run that may fail."""
    console = Console(file=io.StringIO(), width=300)
    with contextlib.suppress(RunError):
        run(recipe, folder, Progress(console), start)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_is_not_as_it_was(stopped: Path) -> None:
    start = checkpoint_of(stopped)
    changed = compose_resumed(
        start, ["optim.lr=0.5", "placement.axes={data: 2}", "train.save_every=0"]
    )
    (line,) = (line for line in told(changed, stopped, start).splitlines() if "step 2;" in line)
    assert line == (
        "note: goes on from step 2; optim.lr 0.002 -> 0.5; train.save_every 2 -> 0; "
        "placement.axes.data not there -> 2"
    )


@pytest.mark.parametrize("saved", [True, False])
def test_a_run_that_fails_says_how_to_go_on_from_its_checkpoint(
    saved: bool, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    keys = ["train.save_every=1"] if saved else []
    said = told(load([*RUN, "train.steps=6", *keys, "+data.fail=raise"]), tmp_path / "out")
    last = f"note: flowrun resume {tmp_path / 'out'} goes on from step 2\n"
    assert said.endswith(last) if saved else "flowrun resume" not in said


# ---- refused -------------------------------------------------------------------------------------


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no complete checkpoint in(.|\n)*train\.save_every=N"):
        checkpoint_of(tmp_path)


def test_a_checkpoint_that_is_not_there(stopped: Path) -> None:
    with pytest.raises(RecipeError, match=r"--step 5\n.*no checkpoint of 5 steps\.\n  There is: 2"):
        checkpoint_of(stopped, 5)


@pytest.mark.parametrize(
    ("override", "key", "was"),
    [
        ("model.hidden=32", "model.hidden", "model.hidden was 16"),
        ("+data.talk=true", "data.talk", "it had no data.talk"),
        ("adapters={modules: [fc*], rank: 4}", "adapters.modules", "it had no adapters.modules"),
        ("train.seed=1", "train.seed", "train.seed was 0"),
        ("train.batch_size=16", "train.batch_size", "train.batch_size was 8"),
        ("eval.fraction=0.5", "eval.fraction", "eval.fraction was 0.25"),
        ("eval.batches=0", "eval.batches", "eval.batches was 2"),
    ],
)
def test_another_training_is_refused(stopped: Path, override: str, key: str, was: str) -> None:
    with pytest.raises(RecipeError, match=r"keeps the settings of its training") as caught:
        compose_resumed(checkpoint_of(stopped), [override])
    assert caught.value.where == key
    assert f": {was}." in caught.value.problem


def test_a_run_without_the_adapters_that_it_had_is_refused(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Checkpoint.recipe
    had = {"adapters": {"rank": 4, "alpha": 8.0, "modules": ["fc*"], "dropout": 0.0}}
    monkeypatch.setattr(Checkpoint, "recipe", lambda start: usual(start) | had)
    with pytest.raises(RecipeError, match=r"its training: adapters.modules was \['fc\*'\]\."):
        compose_resumed(checkpoint_of(stopped), [])


def test_a_number_that_is_none_is_no_change() -> None:
    assert not differ(math.nan, math.nan)
    assert differ(math.nan, 1.0) and differ(None, math.nan) and differ("a", "b")


def test_a_run_that_has_its_steps(place: Path, stopped: Path) -> None:
    with pytest.raises(RecipeError, match=r"train\.steps\n  the checkpoint is already at step 6\."):
        compose_resumed(checkpoint_of(place / "whole"), [])


def test_a_new_run_in_the_folder_of_another(stopped: Path) -> None:
    recipe = load([f"recipe={stopped / 'recipe.yaml'}"])
    with pytest.raises(RecipeError, match=r"has checkpoints of another run\.\n.*flowrun resume"):
        run(recipe, stopped)


def test_another_optimizer_lacks_its_states(stopped: Path) -> None:
    with pytest.raises(RecipeError, match=r"has no state momentum_buffer/") as caught:
        resume(stopped, "optim=sgd")
    assert caught.value.where == "optim"
