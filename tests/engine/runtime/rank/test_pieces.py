"""Pieces of a rank in a buffer, and which of them another host holds as well."""

from __future__ import annotations

import pytest

from flowrun.engine.runtime.rank.pieces import (
    count_bytes,
    count_copied_bytes,
    find_lent,
    lay_out,
)
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load

KEYS = ("model.depth=1", "model.width=16", "data.max_bytes=100000", "engine.check_capture=false")


def plan_of(*keys: str) -> Job:
    return Job(load([*keys, *KEYS]), values=False)


def test_pieces_lie_one_after_the_other() -> None:
    plan = plan_of("recipe=gpt_hybrid").training.plan
    for rank in range(plan.num_ranks):
        pieces, total = lay_out(plan, rank, {})
        starts = [piece.start for piece in pieces] + [total]
        for piece, end in zip(pieces, starts[1:], strict=True):
            assert piece.start % 64 == 0
            assert piece.start + piece.num_bytes <= end
        assert count_bytes(plan, rank, {}) == total


@pytest.mark.parametrize(
    ("keys", "some"),
    [
        (("recipe=gpt_dp", "placement.axes.data=2"), False),
        (("recipe=gpt_zero",), True),
        (("recipe=gpt_tp",), True),
    ],
    ids=["the batch is divided: nothing", "states are divided", "weights are divided"],
)
def test_what_the_next_host_holds_alike_is_not_copied(keys: tuple[str, ...], some: bool) -> None:
    plan = plan_of(*keys).training.plan
    copied = count_copied_bytes(plan, 2)
    assert [num_bytes > 0 for num_bytes in copied] == [some, some]
    lent = find_lent(plan, [0], [1])[0]
    assert set(lent.values()) == {1}  # norms, at least
    assert copied[0] == count_bytes(plan, 0, lent) < count_bytes(plan, 0, {})
    assert count_copied_bytes(plan, 1) == [0]
