import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrun.engine.boxing.boxing import (
    ALL_GATHER,
    ALL_REDUCE,
    EXCHANGE,
    REDUCE_SCATTER,
    BoxingStep,
    exchange_if_small,
    path_seconds,
    start_seconds,
    step_bytes,
    step_seconds,
)
from flowrun.engine.hardware.hardware import Hardware, on_hosts
from flowrun.engine.hardware.network import Level, Link, axis_links, group_link, message_link, worst
from flowrun.engine.ir.placement import Placement
from flowrun.engine.ir.sbp import B, P, S

PROPERTY = settings(max_examples=200)
NODES = (Level(8, 1.0, 100.0, hop_s=0.5), Level(0, 10.0, 2.0, hop_s=5.0))


def grid(*sizes: int, first: int = 0) -> Placement:
    axes = tuple((f"axis{k}", size) for k, size in enumerate(sizes))
    return Placement(axes, tuple(range(first, first + math.prod(sizes))))


levels = st.builds(
    lambda sizes, speeds: tuple(
        Level(math.prod(sizes[: k + 1]) if k < 2 else 0, 10.0**k, speed, hop_s=float(k + 1))
        for k, speed in enumerate(speeds)
    ),
    st.tuples(st.integers(2, 4), st.integers(2, 3)),
    st.tuples(*[st.sampled_from((1.0, 3.0, 10.0, 100.0))] * 3),
)
grids = st.builds(
    lambda sizes, first: grid(*sizes, first=first),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(0, 9),
)


# ---- all-reduces as exchanges --------------------------------------------------------------------

SOCKETS = Level(exchange_bytes={2: 100, 4: 10, 8: 0})


@pytest.mark.parametrize(("members", "most"), [(2, 100), (3, 10), (4, 10), (5, 0), (8, 0), (9, 0)])
def test_a_group_exchanges_as_much_as_the_next_larger_that_is_known(
    members: int, most: int
) -> None:
    assert SOCKETS.max_exchange_bytes(members) == most
    assert Level().max_exchange_bytes(members) == 0


def test_what_is_exchanged_says_the_outermost_level_that_a_group_crosses() -> None:
    hosts = (Level(4, shared_memory=True), SOCKETS)
    inner, outer = axis_links(hosts, grid(2, 4))[::-1]
    assert (inner.exchange_bytes, outer.exchange_bytes) == (0, 100)
    assert worst((inner, outer)).exchange_bytes == 0


@pytest.mark.parametrize(
    ("step", "num_bytes", "kind"),
    [
        (BoxingStep(0, P, B), 10, EXCHANGE),
        (BoxingStep(0, P, B), 11, ALL_REDUCE),
        (BoxingStep(0, P, B), 0, ALL_REDUCE),  # moves nothing
        (BoxingStep(0, P, S(0)), 10, REDUCE_SCATTER),
        (BoxingStep(0, S(0), B), 10, ALL_GATHER),
    ],
    ids=str,
)
def test_an_all_reduce_is_exchanged_up_to_a_size(
    step: BoxingStep, num_bytes: int, kind: str
) -> None:
    (link,) = axis_links((SOCKETS,), grid(4))
    assert exchange_if_small(step, num_bytes, link).kind == kind


def test_an_exchange_costs_what_all_send_to_all() -> None:
    (link,) = axis_links((Level(0, 1.0, 10.0, hop_s=0.5, peer_s=0.1),), grid(4))
    step = BoxingStep(0, P, B, exchanged=True)
    assert start_seconds(step, link) == pytest.approx(1.0 + 3 * 0.5 + 3 * 0.1)
    assert step_seconds(step, (P,), (4,), (5,), 100.0, link) == 3 * 100 / 10
    assert step_bytes(step, (P,), (4,), 100.0) == 4 * 3 * 100


# ---- the rule ------------------------------------------------------------------------------------


def test_a_group_in_a_node_has_the_links_of_the_node() -> None:
    assert group_link(NODES, range(8), range(16)) == Link(
        1.0, 100.0, 3.5, 1.5, spread_bytes_per_s=100.0, level=0
    )
    assert group_link(NODES, (8, 12), range(16)) == Link(
        1.0, 100.0, 0.5, 0.5, spread_bytes_per_s=100.0, level=0
    )


def test_groups_with_a_rank_in_each_node_share_what_leaves_it() -> None:
    both, _ = axis_links(NODES, grid(4, 8))
    assert both == Link(10.0, 2.0, 15.0, 10.0, spread_bytes_per_s=2.0, level=1)


