"""Packed documents train as each alone in a padded sample: the same loss of every step.

Tolerance: sums of the same fp32 numbers in another order.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flowrun.engine.ir.sbp import B, S
from support.layouts.grids import FIVE, Layout, compiled, virtual_run
from support.layouts.plain_loop import (
    Batch,
    Training,
    loss_difference,
    plain_loop,
    weight_difference,
)
from support.nets.packed import GPT_PACKED, GPT_PADDED, LLAMA_PACKED, LLAMA_PADDED

TOLERANCE = 1e-5
PAIRS = {"gpt": (GPT_PACKED, GPT_PADDED), "llama": (LLAMA_PACKED, LLAMA_PADDED)}


@pytest.mark.parametrize("layout", FIVE, ids=str)
def test_losses_are_those_of_padded_documents(layout: Layout) -> None:
    run, padded = virtual_run(GPT_PACKED, layout), plain_loop(GPT_PADDED)
    assert loss_difference(run.losses, padded) < TOLERANCE
    assert weight_difference(run.weights, padded) < 1e-4
    assert loss_difference(virtual_run(GPT_PADDED, layout).losses, padded) < TOLERANCE


def test_rotary_positions_begin_anew_in_each_document() -> None:
    padded = plain_loop(LLAMA_PADDED)
    assert loss_difference(virtual_run(LLAMA_PACKED, Layout(tensor=2)).losses, padded) < TOLERANCE


def test_heads_are_split_and_documents_are_not() -> None:
    graph = compiled(GPT_PACKED, Layout(tensor=2)).plan.graph
    found = [op for op in graph.ops if op.target.startswith("flowrun.document_attention")]
    assert len(found) == 4
    for op in found:
        assert op.in_sbp == (*((S(1),) for _ in op.inputs[1:]), (B,))


def moved_by_one(batch: Batch) -> Batch:
    """Give the first document one token of the second."""
    return {**batch, "documents": batch["documents"] + torch.tensor([1, -1, 0])}


def as_one(batch: Batch) -> Batch:
    """Let all tokens see each other."""
    lengths = batch["documents"]
    return {**batch, "documents": lengths.sum(1, keepdim=True) * torch.tensor([1, 0, 0])}


def on_and_on(batch: Batch) -> Batch:
    """Let positions not begin anew."""
    shape: Tensor = batch["positions"]
    return {**batch, "positions": torch.arange(shape.shape[1]).expand_as(shape)}


def apart(batch: Batch) -> Batch:
    """Let positions lie twice as far apart."""
    return {**batch, "positions": batch["positions"] * 2}


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *(("gpt", fault) for fault in (moved_by_one, as_one, on_and_on)),
        *(("llama", fault) for fault in (moved_by_one, as_one, apart)),
    ],
)
def test_a_planted_fault_is_seen(name: str, fault: object) -> None:
    packed, padded = PAIRS[name]
    batches = tuple(fault(batch) for batch in packed.batches[:2])  # type: ignore[operator]
    wrong: Training = replace(packed, batches=batches)
    expected = plain_loop(padded, steps=2)
    assert loss_difference(plain_loop(packed, steps=2).losses, expected) < TOLERANCE
    assert loss_difference(plain_loop(wrong, steps=2).losses, expected) > 10 * TOLERANCE
