"""Attention written as products and a softmax, as software before fused kernels ran it."""

import torch

from flowrun.engine.capture.capture import Task, capture
from flowrun.engine.ops import registry
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


def test_written_attention_has_signature_tables_throughout() -> None:
    assert {target for target in _targets(written=True) if not registry.has_table(target)} == set()
