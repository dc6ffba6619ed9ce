"""A run's folder in which something is not as it was written: said before anything starts, with the
checkpoint to take instead; and what is the user's own there stays.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.export import export
from flowrun.launcher.commands.resume import checkpoint_of, compose_resumed, find_continuation
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.report.metric_lines import list_lines_before
from flowrun.launcher.run import run
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import FOLDER, Checkpoint, find_all, prepare
from flowrun.launcher.store.run_files import METRICS
from support.runs.workplace import working_in


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run with checkpoints after 2 and 4 steps."""
    with working_in(tmp_path_factory.mktemp("runs")) as place:
        run(load(["recipe=small", "launch=virtual", "train.save_every=2"]), place / "whole")
        yield place / "whole"


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


class Hostile:
    """Its pickle makes a folder."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, ("hostile",)


Damage = Callable[[Path], object]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path, at: float = 1 / 3, bit: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[int(at * (len(content) - 1))] ^= bit
    file.write_bytes(content)


def garbage(file: Path) -> None:
    file.write_bytes(b"\xff\x00\xfe" * 50)


def instead(make: Damage) -> Damage:
    """What replaces a file by something else of its name."""
    return lambda file: (file.unlink(), make(file))


SHARD = "rank00000.safetensors"
ANYTHING: dict[str, Damage] = {
    "gone": Path.unlink,
    "cut": cut,
    "empty": lambda file: file.write_bytes(b""),
    "flipped": flip,
    "garbage": garbage,
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "a folder": instead(Path.mkdir),
    "nowhere": instead(lambda file: file.symlink_to("nowhere")),
}
A_LIST: dict[str, Damage] = {"a list": lambda file: file.write_text("[1, 2]")}
OF_STEP_2: dict[str, Damage] = {
    "of step 2": lambda file: shutil.copy(file.parents[1] / "step_00000002" / file.name, file)
}
OF_FILES: dict[str, dict[str, Damage]] = {
    SHARD: {
        **ANYTHING,
        **OF_STEP_2,
        "shorter": lambda file: os.truncate(file, file.stat().st_size - 1),
        "flipped at first": lambda file: flip(file, at=0),
        "flipped at last": lambda file: flip(file, at=1, bit=128),
        "hostile": lambda file: file.write_bytes(pickle.dumps(Hostile())),
    },
    "checkpoint.json": {
        **ANYTHING,
        **OF_STEP_2,
        **A_LIST,
        "other pickle": lambda file: file.write_bytes(pickle.dumps([1, 2])),
    },
    "recipe.yaml": {**ANYTHING, **A_LIST},
}


@pytest.mark.parametrize(
    ("name", "how"), [(name, how) for name, damages in OF_FILES.items() for how in damages]
)
def test_a_checkpoint_that_is_not_whole_is_told_with_the_one_before(
    folder: Path, name: str, how: str, tmp_path: Path
) -> None:
    OF_FILES[name][how](folder / FOLDER / "step_00000004" / name)
    with pytest.raises(RecipeError) as told:
        checkpoint_of(folder)
    assert "checkpoints/step_00000004 is not whole" in told.value.problem
    assert told.value.instead.startswith("--step 2 takes the checkpoint before it")
    assert checkpoint_of(folder, 2).step == 2
    assert not (tmp_path / "hostile").exists()


def test_files_of_another_rank_are_told(folder: Path) -> None:
    newest = folder / FOLDER / "step_00000004"
    files = [newest / SHARD, newest / "rank00001.safetensors"]
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, reversed(contents), strict=True):
        file.write_bytes(content)
    with pytest.raises(RecipeError, match=SHARD):
        checkpoint_of(folder)


def test_where_none_is_whole_nothing_is_offered(folder: Path) -> None:
    for checkpoint in find_all(folder):
        (checkpoint.folder / SHARD).unlink()
    with pytest.raises(RecipeError, match="There is no whole one before it"):
        checkpoint_of(folder)
    with pytest.raises(RecipeError, match=r"no checkpoint in .* is whole; the newest: rank00000"):
        find_continuation(resumed_recipe(folder), folder)


def resumed_recipe(folder: Path, *overrides: str) -> Recipe:
    return load([f"recipe={folder / 'recipe.yaml'}", "train.steps=8", *overrides])


def test_a_run_that_was_put_back_goes_on_from_the_newest_that_is_whole(folder: Path) -> None:
    cut(folder / FOLDER / "step_00000004" / SHARD)
    start = find_continuation(resumed_recipe(folder), folder)[1]
    assert start is not None
    assert start.step == 2


def test_export_refuses_a_checkpoint_that_is_not_whole(folder: Path) -> None:
    (folder / weights.FILE).unlink()
    flip(folder / FOLDER / "step_00000004" / SHARD)
    with pytest.raises(RecipeError, match=f"{SHARD}: it has changed since it was written"):
        export(folder)
    assert export(folder, 2).exists()


# ---- the run's own recipe and metrics ------------------------------------------------------------


@pytest.mark.parametrize("how", ["gone", "cut", "empty", "garbage", "a list"])
def test_a_recipe_that_lost_keys_is_told_with_the_copy(folder: Path, how: str) -> None:
    OF_FILES["recipe.yaml"][how](folder / "recipe.yaml")
    with pytest.raises(RecipeError) as told:
        compose_resumed(checkpoint_of(folder), ["train.steps=8"])
    copy = folder / FOLDER / "step_00000004" / "recipe.yaml"
    assert told.value.instead == f"cp {copy} {folder / 'recipe.yaml'} brings it back."
    shutil.copy(copy, folder / "recipe.yaml")
    assert compose_resumed(checkpoint_of(folder), ["train.steps=8"]).train.steps == 8


@pytest.mark.parametrize("text", ["no JSON\n{}\n", "[1]\n{}\n", '{"loss": 1}\n{}\n', "\n{}\n"])
def test_lines_that_are_no_metrics_are_told(tmp_path: Path, text: str) -> None:
    (tmp_path / METRICS).write_text(text)
    with pytest.raises(RecipeError, match="line 1 is not a JSON object with a step"):
        list_lines_before(tmp_path / METRICS, 4)


def test_metrics_that_cannot_be_read_are_told_before_the_start(folder: Path) -> None:
    start = checkpoint_of(folder)
    garbage(folder / METRICS)
    with pytest.raises(RecipeError, match="it cannot be read: UnicodeDecodeError"):
        run(compose_resumed(start, ["train.steps=8"]), folder, start=start)
    (folder / METRICS).unlink()
    (folder / METRICS).mkdir()
    with pytest.raises(RecipeError, match="it cannot be read: IsADirectoryError"):
        run(compose_resumed(start, ["train.steps=8"]), folder, start=start)


def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    assert list_lines_before(tmp_path / METRICS, 2) == ['{"step": 0}', '{"step": 1}']


# ---- what is the user's own ----------------------------------------------------------------------


def test_what_flowrun_did_not_write_stays(folder: Path) -> None:
    checkpoints = folder / FOLDER
    own = [
        folder / "notes.partial",
        folder / "weights.safetensors.partial.partial",
        checkpoints / "step_2.partial",
        checkpoints / "mine.partial",
        checkpoints / "step_99",
        checkpoints / "step_00000099",
    ]
    for file in own:
        file.write_text("mine")
    folders = [folder / "other.partial", checkpoints / "step_00000002_copy2"]
    for each in folders:
        each.mkdir()
    left = [checkpoints / "step_00000005.partial", checkpoints / "gone_step_00000001.partial"]
    for each in left:
        each.mkdir()
    (folder / "weights.safetensors.partial").touch()
    (folder / "ema.safetensors.partial").mkdir()
    prepare(folder, resumed=True)
    assert all(each.exists() for each in (*own, *folders, folder / "ema.safetensors.partial"))
    assert not any(each.exists() for each in (*left, folder / "weights.safetensors.partial"))
    assert [checkpoint.step for checkpoint in find_all(folder)] == [2, 4]


def test_a_checkpoint_that_is_removed_while_it_is_read_gives_way_to_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts that train remove what they keep no longer while another one comes."""
    damage = Checkpoint.damage

    def look_slowly(self: Checkpoint) -> str:
        found = damage(self)
        if self.step == 4:
            newer = folder / FOLDER / "step_00000005"
            self.folder.rename(newer)
            about = replace(Checkpoint(newer, 5).about(), step=5)
            (newer / "checkpoint.json").write_text(about.to_json())
        return found

    monkeypatch.setattr(Checkpoint, "damage", look_slowly)
    recipe = resumed_recipe(folder)
    start = find_continuation(replace(recipe, train=replace(recipe.train, steps=9)), folder)[1]
    assert start and start.step == 5
    shutil.rmtree(start.folder)
    assert start.about().step == 5


def test_a_training_goes_on_beside_a_copied_checkpoint(folder: Path) -> None:
    copy = folder / FOLDER / "step_00000004_copy2"
    shutil.copytree(folder / FOLDER / "step_00000004", copy)
    start = checkpoint_of(folder)
    run(compose_resumed(start, ["train.steps=6"]), folder, start=start)
    assert [checkpoint.step for checkpoint in find_all(folder)] == [4, 6]
    assert json.loads((copy / "checkpoint.json").read_text())["step"] == 4


def test_only_shards_of_ranks_are_shards(tmp_path: Path) -> None:
    for name in ("weights.rank00001.safetensors", "weights.rank_mine.safetensors"):
        (tmp_path / name).touch()
    weights.drop_shards(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["weights.rank_mine.safetensors"]
