from dataclasses import asdict, replace

import pytest

from flowrun.engine.actors.plan import BOX, RECEIVE, SEND
from flowrun.engine.compile import Rehearsed, plan_training
from flowrun.engine.trace.step_time import StepTime, measure_steps
from flowrun.engine.trace.trace import TraceEvent, What
from support.layouts.grids import Layout, captured, compiled, strategy
from support.layouts.plain_loop import gpt

TRAINING = gpt(blocks=1, width=16, samples=8, micro_batches=2)
LATE_NS = 10**9


def notes_of(found: Rehearsed, rank: int, late: int = 0) -> list[TraceEvent]:
    """The rehearsed step as a rank would have noted it; its thread sleeps between acts."""
    stage = found.plan.stage_of(rank)
    own = [e for e in found.rehearsal.first_step if e.stage == stage]
    out, thread = [], []
    for e in own:
        actor = found.plan.actors[e.actor]
        begin, end = (round(t * 1e12) + late for t in (e.start, e.end))
        if actor.kind in (BOX, SEND, RECEIVE) or actor.runs_in_thread:
            out.append(TraceEvent(What.ISSUE, e.actor, e.act, begin, begin))
            out.append(TraceEvent(What.FLIGHT, e.actor, e.act, end, end))
            out.append(TraceEvent(What.TAKE, e.actor, e.act, end, end))
        else:
            thread.append(TraceEvent(What.COMPUTE, e.actor, e.act, begin, end))
    last = max(note.end for note in (*out, *thread))
    awake = sorted(thread, key=lambda note: note.begin)
    at = late
    for note in (*awake, TraceEvent(What.COMPUTE, own[-1].actor, own[-1].act, last, last)):
        if note.begin > at:
            out.append(TraceEvent(What.SLEEP, own[-1].actor, own[-1].act, at, note.begin))
        at = max(at, note.end)
    return [*out, *thread, TraceEvent(What.RUN, 0, 0, late, last)]


def told(layout: Layout, **late: int) -> tuple[StepTime, ...]:
    """Of all ranks; late: rank -> ns behind the others."""
    # where targets are counted, the next step is read between the acts of this one
    alone = replace(strategy(TRAINING, layout), counts_step=False)
    found = plan_training(captured(TRAINING), alone)
    ranks = range(layout.num_ranks)
    return measure_steps(
        found.plan, {r: notes_of(found, r, late.get(f"rank{r}", 0)) for r in ranks}
    )


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(data=2), Layout(tensor=2), Layout(stages=2), Layout(tensor=2, stages=2)],
    ids=str,
)
def test_the_parts_add_up_to_the_step(layout: Layout) -> None:
    for time in told(layout):
        parts = [value for key, value in asdict(time).items() if key.endswith("_s")]
        assert sum(parts) - time.step_s == pytest.approx(time.step_s)
        waits = time.communication_s + time.ranks_s + time.data_s
        assert sum(time.reasons.values()) == pytest.approx(waits)


def test_ranks_in_time_with_each_other_wait_for_bytes_and_data_alone() -> None:
    for time in told(Layout(tensor=2)):
        assert time.communication_s > 0
        assert time.ranks_s == pytest.approx(0, abs=1e-9)


def test_a_late_rank_is_waited_for() -> None:
    early, late = told(Layout(tensor=2), rank1=LATE_NS)
    assert early.ranks_s > 10 * late.ranks_s
    assert "tensor" in next(iter(early.reasons))


def test_a_stage_waits_for_the_other() -> None:
    for time in told(Layout(stages=2)):
        assert time.ranks_s > 0


def test_what_began_before_the_record_is_no_whole_step() -> None:
    found = compiled(TRAINING, Layout())
    notes = notes_of(found, 0)
    assert measure_steps(found.plan, {0: notes[1:]}) == ()
