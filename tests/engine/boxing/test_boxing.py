import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flowrun.engine.boxing.boxing import BoxingStep, fits, path, path_seconds
from flowrun.engine.boxing.crossing import Send, route, slices_of_ranks, transfer_sbps
from flowrun.engine.errors import SbpError
from flowrun.engine.hardware.network import Link
from flowrun.engine.ir.placement import Placement
from flowrun.engine.ir.sbp import (
    P_LOGSUMEXP,
    P_MAX,
    P_MIN,
    B,
    NdSbp,
    Owned,
    P,
    S,
    Sbp,
    Split,
    format_nd_sbp,
)
from flowrun.engine.runtime.transport.transport import run_route
from support.layouts.logical import box, grid_placement, lay_out, line, put_together, whole_numbers

PROPERTY = settings(max_examples=200)

grids = st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple)
shapes = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)


@st.composite
def nd_sbps(
    draw: st.DrawFn, grid: tuple[int, ...], shape: tuple[int, ...], owned: bool = False
) -> NdSbp:
    """Any nd-SBP that a tensor of this shape may have on this grid.  owned: also by one rank."""
    words: list[Sbp] = [B, *map(S, range(len(shape)))]
    words += [draw(st.sampled_from([P, P, P_MAX, P_MIN, P_LOGSUMEXP]))]
    nd_sbp = tuple(
        draw(st.sampled_from([*words, *(Owned(k) for k in range(parts) if owned)]))
        for parts in grid
    )
    assume(fits(nd_sbp, grid, shape))
    return nd_sbp


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        (P, B, "all_reduce"),
        (P, S(0), "reduce_scatter"),
        (S(1), B, "all_gather"),
        (S(0), S(1), "all_to_all"),
        (B, S(1), "slice"),
        (S(0), P, "pad"),
        (B, P, "keep"),
        (P_MAX, B, "all_reduce"),
        (B, P_MIN, "keep"),
        (P_LOGSUMEXP, B, "all_reduce"),
        (P, Owned(1), "reduce_scatter"),
        (S(1), Owned(0), "all_to_all"),
        (Owned(1), S(0), "all_to_all"),
        (Owned(1), B, "all_gather"),
        (B, Owned(1), "slice"),
    ],
    ids=str,
)
def test_a_boxing_on_one_axis_is_one_step(source: Sbp, target: Sbp, kind: str) -> None:
    (step,) = path((source,), (target,), (2,), (4, 4))
    assert (step, step.kind) == (BoxingStep(0, source, target), kind)
    assert step.moves == (kind not in ("slice", "pad", "keep"))


@pytest.mark.parametrize("nd_sbp", [(S(0), S(0)), (B, P), (P, S(1))], ids=format_nd_sbp)
def test_nothing_to_do_takes_no_step(nd_sbp: NdSbp) -> None:
    assert path(nd_sbp, nd_sbp, (2, 2), (4, 4)) == ()


def test_an_axis_of_size_one_is_free() -> None:
    assert path((P, S(0)), (B, S(0)), (1, 2), (4,)) == ()


def test_nested_splits_are_gathered_inner_first() -> None:
    steps = path((S(0), S(0)), (B, B), (2, 2), (4,))
    assert [(step.kind, step.axis) for step in steps] == [("all_gather", 1), ("all_gather", 0)]


def test_two_axes_of_partial_sums_scatter_first_because_it_moves_least() -> None:
    steps = path((P, P), (B, B), (2, 2), (4, 4))
    assert [step.kind for step in steps] == ["reduce_scatter", "all_reduce", "all_gather"]


def test_a_scalar_is_all_reduced_axis_after_axis() -> None:
    assert [step.kind for step in path((P, P), (B, B), (2, 2), ())] == ["all_reduce"] * 2


def test_an_outer_axis_does_not_move_a_dim_that_an_inner_axis_splits() -> None:
    steps = path((B, S(0)), (S(0), S(0)), (2, 2), (4, 1))
    kinds = [(step.kind, step.axis) for step in steps]
    assert kinds == [("all_gather", 1), ("slice", 0), ("slice", 1)]


@pytest.mark.parametrize(
    ("source", "shape"), [((S(1),), (4,)), ((S(0),), (2,)), ((S(0),), ())], ids=str
)
def test_a_split_that_leaves_a_rank_with_nothing_is_refused(
    source: NdSbp, shape: tuple[int, ...]
) -> None:
    with pytest.raises(SbpError, match=r"cannot have this layout on a grid of 3"):
        path(source, (B,), (3,), shape)


def test_a_letter_that_no_row_leads_from_is_our_own_mistake() -> None:
    class Letter:
        """It has no row in KINDS."""

    with pytest.raises(AssertionError, match="no row of KINDS leads from"):
        path((Letter(),), (B,), (2,), (4,))  # type: ignore[arg-type]


def test_sums_and_maxima_do_not_mix() -> None:
    with pytest.raises(SbpError, match="sums and maxima would mix"):
        path((P, P_MAX), (B, B), (2, 2), (4,))


def test_a_nested_split_needs_an_element_for_every_rank() -> None:
    assert fits((S(0), S(0)), (2, 2), (4,))
    assert not fits((S(0), S(0)), (2, 2), (3,))


def test_seconds_are_latency_and_the_bytes_of_the_busiest_rank() -> None:
    links = [Link(latency_s=1.0, bytes_per_s=10.0)]
    assert path_seconds((P,), (B,), (2,), (8,), 40, links) == pytest.approx(1.0 + 40 / 10)
    assert path_seconds((S(0),), (B,), (4,), (8,), 40, links) == pytest.approx(1.0 + 30 / 10)


