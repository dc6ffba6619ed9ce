"""What is held back, and what must not be: a stage that waited for what the other stage waits for
would stop both.
"""

from __future__ import annotations

from dataclasses import replace

from flowrun.engine.actors.draft import Draft
from flowrun.engine.actors.plan import BOX, RECEIVE, REGION, BoxWork, RegionWork, Work
from flowrun.engine.ir.graph import BACKWARD
from flowrun.engine.lowering.throttle import Throttle

COMPUTE, MOVE = RegionWork((), (), (), (), ()), BoxWork((), ())


def draft(
    name: str, kind: str, reads: str, makes: str, sums: frozenset[str] = frozenset()
) -> Draft:
    work: Work = COMPUTE if kind == REGION else MOVE
    return Draft(name, kind, 0, BACKWARD, False, work, (*reads.split(),), (*makes.split(),), sums)


def throttle(*drafts: Draft) -> Throttle:
    readers: dict[str, list[int]] = {}
    for k, each in enumerate(drafts):
        for name in each.reads:
            readers.setdefault(name, []).append(k)
    maker = {name: k for k, each in enumerate(drafts) for name in each.makes}
    return Throttle(drafts, maker, readers, ())


REGIONS = tuple(draft(f"region {k}", REGION, "", f"g{k}") for k in range(3))
REDUCED = tuple(draft(f"reduce {k}", BOX, f"g{k}", f"r{k}") for k in range(3))


def added_up(more: str = "") -> Draft:
    sums = frozenset({"total"})
    return draft("sums", REGION, f"r0 r1 r2 {more}", "total", sums)


def test_a_region_waits_for_the_reduction_of_one_before() -> None:
    drafts = (*REGIONS, *REDUCED, added_up())
    assert list(throttle(*drafts).pairs(ahead=1)) == [(3, 1), (4, 2)]
    assert list(throttle(*drafts).pairs(ahead=2)) == [(3, 2)]


def test_what_another_stage_sends_is_not_held_back() -> None:
    """A gradient that is gathered as it came, for a sum: of a bias, where a block is cut."""
    received = draft("receive", RECEIVE, "", "v")
    gathered = draft("gather", BOX, "v", "w")
    drafts = (*REGIONS, *REDUCED, added_up("w"), received, gathered)
    assert list(throttle(*drafts).pairs(ahead=1)) == [(3, 1), (4, 2)]


def test_of_what_one_message_reduces_the_last_region_counts() -> None:
    received = draft("receive", RECEIVE, "", "v")
    mixed = draft("reduce", BOX, "g0 g1 v", "r0 r1 w")
    last = draft("reduce last", BOX, "g2", "r2")
    drafts = (*REGIONS, mixed, last, added_up("w"), received)
    assert list(throttle(*drafts).pairs(ahead=1)) == [(3, 2)]


def test_what_is_made_of_weights_once_a_step_is_not_held_back_as_a_gradient() -> None:
    """A norm of a weight, which is gathered for a sum of gradients under ZeRO 3."""
    norm = replace(draft("norm", REGION, "", "v"), per_step=True)
    gathered = draft("gather", BOX, "v", "w")
    drafts = (norm, *REGIONS, *REDUCED, gathered, added_up("w"))
    assert list(throttle(*drafts).pairs(ahead=1)) == [(4, 2), (5, 3)]
