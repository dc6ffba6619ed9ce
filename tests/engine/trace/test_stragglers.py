from dataclasses import replace

from flowrun.engine.actors.plan import Plan
from flowrun.engine.ir.placement import Placement
from flowrun.engine.trace.stragglers import find_straggler
from support.plans.unit_pipeline import unit_plan


def two_stages_of_three() -> Plan:
    grids = (Placement((("data", 3),), (0, 1, 2)), Placement((("data", 3),), (3, 4, 5)))
    return replace(unit_plan(2, 4, "1f1b"), placements=grids)


def test_the_rank_that_waits_less_than_its_peers_is_the_straggler() -> None:
    waited_s = {0: 0.30, 1: 0.31, 2: 0.30, 3: 0.25, 4: 0.02, 5: 0.26}
    found = find_straggler(two_stages_of_three(), waited_s, 1.0)
    assert found is not None
    assert (found.rank, round(found.lost_s, 3)) == (4, 0.235)
    assert "they wait 235 ms longer in a step of 1,000 ms (24%)" in str(found)


def test_stages_that_wait_unlike_each_other_have_no_straggler() -> None:
    waited_s = {0: 0.05, 1: 0.06, 2: 0.05, 3: 0.6, 4: 0.58, 5: 0.61}
    assert find_straggler(two_stages_of_three(), waited_s, 1.0) is None


def test_a_rank_without_peers_is_no_straggler() -> None:
    assert find_straggler(unit_plan(2, 4, "1f1b"), {0: 0.0, 1: 0.9}, 1.0) is None
    assert find_straggler(two_stages_of_three(), {}, 1.0) is None