def test_a_local_step_costs_a_little_and_nothing_costs_nothing() -> None:
    assert 0 < path_seconds((B,), (S(0),), (2,), (8,), 40, [Link()]) < 1e-6
    assert path_seconds((B,), (B,), (2,), (8,), 40, [Link()]) == 0


@given(st.data(), grids, shapes)
@PROPERTY
def test_any_nd_sbp_to_any_other_rebuilds_the_tensor(
    data: st.DataObject, grid: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    source, target = (data.draw(nd_sbps(grid, shape, owned=True)) for _ in range(2))
    logical, placement = whole_numbers(shape), grid_placement(grid)
    pieces, sent, foretold = box(
        lay_out(logical, source, placement), source, target, placement, shape
    )
    assert sent == pytest.approx(foretold, abs=4 * logical.numel())  # all-to-all of uneven pieces
    assert torch.equal(put_together(pieces, target, placement, shape), logical)


@given(st.data(), grids, grids, shapes, st.integers(0, 4))
@PROPERTY
def test_any_grid_to_any_grid_rebuilds_the_tensor(
    data: st.DataObject,
    source_grid: tuple[int, ...],
    target_grid: tuple[int, ...],
    shape: tuple[int, ...],
    first: int,
) -> None:
    source, target = data.draw(nd_sbps(source_grid, shape)), data.draw(nd_sbps(target_grid, shape))
    here, there = grid_placement(source_grid), grid_placement(target_grid, first)
    logical = whole_numbers(shape)
    leaving, arriving = transfer_sbps(here, source, there, target, shape)
    pieces, _, _ = box(lay_out(logical, source, here), source, leaving, here, shape)
    sends = route(here, leaving, there, arriving, shape)
    held, wanted = slices_of_ranks(here, leaving, shape), slices_of_ranks(there, arriving, shape)
    pieces, _ = run_route(sends, pieces, held, wanted)
    pieces, _, _ = box(pieces, arriving, target, there, shape)
    assert torch.equal(put_together(pieces, target, there, shape), logical)


def test_twins_send_to_twins() -> None:
    sends = route(line(3), (B,), line(3, 3), (B,), (6,))
    assert [(send.source, send.target) for send in sends] == [(0, 3), (1, 4), (2, 5)]


def test_a_rank_of_both_grids_keeps_what_it_holds() -> None:
    there = Placement((("axis", 2),), (1, 2))
    sends = route(line(2), (B,), there, (B,), (6,))
    assert sends[0] == Send(1, 1, ((0, 6),))


@pytest.mark.parametrize(
    ("sources", "targets"), [(2, 4), (4, 2), (2, 2), (4, 4)], ids=lambda n: str(n)
)
def test_copies_are_sent_by_all_who_hold_them_alike(sources: int, targets: int) -> None:
    sends = route(line(sources), (B,), line(targets, sources), (B,), (8,))
    loads = [sum(send.source == rank for send in sends) for rank in range(sources)]
    assert max(loads) - min(loads) <= (targets < sources)
    assert sum(loads) == targets


def test_slices_that_meet_are_sent_and_no_others() -> None:
    sends = route(line(2), (S(0),), line(3, 2), (S(0),), (6,))
    said = " ".join(str(send) for send in sends)
    assert said == "0 -> 2 [0:2] 0 -> 3 [2:3] 1 -> 3 [3:4] 1 -> 4 [4:6]"
    assert sends[0] == Send(0, 2, ((0, 2),))


@pytest.mark.parametrize(
    ("source", "target", "leaving", "arriving"),
    [
        (S(0), S(1), S(0), S(1)),
        (S(1), B, S(1), S(1)),
        (P, S(1), S(1), S(1)),
        (P, B, S(0), S(0)),
        (B, B, B, B),
        (B, P, B, S(0)),
        (P, P, S(0), S(0)),
    ],
    ids=str,
)
def test_partial_is_reduced_before_crossing_and_gathered_after(
    source: Sbp, target: Sbp, leaving: Sbp, arriving: Sbp
) -> None:
    got = transfer_sbps(line(2), (source,), line(2, 2), (target,), (4, 4))
    assert got == ((leaving,), (arriving,))


def test_a_stage_boundary_of_like_grids_needs_no_collective() -> None:
    here, there = grid_placement((2, 2)), grid_placement((2, 2), 4)
    assert transfer_sbps(here, (S(0), B), there, (S(0), B), (8, 8)) == ((S(0), B), (S(0), B))


def test_a_scalar_that_cannot_be_split_still_arrives() -> None:
    assert transfer_sbps(line(2), (P,), line(2, 2), (P,), ()) == ((B,), (B,))


def test_far_grids_send_each_rank_a_piece_where_near_ones_send_twins() -> None:
    here, there = line(2), grid_placement((2,), 2)
    assert transfer_sbps(here, (B,), there, (B,), (4, 4)) == ((B,), (B,))
    leaving, (arriving,) = transfer_sbps(here, (B,), there, (B,), (4, 4), far=True)
    assert leaving == (B,) and isinstance(arriving, Split)


def test_holders_of_a_copy_share_what_they_send() -> None:
    """Each half is there twice, and four ranks want both halves: each of the holders sends two.
    The nearest alone would have sent 1, 3, 3 and 1.
    """
    there = Placement((("axis", 4),), (4, 5, 6, 7))
    sends = route(grid_placement((2, 2)), (S(0), B), there, (B,), (4,))
    assert [sum(send.source == rank for send in sends) for rank in range(4)] == [2, 2, 2, 2]
