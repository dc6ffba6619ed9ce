"""Boxing counted: what the virtual transport moved is the paper's table 2, for every pair."""

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from flowrun.engine.boxing.boxing import path_bytes
from flowrun.engine.boxing.crossing import route, slices_of_ranks, transfer_sbps
from flowrun.engine.ir.sbp import P_MAX, B, NdSbp, Owned, P, S, Sbp, format_nd_sbp
from flowrun.engine.runtime.transport.transport import run_route
from support.layouts.logical import box, grid_placement, lay_out, line, whole_numbers

SHAPE = (12, 12)
T = 12 * 12 * 4

# (from, to): tensors that cross links on the same p ranks, and from p1 other ranks to p2.
TABLE = {
    (S(0), S(0)): (lambda p: 0, lambda p1, p2: 1),
    (S(0), S(1)): (lambda p: Fraction(p - 1, p), lambda p1, p2: 1),
    (S(0), B): (lambda p: p - 1, lambda p1, p2: p2),
    (S(0), P): (lambda p: 0, lambda p1, p2: 1),
    (B, S(1)): (lambda p: 0, lambda p1, p2: 1),
    (B, B): (lambda p: 0, lambda p1, p2: p2),
    (B, P): (lambda p: 0, lambda p1, p2: 1),
    (P, S(1)): (lambda p: p - 1, lambda p1, p2: p1),
    (P, B): (lambda p: 2 * (p - 1), lambda p1, p2: p1 + p2 - 1),
    (P, P): (lambda p: 0, lambda p1, p2: p1),
    (P_MAX, B): (lambda p: 2 * (p - 1), lambda p1, p2: p1 + p2 - 1),
}
PAIRS = pytest.mark.parametrize(("source", "target"), list(TABLE), ids=str)


@PAIRS
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_bytes_on_the_same_ranks_are_the_table(source: Sbp, target: Sbp, parts: int) -> None:
    placement = line(parts)
    pieces = lay_out(whole_numbers(SHAPE), (source,), placement)
    _, sent, _ = box(pieces, (source,), (target,), placement, SHAPE)
    assert sent == TABLE[source, target][0](parts) * T
    assert sent == path_bytes((source,), (target,), (parts,), SHAPE, T)


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("owner", [0, 1])
def test_to_and_from_an_owner_goes_what_an_even_split_would_move(owner: int, parts: int) -> None:
    """A bucket has many owners, who are balanced; what one tensor moves is all the same."""
    own, placement = Owned(owner), line(parts)
    pairs = {(P, own): parts - 1, (own, B): parts - 1, (B, own): 0}
    pairs |= {(S(1), own): Fraction(parts - 1, parts), (own, S(0)): Fraction(parts - 1, parts)}
    for (source, target), tensors in pairs.items():
        pieces = lay_out(whole_numbers(SHAPE), (source,), placement)
        _, sent, _ = box(pieces, (source,), (target,), placement, SHAPE)
        assert sent == tensors * T == path_bytes((source,), (target,), (parts,), SHAPE, T)


@PAIRS
@pytest.mark.parametrize("parts", [(2, 2), (2, 3), (3, 2), (2, 4), (4, 3), (4, 4)], ids=str)
def test_bytes_to_other_ranks_are_the_table(
    source: Sbp, target: Sbp, parts: tuple[int, int]
) -> None:
    here, there = line(parts[0]), line(parts[1], 4)
    leaving, arriving = transfer_sbps(here, (source,), there, (target,), SHAPE)
    pieces = lay_out(whole_numbers(SHAPE), (source,), here)
    pieces, before, _ = box(pieces, (source,), leaving, here, SHAPE)
    sends = route(here, leaving, there, arriving, SHAPE)
    held, wanted = slices_of_ranks(here, leaving, SHAPE), slices_of_ranks(there, arriving, SHAPE)
    pieces, crossing = run_route(sends, pieces, held, wanted)
    _, after, _ = box(pieces, arriving, (target,), there, SHAPE)
    sent = before + sum(crossing.values()) + after
    assert sent == TABLE[source, target][1](*parts) * T


@pytest.mark.parametrize(
    ("source", "target", "tensors"),
    [
        ((P, B), (B, B), 4),
        ((P, S(0)), (B, S(0)), 2),
        ((P, P), (B, B), 6),
        ((S(0), S(0)), (B, B), 3),
        ((S(0), S(1)), (B, S(1)), 1),
        ((S(0), B), (S(1), B), 1),
        ((B, B), (S(0), P), 0),
    ],
    ids=lambda value: format_nd_sbp(value) if isinstance(value, tuple) else str(value),
)
def test_bytes_on_two_axes_count_the_replicas(source: NdSbp, target: NdSbp, tensors: int) -> None:
    placement = grid_placement((2, 2))
    pieces = lay_out(whole_numbers(SHAPE), source, placement)
    _, sent, foretold = box(pieces, source, target, placement, SHAPE)
    assert (sent, foretold) == (tensors * T, tensors * T)


@pytest.mark.parametrize(
    ("source", "target", "tensors"),
    [(P, B, lambda p: 2 * (p - 1)), (P, S(0), lambda p: p - 1), (S(0), B, lambda p: p - 1)],
    ids=["all_reduce", "reduce_scatter", "all_gather"],
)
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_uneven_splits_move_no_byte_more(
    source: Sbp, target: Sbp, tensors: Callable[[int], int], parts: int
) -> None:
    shape, placement = (7, 3), line(parts)
    pieces = lay_out(whole_numbers(shape), (source,), placement)
    _, sent, foretold = box(pieces, (source,), (target,), placement, shape)
    assert sent == foretold == tensors(parts) * 7 * 3 * 4


def test_half_precision_moves_half_the_bytes() -> None:
    placement = line(2)
    pieces = lay_out(whole_numbers((4, 4), torch.bfloat16), (S(0),), placement)
    assert box(pieces, (S(0),), (B,), placement, (4, 4))[1] == 4 * 4 * 2
