"""All that a training consists of is in a checkpoint: a run that goes on has, after its last step,
what a run that never stopped has, states and buffers included, bit for bit.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flowrun.engine.errors import RecipeError
from flowrun.engine.runtime.drivers.logical_checkpoint import read_contents, read_whole
from flowrun.launcher.commands.resume import checkpoint_of, compose_resumed
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.resumed import put_at
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import FOLDER
from support.runs.command import losses
from support.runs.workplace import working_in

NET = """\
from torch import nn


def net() -> nn.Module:
    # Statistics that forward changes, and random numbers.
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4)
    )


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch["labels"])


def steep_loss(output, batch):
    # Its gradients overflow in fp16 at the first scale.
    return 64 * loss(output, batch)


def update(param, grad, average, first=None, *, lr, step, beta=0.9):
    average = beta * average + (1 - beta) * grad
    return param - lr * average / step - 0.01 * (param - first), average, first
"""
RECIPE = """\
defaults: [/optim: adamw, /launch: virtual]
model: {_target_: net.net}
data: {_target_: samples.Samples}
task: {inputs: {input: images}, loss: {_target_: net.loss}}
placement: {axes: {data: 2}}
eval: {batches: 0}
optim:
  ema: 0.9
  warmup_steps: 2
  schedule: {name: CosineAnnealingLR}
  groups: {"*.bias": {lr: 0.01}}
train: {batch_size: 8, micro_batches: 2, steps: 4, save_every: 2, keep: 0}
"""
HALF = 2  # steps that the checkpoint has
SAME = 1e-5  # relative: float32 sums in another order

KINDS = {
    "adamw": ("optim.clip_norm=0.5", "eval.batches=1", "eval.every=2"),
    "ZeRO 2, traced": ("optim=lamb", "zero.stage=2", "zero.min_size=1"),
    "own": ("optim._target_=net.update", "optim.beta=0.8"),
    "Adafactor": ("optim._target_=torch.optim.Adafactor", "optim.weight_decay=0.1"),
    "fp16": ("precision.dtype=fp16", "task.loss._target_=net.steep_loss"),
    "mirrored": ("view=mirrored",),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory, with the runs of `whole`."""
    with working_in(tmp_path_factory.mktemp("states")) as place:
        (place / "net.py").write_text(NET)
        (place / "recipes" / "states.yaml").write_text(RECIPE)
        yield place


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def whole(place: Path, kind: str) -> Path:
    """The folder of a run of four steps with a checkpoint after two, made once."""
    folder = place / kind
    if not folder.exists():
        run(load(["recipe=states", *KINDS[kind]]), folder)
    return folder


def resume(stopped: Path, folder: Path, *overrides: str) -> Path:
    """A copy of a run, gone on with from its first checkpoint."""
    shutil.copytree(stopped, folder)
    shutil.rmtree(folder / FOLDER / f"step_{2 * HALF:08d}")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    start = checkpoint_of(folder)
    run(compose_resumed(start, list(overrides)), folder, start=start)
    return folder


def everything(folder: Path) -> dict[str, Tensor]:
    """What the last checkpoint holds, and the two files of weights."""
    last = checkpoint_of(folder).folder
    found = read_whole(last, read_contents(last))
    for name in (weights.FILE, weights.AVERAGES):
        found |= {f"{name}/{key}": value for key, value in load_file(folder / name).items()}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_all_goes_on_as_if_it_had_never_stopped(place: Path, tmp_path: Path, kind: str) -> None:
    never = whole(place, kind)
    again = resume(never, tmp_path / "again")
    assert losses(again) == losses(never)
    found, expected = everything(again), everything(never)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


OF_TENSOR = ("placement.axes={data: 1, tensor: 2}", "placement.stages=2", "zero.stage=0")
SHARDED = ("zero.axis=data", "zero.stage=3", "zero.min_size=1")


@pytest.mark.parametrize(
    ("kind", "other"),
    [("own", OF_TENSOR), ("Adafactor", SHARDED), ("ZeRO 2, traced", OF_TENSOR), ("adamw", SHARDED)],
)
def test_all_goes_on_in_another_layout(
    place: Path, tmp_path: Path, kind: str, other: tuple[str, ...]
) -> None:
    never = whole(place, kind)
    again = resume(never, tmp_path / "again", *other)
    assert losses(again) == pytest.approx(losses(never), rel=SAME)


LATER = "optim.groups={0.*: {frozen_until: 2}}"
FROZEN, TRAINED = (f"optim.groups={{0.*: {{frozen: {word}}}}}" for word in ("true", "false"))


def test_what_trains_from_a_resume_on_is_as_what_was_frozen_until_then(
    place: Path, tmp_path: Path
) -> None:
    """As torch's add_param_group: states and their steps begin there."""
    run(load(["recipe=states", LATER]), tmp_path / "never")
    run(load(["recipe=states", FROZEN]), tmp_path / "frozen")
    again = resume(tmp_path / "frozen", tmp_path / "again", TRAINED)
    assert losses(again) == pytest.approx(losses(tmp_path / "never"), rel=SAME)
    found, expected = everything(again), everything(tmp_path / "never")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert checkpoint_of(again).about().trained == {
        **dict.fromkeys(("0.weight", "0.bias"), HALF),
        **dict.fromkeys(("1.weight", "1.bias", "4.weight", "4.bias"), 0),
    }


@pytest.mark.parametrize(
    ("kind", "override", "note"),
    [
        ((FROZEN,), TRAINED, "2 parameters (0.bias, 0.weight) train from step 2 on"),
        ((), FROZEN, "2 parameters (0.bias, 0.weight) train no more"),
    ],
)
def test_more_or_fewer_trained_parameters_are_noted(
    place: Path, tmp_path: Path, kind: tuple[str, ...], override: str, note: str
) -> None:
    run(load(["recipe=states", *kind, "train.steps=2"]), tmp_path)
    start = checkpoint_of(tmp_path)
    recipe = compose_resumed(start, [override, "train.steps=4"])
    assert any(note in each for each in put_at(Job(recipe, start), start))


def test_averages_are_a_file_of_the_models_names(place: Path) -> None:
    trained, averaged = (
        load_file(whole(place, "adamw") / name) for name in (weights.FILE, weights.AVERAGES)
    )
    assert averaged.keys() == trained.keys()
    apart = {name for name in trained if not torch.equal(trained[name], averaged[name])}
    assert apart == {name for name in trained if "running" not in name and "num" not in name}


def test_the_loss_scale_is_a_state(place: Path) -> None:
    start = checkpoint_of(whole(place, "fp16"), HALF).folder
    assert read_whole(start, ["loss_scale"])["loss_scale"].item() < 2**16


def test_a_rank_more_takes_the_first_ones_buffers(place: Path, tmp_path: Path) -> None:
    four = "placement.axes.data=4", "train.micro_batches=1"
    again = resume(whole(place, "mirrored"), tmp_path / "again", *four)
    start = checkpoint_of(again, HALF).folder
    assert "rank1/1.running_mean" in read_contents(start)
    assert "rank3/1.running_mean" not in read_contents(start)
    assert "rank3/1.running_mean" in read_contents(checkpoint_of(again).folder)


@pytest.mark.parametrize(
    ("override", "key"), [("view=mirrored", "view"), ("precision.dtype=fp16", "precision.dtype")]
)
def test_another_training_is_refused(place: Path, tmp_path: Path, override: str, key: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resume(whole(place, "own"), tmp_path / "again", override)
    assert caught.value.where == key
