"""Attention around a ring, and around a ring of rings, equals attention of whole tensors."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from flowrun.engine.ir.sbp import B, P, S, Sbp
from flowrun.engine.ir.signature import NdSignature, places
from flowrun.engine.ops.nn.attention import balance, is_causal
from flowrun.engine.ops.nn.ring_attention import KeyTurns, swap_halves
from flowrun.engine.ops.proof.simulated_ranks import OpSample, row_failure
from support.samples.kernel_samples import ring_attention

SAMPLES = {given.label: given for given in ring_attention() if "block" not in given.op.target}
LONGER = {given.label: given for given in ring_attention(12) if is_causal(given.op)}


@pytest.mark.parametrize("grid", [(2, 3), (3, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("given", SAMPLES.values(), ids=SAMPLES)
def test_a_ring_of_rings_attends_to_all(given: OpSample, grid: tuple[int, int]) -> None:
    along = (S(2), S(2))
    read = ((B, B) if name == "documents" else along for name in places(given.op))
    row = NdSignature(tuple(read), (along,) * len(given.op.outputs))
    assert row_failure(given, row, grid) == ""


@pytest.mark.parametrize("grid", [(2,), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("keys", [B, S(2)], ids=["gathered", "turning"])
@pytest.mark.parametrize("label", LONGER)
def test_with_equal_work_ranks_attend_to_all(label: str, keys: Sbp, grid: tuple[int, ...]) -> None:
    given = replace(LONGER[label], op=balance(LONGER[label].op))
    names, backward = places(given.op), len(given.op.outputs) == 3
    apart = S(2) if keys == S(2) else P if backward else S(2)
    read = ({"key": keys, "value": keys, "documents": B}.get(name, S(2)) for name in names)
    row = NdSignature(
        tuple((sbp,) * len(grid) for sbp in read),
        ((S(2),) * len(grid), *((apart,) * len(grid) for _ in given.op.outputs[1:])),
    )
    assert row_failure(given, row, grid) == ""


@pytest.mark.parametrize("parts", [(2,), (3,), (8,), (2, 3)], ids=str)
@pytest.mark.parametrize("turning", [False, True], ids=["gathered", "turning"])
def test_ranks_have_equal_work_at_each_turn_and_all_pairs_once(
    turning: bool, parts: tuple[int, ...]
) -> None:
    blocks = range(math.prod(parts))
    tokens = 6 * len(blocks)
    total = 0.0
    for by in itertools.product(*map(range, parts)) if turning else [()]:
        turns = KeyTurns(parts, by, 6, causal=True, balanced=True)
        each = {sum(met.count(1) for met in turns.meetings(6 * k, 6)) for k in blocks}
        assert len(each) == 1
        total += len(blocks) * each.pop()
    assert total == tokens * (tokens + 1) / 2


@pytest.mark.parametrize("parts", [(2,), (3,), (4,), (2, 3)], ids=str)
def test_halves_are_swapped_to_where_blocks_look_for_them(parts: tuple[int, ...]) -> None:
    tokens = 6 * math.prod(parts)
    places = before = torch.arange(tokens)[None, None]
    swaps = [(2, math.prod(parts[:k]), each, k, 6) for k, each in enumerate(parts)]
    for how in swaps:
        places = swap_halves(places, *how)
    turns = KeyTurns(parts, (), 6, causal=True, balanced=True)
    for piece in (met.queries for met in turns.meetings(0, tokens)):
        assert piece.of(places).flatten().tolist() == [*range(piece.start, piece.start + 3)]
    for how in swaps:
        places = swap_halves(places, *how)
    assert torch.equal(places, before)


@pytest.mark.parametrize("parts", [(4,), (2, 3)], ids=str)
def test_each_block_of_queries_meets_its_own_keys_and_those_before(parts: tuple[int, ...]) -> None:
    """Once around, block i sees itself once and i others whole."""
    tokens = 5 * math.prod(parts)
    steps = itertools.product(*map(range, parts))
    met = [KeyTurns(parts, by, 5, causal=True).meetings(0, tokens) for by in steps]
    for i, each in enumerate(zip(*met, strict=True)):
        own = [hidden for meeting in each for _, hidden in meeting.keys]
        assert (own.count(True), own.count(False)) == (1, i)
