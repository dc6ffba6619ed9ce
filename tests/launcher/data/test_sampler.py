"""data.order and data.collate: which samples a step reads, and how items become a batch, by
functions of the user's; the same in any layout and after a resume.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.resume import checkpoint_of, compose_resumed
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from flowrun.launcher.store.checkpoint import FOLDER
from support.runs.command import losses
from support.runs.workplace import working_in

OWN = """\
import torch
from torch import nn
from torch.utils.data import Dataset

LENGTH = 6


class Texts(Dataset):
    # Items are tuples of unlike length.
    def __len__(self):
        return 48

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        length = 1 + index % LENGTH
        return torch.randint(1, 9, (length,), generator=draw), index % 3 == 0


def padded(items, length=LENGTH):
    ids = torch.zeros(len(items), length, dtype=torch.long)
    for row, (tokens, _) in zip(ids, items):
        row[: len(tokens)] = tokens
    return {"ids": ids, "labels": torch.tensor([int(label) for _, label in items])}


def longest(items):
    return padded(items, max(len(tokens) for tokens, _ in items))


def easy_first(seed, epoch, numbers, num_samples):
    # A curriculum: the first epoch goes through the samples in order of length.
    order = sorted(range(num_samples), key=lambda k: (k % LENGTH, k))
    return torch.tensor(order)[numbers]


def balanced(seed, epoch, numbers, data, num_samples):
    # Each class as often, whatever its share of the samples.
    labels = torch.tensor([int(data[k][1]) for k in range(num_samples)])
    chances = 1.0 / labels.bincount()[labels]
    generator = torch.Generator().manual_seed(seed * 1000 + epoch)
    return torch.multinomial(chances, num_samples, True, generator=generator)[numbers]


def drawn_anew(seed, epoch, numbers):
    return torch.randint(0, 40, (len(numbers),))


def net():
    return nn.Sequential(nn.Embedding(9, 8), nn.Flatten(), nn.Linear(8 * LENGTH, 2))


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch["labels"])
"""
RECIPE = """\
defaults: [/optim: adamw, /launch: virtual]
model: {_target_: own_data.net}
data:
  _target_: own_data.Texts
  collate: {_target_: own_data.padded}
task: {inputs: {input: ids}, loss: {_target_: own_data.loss}}
eval: {batches: 1, fraction: 0.17}
train: {batch_size: 8, micro_batches: 2, steps: 8, save_every: 4, keep: 0}
"""
WEIGHTED = "data.order={_target_: flowrun.models.sampling.draw_by_weight, weights: weights.npy}"
OTHER = ("placement.axes={tensor: 2}", "placement.stages=2", "train.micro_batches=4")
SAME = 1e-5  # relative: float32 sums in another order


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with working_in(tmp_path_factory.mktemp("order")) as place:
        (place / "own_data.py").write_text(OWN)
        (place / "recipes" / "order.yaml").write_text(RECIPE)
        np.save(place / "weights.npy", np.arange(40) % 5)
        yield place


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def chosen(*overrides: str) -> list[int]:
    """Indices of the samples of all steps."""
    sampler = Job(load(["recipe=order", *overrides]), values=False).materials.sampler
    return [sampler.index(step, k, row) for step in range(8) for k in range(2) for row in range(4)]


def test_weights_say_how_often_a_sample_is_drawn(place: Path) -> None:
    found = np.bincount(np.array(chosen(WEIGHTED, "train.steps=8")) % 5, minlength=5)
    assert found[0] == 0 and found.sum() == 64 and found[4] > found[1]


def test_classes_are_drawn_as_often(place: Path) -> None:
    found = chosen("data.order._target_=own_data.balanced")
    third = sum(k % 3 == 0 for k in found)
    assert 22 < third < 42  # of 64; 21 without
    assert max(found) < 40  # what is held out is not trained on


def test_a_curriculum_is_followed(place: Path) -> None:
    lengths = [k % 6 for k in chosen("data.order._target_=own_data.easy_first")]
    assert lengths[:40] == sorted(lengths[:40]) and lengths[40:] == lengths[:24]


@pytest.mark.parametrize("order", [WEIGHTED, "data.order._target_=own_data.easy_first"])
def test_an_order_resumed_in_another_layout_is_as_if_it_had_never_stopped(
    place: Path, tmp_path: Path, order: str
) -> None:
    run(load(["recipe=order", order]), tmp_path / "never")
    shutil.copytree(tmp_path / "never", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / FOLDER / "step_00000008")
    start = checkpoint_of(tmp_path / "again")
    run(compose_resumed(start, [*OTHER]), tmp_path / "again", start=start)
    assert losses(tmp_path / "again") == pytest.approx(losses(tmp_path / "never"), rel=SAME)


WRONG = {
    "data.order._target_=own_data.drawn_anew": ("data.order", "from call to call"),
    "data.order={_target_: flowrun.models.sampling.draw_by_weight, weights: [1, 2]}": (
        "data.order",
        r"\(2,\) are the weights, and 40 the training samples",
    ),
    "data.order=shuffled": ("data.order", "names no function"),
    "data.order={_target_: own_data.easy_first, hard: 1}": ("data.order.hard", "no argument"),
    "data.collate._target_=own_data.net": ("data._target_", "takes 0 positional"),
    "data.collate._target_=own_data.loss": ("data.collate", "needs the argument 'batch'"),
}


@pytest.mark.parametrize("override", WRONG)
def test_what_cannot_be_is_a_located_error(place: Path, override: str) -> None:
    where, problem = WRONG[override]
    with pytest.raises(RecipeError, match=problem) as error:
        chosen(override)
    assert error.value.where == where


def test_a_batch_of_another_shape_ends_the_run_by_its_name(place: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="pad all batches to one"):
        run(load(["recipe=order", "data.collate._target_=own_data.longest"]), tmp_path)


def test_items_are_collated_by_the_function(place: Path) -> None:
    sampler = Job(load(["recipe=order"]), values=False).materials.sampler
    batch = sampler(0, 0, slice(0, 4))
    assert batch["ids"].shape == (4, 6) and batch["labels"].tolist() == [
        int(sampler.index(0, 0, row) % 3 == 0) for row in range(4)
    ]
    assert torch.equal(batch["ids"][2:], sampler(0, 0, slice(2, 4))["ids"])