def test_a_group_that_fills_its_nodes_has_all_that_leaves_them() -> None:
    (link,) = axis_links(NODES, grid(32))
    assert (link.latency_s, link.bytes_per_s) == (10.0, 8 * 2.0)
    assert link.ring_s == 4 * 7 * 0.5 + 3 * 5.0
    assert link.tree_s == 3 * 0.5 + 2 * 5.0


def test_of_an_all_to_all_all_that_goes_to_other_nodes_leaves_the_node() -> None:
    (link,) = axis_links(NODES, grid(16))
    assert link.spread_bytes_per_s == pytest.approx(2.0 * 15 / 8)  # 8 of 15 pieces leave
    seconds = path_seconds((S(0),), (S(1),), (16,), (16, 16), 1600, [replace(link, ring_s=0.0)])
    assert seconds == pytest.approx(10.0 + 1600 / 16 * 8 / 16 / 2.0)


def test_a_rank_whose_neighbours_are_silent_may_have_more() -> None:
    one_card = (NODES[0], Level(0, 10.0, 2.0, alone_bytes_per_s=16.0))
    assert group_link(one_card, (0, 8), (0, 8)).bytes_per_s == 16.0
    assert group_link(one_card, (0, 8), (0, 1, 8, 9)).bytes_per_s == 8.0
    assert group_link(NODES, (0, 8), (0, 8)).bytes_per_s == 2.0


# a square of single links, with double ones across: no diagonal is without
MESH = Level(4, 1.0, 40.0, mesh=("0121", "1012", "2101", "1210"))


def test_in_a_mesh_a_rank_has_its_links_to_the_others_of_its_group() -> None:
    assert group_link((MESH,), range(4), range(4)).bytes_per_s == 40.0
    assert group_link((MESH,), (0, 2), range(4)).bytes_per_s == 40.0 * 2 / 4
    assert group_link((MESH,), (5, 6), range(8)).bytes_per_s == 40.0 * 1 / 4
    assert [link.bytes_per_s for link in axis_links((MESH,), grid(2, 2))] == [20.0, 10.0]
    beyond = (MESH, Level(0, 10.0, 1e3))
    assert group_link(beyond, (0, 1, 4, 5), range(8)).bytes_per_s == 10.0
    assert group_link(beyond, (0, 4), range(8)).bytes_per_s == 1e3


def test_without_a_link_a_message_goes_by_way_of_a_neighbour() -> None:
    ring = Level(4, 1.0, 40.0, mesh=("0101", "1010", "0101", "1010"))
    assert message_link((ring,), grid(1), grid(1, first=2)).bytes_per_s == 20.0


def test_of_an_all_to_all_pieces_without_a_link_go_past_it_at_a_speed_of_their_own() -> None:
    ring = Level(4, 1.0, 40.0, mesh=("0101", "1010", "0101", "1010"), unlinked_bytes_per_s=2.0)
    assert group_link((ring,), range(4), range(4)).spread_bytes_per_s == 2.0 * 3  # 1 of 3 pieces
    assert group_link((ring,), (0, 1), range(4)).spread_bytes_per_s == 20.0
    assert group_link((ring,), range(4), range(4)).bytes_per_s == 40.0  # around a ring all are
    beyond = (ring, Level(0, 10.0, 1e3))
    assert group_link(beyond, range(8), range(8)).spread_bytes_per_s == 2.0 * 7


def test_each_peer_delays_the_start_of_an_all_to_all_and_of_nothing_else() -> None:
    levels = (Level(4, 1.0, 40.0, peer_s=0.5), Level(0, 10.0, 10.0, peer_s=0.25))
    (inside,), (across,) = axis_links(levels, grid(4)), axis_links(levels, grid(12))
    assert (inside.peers_s, across.peers_s) == (3 * 0.5, 3 * 0.5 + 8 * 0.25)
    assert axis_links(levels, grid(3, 4))[0].peers_s == 2 * 0.25
    without = replace(inside, peers_s=0.0)
    for source, target, later in ((S(0), S(1), 1.5), (S(0), B, 0.0), (P, B, 0.0)):
        taken = [
            path_seconds((source,), (target,), (4,), (4, 4), 64, [link])
            for link in (inside, without)
        ]
        assert taken[0] - taken[1] == pytest.approx(later)


def test_messages_of_a_stage_leave_its_node_at_once() -> None:
    one_card = (NODES[0], Level(0, 10.0, 2.0, alone_bytes_per_s=16.0))
    assert message_link(NODES, grid(4), grid(4, first=4)).level == 0
    assert message_link(one_card, grid(8), grid(8, first=8)).bytes_per_s == 2.0
    assert message_link(one_card, grid(2, first=6), grid(2, first=8)).bytes_per_s == 8.0


