from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flowrun.engine.actors.plan import COMMUNICATION, Plan
from flowrun.engine.lowering import merge_chains as merging
from flowrun.engine.pipeline import lower
from flowrun.engine.rehearsal.rehearsal import Rehearsal, rehearse
from support.layouts.grids import LAYOUTS, Layout, compiled, run_plan, strategy
from support.layouts.plain_loop import TINY_GPT, Training, mlp

ONE_BATCH = mlp(micro_batches=1)
TRAININGS = {"gpt": TINY_GPT, "one micro-batch": ONE_BATCH}
MERGED = [Layout(), Layout(data=2), Layout(tensor=2), Layout(data=2, tensor=2)]
ROUNDING_S = 1e-12  # a sum of other parts
# Steps that overlap are a list schedule, which is not monotone (Graham 1969): with fewer acts to
# choose from it may choose worse, though each act may begin earlier.
ANOMALY = 1e-3


@contextmanager
def _unmerged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(merging, "join_regions", lambda graph, regions, micro_batches: regions)
        yield


def both(
    training: Training, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> tuple[tuple[Plan, Rehearsal], tuple[Plan, Rehearsal]]:
    """The plan as regions alone, and with chains merged, both rehearsed."""
    chosen = strategy(training, layout)
    graph = compiled(training, layout).plan.graph
    with _unmerged(monkeypatch):
        apart = lower(graph, chosen)
    merged = lower(graph, chosen)
    return (apart, rehearse(apart)), (merged, rehearse(merged))


def starts(plan: Plan, rehearsal: Rehearsal) -> dict[tuple[str, int, int], float]:
    return {
        (plan.actors[e.actor].name, e.stage, e.act): e.start
        for e in rehearsal.first_step
        if plan.actors[e.actor].kind in COMMUNICATION
    }


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_boxing_starts_later_and_no_step_takes_longer(
    training: Training, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    (apart, before), (merged, after) = both(training, layout, monkeypatch)
    assert after.first_step_s <= before.first_step_s + ROUNDING_S
    assert after.step_s <= before.step_s * (1 + ANOMALY)
    then, now = starts(apart, before), starts(merged, after)
    assert then.keys() == now.keys()
    assert {k: then[k] for k in then if now[k] > then[k] + ROUNDING_S} == {}


@pytest.mark.parametrize("layout", MERGED, ids=str)
def test_a_chain_computes_what_its_regions_compute(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    (apart, _), (merged, _) = both(ONE_BATCH, layout, monkeypatch)
    assert len(merged.actors) < len(apart.actors)
    one, other = (run_plan(ONE_BATCH, plan, steps=2) for plan in (apart, merged))
    assert one.losses == other.losses
    assert all(value.equal(other.weights[name]) for name, value in one.weights.items())
