from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import pipelining

from flowrun.launcher.bench.load_suite import load_suite
from flowrun.launcher.bench.peers.torch_pipelining import ONE_STAGE, best_cut, products, stage_ranks
from flowrun.models.gpt import GPT as Model

GPT = [0.0, 1.0, 1.0, 1.0, 1.0, 2.7]  # embedding, blocks, head


@pytest.mark.parametrize(
    ("schedule", "homes", "cut"),
    [
        ("1F1B", [0, 1], (4,)),
        ("InterleavedZeroBubble", [0, 1, 0, 1], (2, 3, 5)),
        ("ZBVZeroBubble", [0, 1, 1, 0], (2, 3, 5)),
    ],
)
def test_the_head_is_balanced_by_blocks(
    schedule: str, homes: list[int], cut: tuple[int, ...]
) -> None:
    assert stage_ranks(schedule, 2) == homes
    assert best_cut(GPT, homes) == cut


@given(work=st.lists(st.integers(0, 9), min_size=4, max_size=7))
def test_no_cut_leaves_the_busiest_rank_less(work: list[int]) -> None:
    homes = [0, 1, 1, 0]

    def busiest(cut: tuple[int, ...]) -> int:
        sizes = [sum(work[a:b]) for a, b in pairwise((0, *cut, len(work)))]
        return max(sizes[0] + sizes[3], sizes[1] + sizes[2])

    cuts = combinations(range(1, len(work)), 3)
    assert busiest(best_cut(work, homes)) == min(map(busiest, cuts))


def test_fewer_units_than_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="3 units cannot be cut into 4 stages"):
        best_cut([1, 1, 1], [0, 1, 0, 1])


def test_products_leave_look_ups_out() -> None:
    gpt = Model(vocabulary=32, context=8, depth=1, heads=2, width=4)
    assert products(gpt.embed) == 0
    assert products(gpt.blocks[0]) == 12 * 4 * 4
    assert products(gpt.head) == 4 * 32


def test_torch_has_the_schedules_of_the_suite() -> None:
    peers = load_suite(["suite=peers"])[0].experiments["stages"].peers.values()
    for peer in peers:
        kind = getattr(pipelining, f"Schedule{peer.schedule}")
        several = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
        assert several == (peer.schedule not in ONE_STAGE)
