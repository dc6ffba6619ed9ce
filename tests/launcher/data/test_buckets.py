"""data.buckets: the samples of a step have the length of the shortest bucket that holds them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml  # type: ignore[import-untyped]
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import default_collate

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.resume import find_continuation
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.report.notes import notes
from flowrun.launcher.run import run
from flowrun.models.sampling import sample_indices
from support.runs.workplace import end, place, workplace
from support.samples import long_texts

__all__ = ["end", "place", "workplace"]

STEPS, SAMPLES, BUCKETS = 12, 4, [4, 8, 16]
LAYOUTS = {
    "single": "",
    "data 2": "placement.axes.data=2",
    "tensor 2": "placement.axes.tensor=2 sbp.hidden.weight.tensor=S0 sbp.head.weight.tensor=S1",
    "stages 2": "placement.stages=2 train.micro_batches=2",
    "ZeRO 3": "placement.axes.data=2 zero.stage=3 zero.min_size=1",
}


def write_recipe(place: Path, **more: Any) -> None:
    (place / "long_texts.py").write_text(Path(long_texts.__file__).read_text())
    recipe = {
        "defaults": [{"/optim": "adamw"}, {"/launch": "virtual"}],
        "model": {"_target_": "long_texts.Pooled"},
        "data": {"_target_": "long_texts.Texts", "buckets": BUCKETS},
        "task": {"loss": {"_target_": "flowrun.models.losses.cross_entropy", "target": "label"}},
        "train": {"batch_size": SAMPLES, "steps": STEPS},
        "optim": {"eps": 1e-5},
        "eval": {"batches": 0},
        "log": [],
    }
    (place / "own.yaml").write_text(yaml.safe_dump({**recipe, **more}))


def plain_loop() -> tuple[list[float], list[int], nn.Module]:
    """Losses, the length of each step, and the model."""
    torch.manual_seed(0)
    model, data = long_texts.Pooled(), long_texts.Texts()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, (0.9, 0.95), 1e-5, 0.01)
    losses, lengths = [], []
    for step in range(STEPS):
        numbers = range(step * SAMPLES, (step + 1) * SAMPLES)
        chosen = sample_indices(0, numbers, len(data)).tolist()
        batch = default_collate([data[k] for k in chosen])
        lengths.append(min(n for n in BUCKETS if n >= max(data.lengths[k] for k in chosen)))
        loss = F.cross_entropy(model(batch["tokens"][:, : lengths[-1]]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, lengths, model


def losses_of(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def assert_equal(folder: Path, expected: dict[str, Tensor], close: float = 1e-5) -> None:
    found = load_file(folder / "weights.safetensors")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=close, atol=close)


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, pytest.param("processes", marks=pytest.mark.processes)]
)
def test_steps_of_several_lengths_are_those_of_a_plain_loop(layout: str, place: Path) -> None:
    write_recipe(place)
    words = LAYOUTS.get(layout, "launch=local placement.axes.data=2 launch.hang_s=60").split()
    run(load(["recipe=own.yaml", *words]), place / "out")
    losses, lengths, model = plain_loop()
    assert set(lengths) == set(BUCKETS)
    assert losses_of(place / "out") == pytest.approx(losses, rel=1e-5)
    assert_equal(place / "out", model.state_dict())


@pytest.mark.parametrize(("layout", "close"), [("data 2", 0.0), ("stages 2", 1e-5)])
def test_a_resumed_run_is_one_that_never_stopped(layout: str, close: float, place: Path) -> None:
    write_recipe(place)
    words = ["recipe=own.yaml", "train.save_every=5", "train.keep=0"]
    run(load([*words, "placement.axes.data=2"]), place / "out")
    whole = load_file(place / "out" / "weights.safetensors")
    for file in ("weights.safetensors", "report.json"):
        (place / "out" / file).unlink()
    for step in (10, STEPS):
        for file in (place / "out" / "checkpoints" / f"step_{step:08}").iterdir():
            file.unlink()
    recipe, start = find_continuation(load([*words, *LAYOUTS[layout].split()]), place / "out")
    assert start and start.step == 5
    run(recipe, place / "out", start=start)
    assert_equal(place / "out", whole, close)


def test_what_is_foreseen_is_of_the_longest_bucket_and_each_is_noted(place: Path) -> None:
    write_recipe(place)
    job = Job(load(["recipe=own.yaml"]), values=False)
    others = [other.training.rehearsal for _, other in job.others]
    whole = job.training.rehearsal
    assert whole.step_s == whole.first_step_s > max(other.first_step_s for other in others)
    assert whole.peak_bytes[0] > others[0].peak_bytes[0] > others[1].peak_bytes[0]
    noted = [note for note in notes(job) if note.startswith("a step of bucket")]
    assert [note.split(":")[0].split()[-1] for note in noted] == ["16", "8", "4"]


DATA = {"_target_": "long_texts.Texts", "buckets": BUCKETS}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no list": ({"data": {**DATA, "buckets": 8}}, "data.buckets", "are not lengths"),
    "falling": ({"data": {**DATA, "buckets": [8, 4]}}, "data.buckets", "the smallest first"),
    "too short": ({"data": {**DATA, "buckets": [4, 8]}}, "data.buckets", "an item is 12 long"),
    "too long": ({"data": {**DATA, "buckets": [4, 32]}}, "data.buckets", "no field is 32 long"),
    "squares": ({"data": {**DATA, "extra": 2}}, "data.buckets", "a bucket cuts its first dim"),
    "no lengths": (
        {"data": {"_target_": "flowrun.launcher.data.digits.Digits", "buckets": [64]}},
        "data.buckets",
        "Digits does not say how long",
    ),
    "other key": ({"view": "mirrored"}, "data.buckets", "combined with view=mirrored"),
    "updates": ({"updates": ["one"]}, "updates", "combined with data.buckets"),
}


@pytest.mark.parametrize(("more", "where", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_have_several_lengths_is_refused_at_its_key(
    more: dict[str, Any], where: str, problem: str, place: Path
) -> None:
    write_recipe(place, **more)
    with pytest.raises(RecipeError) as refused:
        Job(load(["recipe=own.yaml"]), values=False)
    assert refused.value.where == where and problem in refused.value.problem


def test_a_field_that_is_no_padding_behind_its_item_is_not_cut(place: Path) -> None:
    write_recipe(place, data={**DATA, "extra": 1})
    with pytest.raises(RecipeError, match=r"field 'extra' of item \d+ differs behind its length"):
        Job(load(["recipe=own.yaml"]))
