"""plan_updates: several updates of one model in a step, each a plan, run one after the other.

All plans have the stages of the first, and each variable in one home: where the plan that trains it
keeps it, else where the first that reads it does.  Every plan holds all variables, so that the
bytes of a rank are those of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from flowrun.engine.actors.plan import Plan
from flowrun.engine.compile import Compilation, Rehearsed
from flowrun.engine.ir.graph import Variable
from flowrun.engine.ir.sbp import NdSbp
from flowrun.engine.passes.stages.follow_training import follow_update
from flowrun.engine.rehearsal.rehearsal import rehearse


def plan_updates(stories: Sequence[Compilation]) -> tuple[Rehearsed, ...]:
    """Plan the updates of a step, in the order in which they run.

    Raises RecipeError as plan_training does.
    """
    first, *others = stories
    graph = first.training.plan.graph
    drafts = [first.training]
    for story in others:
        drafts.append(story.under(follow_update(story.strategy, graph, {})).training)
    homes = _find_homes([draft.plan for draft in drafts])
    plans = [
        draft.plan
        if _is_at_home(draft.plan, homes)
        else story.under(follow_update(story.strategy, graph, homes)).training.plan
        for story, draft in zip(stories, drafts, strict=True)
    ]
    return tuple(_rehearse(_with_variables(plan, plans)) for plan in plans)


def add_up(planned: Sequence[Rehearsed], every: Sequence[int]) -> Rehearsed:
    """Return the plan of the first update with what is foreseen of a step with all of them: ranks
    rest between two updates, so that each fills its pipeline anew; one alone does not.

    every: of each update, the steps from one to the next; 0: it takes the place of the first, which
    is not faster.
    """
    if len(planned) == 1:
        return planned[0]
    found = [each.rehearsal for each in planned]
    due = [(each, n) for each, n in zip(found, every, strict=True) if n]
    step_s = sum(each.first_step_s / n for each, n in due)
    stages = range(len(planned[0].plan.placements))

    def busy_s(stage: int) -> float:
        return sum((1 - r.bubble[stage]) * r.step_s / n for r, n in due)

    whole = replace(
        found[0],
        step_s=step_s,
        first_step_s=sum(each.first_step_s for each, _ in due),
        bubble=tuple(max(0.0, 1 - busy_s(stage) / step_s) for stage in stages),
        peak_bytes=_most(r.peak_bytes for r in found),
        bound_bytes=_most(r.bound_bytes for r in found),
        sent_bytes=sum(r.sent_bytes / n for r, n in due),
    )
    return Rehearsed(planned[0].plan, whole)


def _most(bytes_of_plans: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the most bytes of a rank of each stage."""
    return tuple(map(max, zip(*bytes_of_plans, strict=True)))


def _rehearse(plan: Plan) -> Rehearsed:
    return Rehearsed(plan, rehearse(plan))


def _find_homes(plans: Sequence[Plan]) -> dict[str, NdSbp]:
    """Return the home of each parameter and buffer; of several the one that trains it has it."""
    homes: dict[str, NdSbp] = {}
    held = [v for plan in plans for v in plan.graph.variables if v.kind != "state"]
    for v in sorted(held, key=lambda v: v.kind == "buffer" or v.new is None):
        homes.setdefault(v.name, v.nd_sbp)
    return homes


def _is_at_home(plan: Plan, homes: Mapping[str, NdSbp]) -> bool:
    return all(homes.get(v.name, v.nd_sbp) == v.nd_sbp for v in plan.graph.variables)


def _with_variables(plan: Plan, others: Sequence[Plan]) -> Plan:
    """Return a plan with the variables of other plans that it lacks, which it does not read."""
    known = {v.name for v in plan.graph.variables}
    more: dict[str, tuple[Variable, Plan]] = {}
    for other in others:
        for v in other.graph.variables:
            if v.name not in known:
                more.setdefault(v.name, (v, other))
    if not more:
        return plan
    variables = tuple(replace(v, new=None) for v, _ in more.values())
    tensors = {v.tensor: of.graph.tensors[v.tensor] for v, of in more.values()}
    assert plan.graph.tensors.keys().isdisjoint(tensors), "names of variables are their own"
    graph = replace(
        plan.graph,
        variables=(*plan.graph.variables, *variables),
        tensors={**plan.graph.tensors, **tensors},
    )
    return replace(plan, graph=graph, tensors=graph.tensors, variables=graph.variable_of)
