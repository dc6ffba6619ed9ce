from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from flowrun.engine.actors.plan import COMMUNICATION, Plan
from flowrun.engine.ir.placement import Placement
from flowrun.engine.lowering import merge_chains as merging
from flowrun.engine.lowering.add_regions import form_regions
from flowrun.engine.lowering.merge_chains import join_regions
from flowrun.engine.pipeline import PASSES, lower
from flowrun.engine.rehearsal.rehearsal import Rehearsal, rehearse
from flowrun.engine.strategy import Strategy
from support.layouts.grids import LAYOUTS, Layout, compiled, run_plan, strategy
from support.layouts.plain_loop import TINY_GPT, Training, mlp
from support.plans.graph_text import one_axis, one_rank_stages, rewritten

ONE_BATCH = mlp(micro_batches=1)
TRAININGS = {"gpt": TINY_GPT, "one micro-batch": ONE_BATCH}
MERGED = [Layout(), Layout(data=2), Layout(tensor=2), Layout(data=2, tensor=2)]
ROUNDING_S = 1e-12  # a sum of other parts
# Steps that overlap are a list schedule, which is not monotone (Graham 1969): with fewer acts to
# choose from it may choose worse, though each act may begin earlier.
ANOMALY = 1e-3


def chains(strategy: Strategy) -> list[str]:
    """The ops of each merged region of two layers."""
    graph = rewritten(PASSES, strategy)
    merged = join_regions(graph, form_regions(graph), strategy.micro_batches)
    return [" ".join(op.name for op in region.ops) for region in merged]


def test_regions_of_one_rank_without_a_choice_are_one() -> None:
    alone = replace(one_axis("data"), axes=(), placements=(Placement((), (0,)),))
    assert chains(alone)[0] == "at h r bt y loss loss/sum"


def test_a_region_that_only_one_of_two_boxings_waits_for_stays_apart() -> None:
    """The gradient of %a needs %h and %r, but neither %y nor the loss."""
    found = chains(one_axis("data"))
    assert found[:2] == ["at h r", "bt y loss loss/sum"]
    assert "dyt dyt:S(1) db grad/b.weight dr" in found
    assert "dr:S(0) dh dht da grad/a.weight" in found


def test_stages_keep_apart_what_another_micro_batch_may_go_between() -> None:
    stages = one_rank_stages(2, stage_modules=(("a", "act"), ("b",)))
    assert "at h r" in chains(replace(stages, micro_batches=1))
    assert {"at h", "r"} <= set(chains(replace(stages, micro_batches=2)))


def test_equal_blocks_stay_programs_of_their_own() -> None:
    graph = compiled(TINY_GPT, Layout()).plan.graph
    found = {region.unit for region in join_regions(graph, form_regions(graph), 1)}
    assert {"blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm..loss"} <= found


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
