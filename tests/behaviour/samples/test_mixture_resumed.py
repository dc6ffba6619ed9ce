"""A mixture gives a run the same samples in any layout, and after a resume in another one."""

from pathlib import Path
from typing import Any

import pytest

from flowrun.launcher.commands.resume import checkpoint_of, compose_resumed
from flowrun.launcher.data.clusters import FeatureClusters
from flowrun.launcher.data.sampler import Sampler
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run

SIZES = {"a": 30, "b": 50}
EPOCH, BATCH, STEPS = 54, 8, 21  # of 60 samples, 6 are held out; 168 samples: over 3 epochs
RECIPE = f"""
defaults:
  - /model: mlp
  - /data: mixture
  - /data@data.sources.a: feature_clusters
  - /data@data.sources.b: feature_clusters
  - /optim: sgd
  - /launch: virtual
data:
  samples: 60
  weights: {{a: 2, b: 1}}
  sources:
    a: {{samples: {SIZES["a"]}, features: 64}}
    b: {{samples: {SIZES["b"]}, features: 64, seed: 1}}
task: {{inputs: {{x_BI: features}}}}
eval: {{fraction: 0.1, batches: 1}}
train: {{batch_size: {BATCH}, micro_batches: 2, steps: {STEPS}, save_every: 4}}
placement: {{axes: {{data: 1, tensor: 1}}}}
"""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[tuple[str, int]]]:
    """Number in the run -> (source, index) of the samples that ranks read under it."""
    known = {}
    for seed, (name, size) in enumerate(SIZES.items()):
        features = FeatureClusters(10, size, 64, seed=seed).fields["features"]
        known.update({row.numpy().tobytes(): (name, k) for k, row in enumerate(features)})
    found: dict[int, set[tuple[str, int]]] = {}
    read = Sampler.__call__

    def note(self: Sampler, step: int, micro_batch: int, rows: slice) -> Any:
        made = read(self, step, micro_batch, rows)
        if not self.evaluation and self.field_types:
            numbers = self._numbers(step, micro_batch, rows)
            for number, row in zip(numbers, made["features"], strict=True):
                found.setdefault(number, set()).add(known[row.numpy().tobytes()])
        return made

    monkeypatch.setattr(Sampler, "__call__", note)
    return found


@pytest.mark.thorough
def test_resumed_in_another_layout_the_samples_are_those_of_never_stopping(
    tmp_path: Path, seen: dict[int, set[tuple[str, int]]]
) -> None:
    (tmp_path / "mixed.yaml").write_text(RECIPE)
    recipe = f"recipe={tmp_path / 'mixed.yaml'}"
    whole = run(load([recipe]), tmp_path / "whole")
    expected = dict(seen)
    assert [*expected] == [*range(BATCH * STEPS)] and all(len(s) == 1 for s in expected.values())
    epochs = [[*expected.values()][k * EPOCH : (k + 1) * EPOCH] for k in range(3)]
    items = [sorted(next(iter(sample)) for sample in epoch) for epoch in epochs]
    assert items[0] == items[1] == items[2]
    assert [sum(name == "a" for name, _ in epoch) for epoch in items] == [36] * 3

    seen.clear()
    run(load([recipe, "placement.axes.data=2", "train.steps=12"]), tmp_path / "parts")
    for steps, layout in ((16, "placement.stages=2"), (STEPS, "placement.axes.tensor=2")):
        start = checkpoint_of(tmp_path / "parts")
        changes = [f"train.steps={steps}", "placement.axes.data=1", layout]
        last = run(compose_resumed(start, changes), tmp_path / "parts", start=start)
    assert seen == expected
    assert last.last_loss == pytest.approx(whole.last_loss, rel=1e-5)
