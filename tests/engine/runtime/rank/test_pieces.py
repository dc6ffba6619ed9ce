from __future__ import annotations

from flowrun.engine.runtime.rank.pieces import count_bytes, lay_out
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load

KEYS = ("model.depth=1", "model.width=16", "data.max_bytes=100000", "engine.check_capture=false")


def test_pieces_lie_one_after_the_other() -> None:
    plan = Job(load(["recipe=gpt_hybrid", *KEYS]), values=False).training.plan
    for rank in range(plan.num_ranks):
        pieces, total = lay_out(plan, rank)
        starts = [piece.start for piece in pieces] + [total]
        for piece, end in zip(pieces, starts[1:], strict=True):
            assert piece.start % 64 == 0
            assert piece.start + piece.num_bytes <= end
        assert count_bytes(plan, rank) == total
