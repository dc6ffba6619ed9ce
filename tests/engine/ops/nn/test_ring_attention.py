"""Attention around a ring, and around a ring of rings, equals attention of whole tensors."""

import itertools
import math

import pytest

from flowrun.engine.ir.sbp import B, S
from flowrun.engine.ir.signature import NdSignature, places
from flowrun.engine.ops.nn.ring_attention import KeyTurns
from flowrun.engine.ops.proof.simulated_ranks import OpSample, row_failure
from support.samples.kernel_samples import ring_attention

SAMPLES = {given.label: given for given in ring_attention() if "block" not in given.op.target}


@pytest.mark.parametrize("grid", [(2, 3), (3, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("given", SAMPLES.values(), ids=SAMPLES)
def test_a_ring_of_rings_attends_to_all(given: OpSample, grid: tuple[int, int]) -> None:
    along = (S(2), S(2))
    read = ((B, B) if name == "documents" else along for name in places(given.op))
    row = NdSignature(tuple(read), (along,) * len(given.op.outputs))
    assert row_failure(given, row, grid) == ""


@pytest.mark.parametrize("parts", [(4,), (2, 3)], ids=str)
def test_each_block_of_queries_meets_its_own_keys_and_those_before(parts: tuple[int, ...]) -> None:
    """Once around, block i sees itself once and i others whole."""
    tokens = 5 * math.prod(parts)
    steps = itertools.product(*map(range, parts))
    met = [KeyTurns(parts, by, 5, causal=True).seen(0, tokens) for by in steps]
    for i, seen in enumerate(zip(*met, strict=True)):
        hows = [each.how for each in seen]
        assert (hows.count("causal"), hows.count("whole")) == (1, i)
