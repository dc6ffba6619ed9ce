"""Attention written as products and a softmax, as software before fused kernels ran it."""

import json
from pathlib import Path

import pytest
import torch

from flowrun.engine.capture.capture import Task, capture
from flowrun.engine.ops import registry
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from flowrun.models.gpt import GPT
from flowrun.models.losses import cross_entropy

BATCH = {name: torch.zeros(2, 8, dtype=torch.int64) for name in ("tokens", "targets")}


def _targets(written: bool) -> set[str]:
    model = GPT(vocabulary=16, context=8, depth=1, heads=2, width=8)
    task = Task(model, {"tokens_BT": "tokens"}, cross_entropy, decomposed_attention=written)
    return {op.target for op in capture(task, BATCH).ops}


def test_attention_is_one_fused_op_unless_it_is_to_be_written() -> None:
    fused = {target for target in _targets(written=False) if "for_cpu" in target}
    assert len(fused) == 2  # forward and backward
    assert not {target for target in _targets(written=True) if "for_cpu" in target}


def test_products_of_attention_keep_samples_and_heads_apart() -> None:
    targets = _targets(written=True)
    assert "aten.matmul.default" in targets
    assert "aten.bmm.default" not in targets


@pytest.mark.thorough
def test_a_run_with_attention_in_products_has_the_same_losses(tmp_path: Path) -> None:
    small = "recipe=gpt_tp model.depth=2 data.length=32 data.max_bytes=100000 launch=virtual"
    keys = "train.steps=3 train.save=false eval.batches=0 engine.cache=false"
    losses = {}
    for attention in ("fused", "products"):
        recipe = load([*small.split(), *keys.split(), f"engine.attention={attention}"])
        run(recipe, tmp_path / attention)
        ops = Job(recipe, values=False).training.plan.graph.ops
        assert any("for_cpu" in op.target for op in ops) == (attention == "fused")
        lines = (tmp_path / attention / "metrics.jsonl").read_text().splitlines()
        losses[attention] = [json.loads(line)["loss"] for line in lines]
    assert losses["products"] == pytest.approx(losses["fused"], rel=1e-5)


def test_products_of_attention_are_narrow_on_a_profile_of_gpus_or_where_a_recipe_says_so() -> None:
    def narrow(*changes: str) -> bool:
        job = Job(load(["recipe=gpt_tp", "data.max_bytes=100000", *changes]), values=False)
        return job.materials.task.low_precision_attention

    assert [narrow(), narrow("hardware=h100")] == [False, True]
    assert narrow("precision.attention=narrow")
    assert not narrow("hardware=h100", "precision.attention=fp32")


def test_written_attention_has_signature_tables_throughout() -> None:
    assert {target for target in _targets(written=True) if not registry.has_table(target)} == set()
