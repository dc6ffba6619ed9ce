"""Megatron's sequence parallelism (Korthikanti et al. 2022) as pins: norms and residuals split by
token on the tensor axis.
"""

from collections import Counter
from dataclasses import replace

import pytest

from flowrun.engine.actors.plan import Plan
from flowrun.engine.boxing.boxing import step_bytes
from flowrun.engine.ir.graph import BACKWARD, FORWARD, UPDATE, Op
from flowrun.engine.ir.sbp import S
from flowrun.engine.strategy import Pin
from support.layouts.grids import Layout, assert_as_plain_torch, compiled, virtual_run
from support.layouts.plain_loop import gpt

BLOCKS, STEPS = 2, 6
MEGATRON = gpt(blocks=BLOCKS, width=16)
TOKENS_SPLIT = tuple(Pin(p, "out", "tensor", S(1)) for p in ("blocks.*.ln*", "norm"))
SEQUENCE = replace(MEGATRON, pins=(*MEGATRON.pins, *TOKENS_SPLIT))
PAIR = Layout(tensor=2)


@pytest.mark.parametrize(
    "layout",
    [PAIR, Layout(tensor=3), Layout(data=2, tensor=2, zero=2), Layout(tensor=2, stages=2)],
    ids=str,
)
def test_norms_split_by_token_train_as_plain_torch(layout: Layout) -> None:
    assert_as_plain_torch(SEQUENCE, virtual_run(SEQUENCE, layout, STEPS))


def activation_boxings(plan: Plan) -> list[Op]:
    """Moving boxings of tensors (B, T, D), or (B * T, D), with every micro-batch."""
    tensors = plan.graph.tensors
    (embedded,) = (op for op in plan.graph.ops if op.name == "embedding")
    size = tensors[embedded.makes[0]].num_elements
    return [
        op
        for op in plan.graph.ops
        if op.target == "flow.box"
        and op.args[1].moves
        and op.phase != UPDATE
        and tensors[op.makes[0]].num_elements == size
    ]


def test_every_all_reduce_becomes_a_reduce_scatter_and_an_all_gather() -> None:
    kinds = Counter(
        (op.phase, op.args[1].kind) for op in activation_boxings(compiled(SEQUENCE, PAIR).plan)
    )
    assert kinds == {  # two of each a block, and the embedding's and the head's
        (FORWARD, "reduce_scatter"): 2 * BLOCKS + 1,
        (FORWARD, "all_gather"): 2 * BLOCKS + 1,
        (BACKWARD, "reduce_scatter"): 2 * BLOCKS + 1,
        (BACKWARD, "all_gather"): 2 * BLOCKS,
    }


def moved(plan: Plan) -> float:
    """Bytes of activations, of all ranks, with one micro-batch."""
    tensors = plan.graph.tensors
    return sum(
        step_bytes(op.args[1], op.in_sbp[0], (2,), tensors[op.makes[0]].num_bytes)
        for op in activation_boxings(plan)
    )


def test_the_bytes_are_those_of_the_all_reduces() -> None:
    plan = compiled(SEQUENCE, PAIR).plan
    tensor = plan.graph.tensors[activation_boxings(plan)[0].makes[0]].num_bytes
    reduced = moved(compiled(MEGATRON, PAIR).plan)
    assert reduced == (4 * BLOCKS + 1) * 2 * tensor
    # one more: the gradient that enters the embedding is scattered, where it stayed P
    assert moved(plan) == reduced + tensor


def test_a_rank_needs_less_memory() -> None:
    peaks = [max(compiled(t, PAIR).rehearsal.peak_bytes) for t in (SEQUENCE, MEGATRON)]
    assert peaks[0] < peaks[1]


def test_blocks_pinned_at_their_ends_gather_no_activation_twice() -> None:
    ends = tuple(Pin(p, "out", "tensor", S(1)) for p in ("blocks.*", "embed"))
    plan = compiled(replace(MEGATRON, pins=(*MEGATRON.pins, *ends)), PAIR).plan
    gathered = [
        op.inputs[0].removesuffix("/pinned")
        for op in activation_boxings(plan)
        if op.args[1].kind == "all_gather"
    ]
    assert len(gathered) == len(set(gathered))