def test_an_all_reduce_goes_up_and_down_a_tree_and_others_around_a_ring() -> None:
    (link,) = axis_links((Level(0, 1.0, 10.0, hop_s=0.1),), grid(8))
    assert path_seconds((P,), (B,), (8,), (8,), 80, [link]) == pytest.approx(1.6 + 80 * 7 / 40)
    assert path_seconds((S(0),), (B,), (8,), (8,), 80, [link]) == pytest.approx(1.7 + 7)


# ---- what always holds ---------------------------------------------------------------------------


@given(levels, grids)
@PROPERTY
def test_no_level_carries_more_than_it_can(levels: tuple[Level, ...], placement: Placement) -> None:
    ranks = (1, levels[0].ranks, levels[1].ranks)  # of the units that each level joins
    for axis in range(len(placement.shape)):
        leaving: dict[tuple[int, int], float] = {}
        for group in placement.groups(axis):
            rate = group_link(levels, group, placement.ranks).bytes_per_s
            for at, below in enumerate(ranks):
                for unit in units_joined(group, below, ranks[at + 1] if at < 2 else 10**6):
                    leaving[at, unit] = leaving.get((at, unit), 0.0) + rate
        for (at, _), rate in leaving.items():
            assert rate <= levels[at].bytes_per_s * ranks[at] * (1 + 1e-9)


def units_joined(group: Sequence[int], below: int, above: int) -> set[int]:
    """Units of `below` ranks that the group leaves for another in the same unit of `above`."""
    units = {rank // below for rank in group}
    joined = Counter(unit * below // above for unit in units)
    return {unit for unit in units if joined[unit * below // above] > 1}


@given(levels, grids)
@PROPERTY
def test_one_rank_moves_nothing_and_more_of_them_are_never_faster_to_start(
    levels: tuple[Level, ...], placement: Placement
) -> None:
    ranks = placement.ranks
    starts = [group_link(levels, ranks[: k + 1], ranks) for k in range(len(ranks))]
    assert starts[0] == Link()
    for one, more in itertools.pairwise(starts):
        assert one.latency_s <= more.latency_s
        assert one.ring_s <= more.ring_s
        assert one.tree_s <= more.tree_s


@given(st.sampled_from((1.0, 3.0)), grids)
@PROPERTY
def test_of_one_level_every_group_has_the_same(speed: float, placement: Placement) -> None:
    for link, size in zip(
        axis_links((Level(0, 1.0, speed),), placement), placement.shape, strict=True
    ):
        assert link == (
            Link(1.0, speed, 0.0, 0.0, spread_bytes_per_s=speed, level=0) if size > 1 else Link()
        )


@given(levels, grids, st.integers(0, 3))
@PROPERTY
def test_whole_units_further_on_it_is_the_same(
    levels: tuple[Level, ...], placement: Placement, by: int
) -> None:
    moved = tuple(rank + by * levels[1].ranks for rank in placement.ranks)
    assert axis_links(levels, replace(placement, ranks=moved)) == axis_links(levels, placement)


def test_the_worst_of_links_is_the_slowest_in_each_respect() -> None:
    slow, late = (
        Link(1.0, 2.0, 3.0, 4.0, spread_bytes_per_s=5.0, level=0),
        Link(2.0, 9.0, 1.0, 1.0, spread_bytes_per_s=9.0, level=1),
    )
    assert worst((slow, late)) == Link(2.0, 2.0, 3.0, 4.0, spread_bytes_per_s=5.0, level=1)
    assert worst(()) == Link()


def test_ranks_of_a_host_share_its_memory_unless_the_transport_does_without() -> None:
    levels = (Level(0, 1.0, 4.0, shared_memory=True), Level(0, 2.0, 1.0))
    assert [level.ranks for level in on_hosts(levels, 2, shared=True)] == [2, 0]
    assert on_hosts(levels, 2, shared=False) == levels[1:]


@pytest.mark.parametrize(
    ("placement", "far"),
    [(grid(8, first=8), True), (grid(4, first=4), False), (grid(2, 8, first=16), True)],
    ids=["the next node", "the same node", "two nodes, an axis inside each"],
)
def test_another_node_is_far_where_an_axis_has_faster_links(
    placement: Placement, far: bool
) -> None:
    source = grid(4) if not far else grid(8)
    assert Hardware(levels=NODES).is_far(source, placement) == far


def test_single_ranks_are_never_far_apart() -> None:
    """They have nobody to gather from."""
    assert not Hardware(levels=NODES).is_far(grid(1), grid(1, first=8))
