import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrun.engine.ir.placement import (
    Placement,
    Slices,
    largest_shape,
    local_shape,
    local_slices,
    split_range,
)
from flowrun.engine.ir.sbp import B, NdSbp, P, S

GRID = Placement((("data", 2), ("tensor", 3)), (10, 11, 12, 20, 21, 22))


def test_ranks_are_row_major() -> None:
    assert [GRID.coordinate(rank) for rank in (10, 12, 20, 22)] == [(0, 0), (0, 2), (1, 0), (1, 2)]


def test_rank_at_is_the_inverse_of_coordinate() -> None:
    assert [GRID.rank_at(GRID.coordinate(rank)) for rank in GRID.ranks] == list(GRID.ranks)


def test_a_group_differs_along_its_axis_only() -> None:
    assert (GRID.group(21, 0), GRID.group(21, 1)) == ((11, 21), (20, 21, 22))


def test_groups_of_an_axis_cover_every_rank_once() -> None:
    assert GRID.groups(0) == ((10, 20), (11, 21), (12, 22))
    assert sorted(sum(GRID.groups(1), ())) == sorted(GRID.ranks)


def test_membership_is_by_rank() -> None:
    assert 20 in GRID
    assert 0 not in GRID


def test_a_grid_that_does_not_hold_its_ranks_is_refused() -> None:
    with pytest.raises(AssertionError, match="does not hold 3 ranks"):
        Placement((("data", 2),), (0, 1, 2))


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Placement((("data", 2), ("tensor", 2)), (0, 1, 2, 3)), "data 2 x tensor 2 on ranks 0-3"),
        (Placement((("tensor", 2),), (4, 2)), "tensor 2 on ranks 4,2"),
        (Placement((), (5,)), "rank 5"),
    ],
    ids=["contiguous", "any order", "no axes"],
)
def test_a_placement_prints_its_axes_and_ranks(placement: Placement, text: str) -> None:
    assert str(placement) == text


def test_the_first_pieces_of_an_uneven_split_are_one_longer() -> None:
    assert [split_range(10, 4, k) for k in range(4)] == [(0, 3), (3, 3), (6, 2), (8, 2)]


@given(st.integers(0, 50), st.integers(1, 9))
def test_pieces_tile_the_dimension(size: int, parts: int) -> None:
    pieces = [split_range(size, parts, k) for k in range(parts)]
    assert [start for start, _ in pieces] == [sum(n for _, n in pieces[:k]) for k in range(parts)]
    assert sum(length for _, length in pieces) == size


@pytest.mark.parametrize(
    ("nd_sbp", "coordinate", "slices"),
    [
        ((S(0), S(0)), (1, 0), ((4, 1), (0, 4))),
        ((S(0), S(1)), (1, 2), ((4, 3), (3, 1))),
        ((B, S(0)), (1, 2), ((5, 2), (0, 4))),
        ((P, B), (0, 1), ((0, 7), (0, 4))),
    ],
    ids=["nested", "two dims", "broadcast", "partial"],
)
def test_local_slices_apply_axes_outer_to_inner(
    nd_sbp: NdSbp, coordinate: tuple[int, ...], slices: Slices
) -> None:
    assert local_slices((7, 4), nd_sbp, (2, 3), coordinate) == slices
    assert local_shape((7, 4), nd_sbp, (2, 3), coordinate) == tuple(n for _, n in slices)


def test_the_first_coordinate_holds_the_largest_shard() -> None:
    shapes = [local_shape((7, 5), (S(0), S(1)), (2, 3), GRID.coordinate(r)) for r in GRID.ranks]
    assert math.prod(largest_shape((7, 5), (S(0), S(1)), (2, 3))) == max(map(math.prod, shapes))


@given(
    shape=st.lists(st.integers(1, 40), min_size=2, max_size=3).map(tuple),
    nd_sbp=st.lists(st.sampled_from([B, P, S(0), S(1)]), max_size=3).map(tuple),
    grid=st.lists(st.integers(1, 5), min_size=3, max_size=3),
)
def test_the_largest_shard_is_what_the_first_coordinate_holds(
    shape: tuple[int, ...], nd_sbp: NdSbp, grid: list[int]
) -> None:
    here = tuple(grid[: len(nd_sbp)])
    assert largest_shape(shape, nd_sbp, here) == local_shape(shape, nd_sbp, here, (0,) * len(here))
