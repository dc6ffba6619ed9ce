"""The step that is drawn is the one that the rehearsal foresaw."""

import pytest

from flowrun.engine.cost.footprint import memory_of
from flowrun.engine.rehearsal.draw_step import draw_step
from flowrun.engine.trace.causes import COMPUTE, LINK, find_causes, longest_chain
from flowrun.engine.trace.trace import TURN
from support.layouts.grids import Layout, compiled
from support.layouts.plain_loop import TINY_GPT

LAYOUTS = (Layout(), Layout(data=2, zero=1), Layout(tensor=2), Layout(stages=2, tensor=2))
IDS = [str(layout) for layout in LAYOUTS]


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_memory_of_every_moment_comes_to_the_peak_of_the_rehearsal(layout: Layout) -> None:
    rehearsed = compiled(TINY_GPT, layout)
    for stage, kinds in enumerate(draw_step(rehearsed.plan, 1000).memory):
        most = max(map(sum, zip(*kinds.values(), strict=True)))
        assert most == rehearsed.rehearsal.peak_bytes[stage]
        assert kinds["parameter"][0] == memory_of(rehearsed.plan, stage)["parameter"]


def test_what_waits_for_backward_grows_and_is_gone_at_the_end() -> None:
    (kinds,) = draw_step(compiled(TINY_GPT, Layout()).plan, 50).memory
    assert max(kinds["stash"]) > kinds["stash"][0] and kinds["stash"][-1] < max(kinds["stash"]) / 10


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_the_longest_chain_takes_the_whole_step(layout: Layout) -> None:
    plan = compiled(TINY_GPT, layout).plan
    events = sorted(draw_step(plan, 1).events, key=lambda event: (event.start, event.end))
    causes = find_causes(plan, events)
    chain = list(longest_chain(events, causes))
    end = max(event.end for event in events)
    assert sum(spent for _, spent in chain) == pytest.approx(end)
    assert events[chain[0][0]].end == end and causes[chain[-1][0]] is None


def test_a_cause_is_over_before_what_waited_for_it_begins() -> None:
    plan = compiled(TINY_GPT, Layout(stages=2, tensor=2)).plan
    events = sorted(draw_step(plan, 1).events, key=lambda event: (event.start, event.end))
    found = [
        (e, cause) for e, cause in zip(events, find_causes(plan, events), strict=True) if cause
    ]
    for event, cause in found:
        of = events[cause.of]
        assert (of.start if cause.why == TURN else of.end) <= event.start
        kinds = [plan.actors[each.actor] for each in (of, event)]
        if cause.why == COMPUTE:
            assert all(actor.computes for actor in kinds) and of.stage == event.stage
        if cause.why == LINK:
            assert not any(actor.computes for actor in kinds)
    assert {"input", COMPUTE} <= {cause.why for _, cause in found}
