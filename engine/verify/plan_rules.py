"""validate: what a Plan promises of actors and their work; register_rules.py has its registers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from flowrun.engine.actors.plan import (
    ACTORS,
    BUFFERS,
    ORDER,
    PLAN_LEVELS,
    RECEIVE,
    SEND,
    Actor,
    BoxWork,
    CopyWork,
    Plan,
    RegionWork,
    TransferWork,
)
from flowrun.engine.verify.register_rules import REGISTER_RULES
from flowrun.engine.verify.rules import Fault, Rules, name_of, refuse_faults


def validate(plan: Plan, level: str = ORDER, made_by: str = "") -> None:
    """Raise PlanError if the plan breaks a promise; it names the actor or register, and the pass.

    level: of the plan, one of PLAN_LEVELS.
    """
    refuse_faults(PLAN_RULES, plan, PLAN_LEVELS, level, made_by)


def _find_wrong_numbers(plan: Plan) -> Iterator[Fault]:
    """An actor has its place in the list as its number, and a stage."""
    for k, actor in enumerate(plan.actors):
        if actor.id != k:
            yield Fault(actor, f"it is number {k} of the plan's actors.")
        if not 0 <= actor.stage < len(plan.placements):
            yield Fault(actor, f"it is of stage {actor.stage}.")


def _find_lost_ops(plan: Plan) -> Iterator[Fault]:
    """One actor does each op of the graph.

    Boxings are ops that an actor does without naming them: by what they make.
    """
    done = Counter(name for actor in plan.actors for name in _does(actor))
    for op in plan.graph.ops:
        if done[op.name] != 1:
            yield Fault(f"op {op.name} ({op.target})", f"{done[op.name]} actors do it.")


def _does(actor: Actor) -> Iterator[str]:
    work = actor.work
    if isinstance(work, RegionWork):
        yield from (op.name for op in work.ops)
    if isinstance(work, BoxWork) or (isinstance(work, TransferWork) and actor.kind == RECEIVE):
        yield from (move.made for move in work.moves)
    if isinstance(work, CopyWork):
        yield from (f"copy/{made}" for _, made in work.copies)


def _find_mixed_regions(plan: Plan) -> Iterator[Fault]:
    """The ops of a region are of one stage and phase."""
    for actor, work in _regions(plan):
        for op in work.ops:
            if (op.stage, op.phase, op.per_step) != (actor.stage, actor.phase, actor.per_step):
                yield Fault(actor, f"op {op.name} is of {op.phase}, stage {op.stage}.")


def _find_disordered_regions(plan: Plan) -> Iterator[Fault]:
    """A region reads, or an op of it before makes, what its ops read."""
    for actor, work in _regions(plan):
        inside = {name for op in work.ops for name in op.makes}
        there = set(work.reads)
        for op in work.ops:
            for name in op.inputs:
                if name not in there:
                    later = "a later op of it makes" if name in inside else "it does not read"
                    yield Fault(actor, f"op {op.name} reads %{name}, which {later}.")
            there.update(op.makes)
        for name in (*work.makes, *work.accumulates, *(new for _, new in work.updates)):
            if name not in inside:
                yield Fault(actor, f"none of its ops makes %{name}.")


def _find_unmatched_sends(plan: Plan) -> Iterator[Fault]:
    """A channel has one send and one receive of its tensors."""
    works = [actor.work for actor in plan.actors if isinstance(actor.work, TransferWork)]
    for work in dict.fromkeys(works):
        where = f"channel {work.channel}"
        ends = [plan.actors[k] for k in plan.channel_ends[work.channel]]
        sends, receives = ([a for a in ends if a.kind == kind] for kind in (SEND, RECEIVE))
        if len(sends) != 1 or len(receives) != 1:
            yield Fault(where, f"it has {len(sends)} sends and {len(receives)} receives.")
            continue
        (send,), (receive,) = sends, receives
        if send.work != receive.work or send.per_step != receive.per_step:
            yield Fault(where, f"{name_of(send)} and {name_of(receive)} differ.")
        if (send.stage, receive.stage) != (work.source_stage, work.target_stage):
            fact = f"it goes from stage {send.stage} to stage {receive.stage}."
            yield Fault(where, fact)


def _find_mixed_boxings(plan: Plan) -> Iterator[Fault]:
    """A boxing is one collective with a step for each tensor."""
    for actor in plan.actors:
        if not isinstance(actor.work, BoxWork):
            continue
        steps, moves = actor.work.steps, actor.work.moves
        if len(steps) != len(moves):
            yield Fault(actor, f"it has {len(steps)} steps for {len(moves)} tensors.")
        kinds = {(step.axis, step.kind, step.reduce) for step in steps}
        if len(kinds) != 1:
            yield Fault(actor, f"its steps are {', '.join(map(str, steps))}.")
        if not 0 <= actor.work.step.axis < len(plan.axes):
            yield Fault(actor, f"it is on axis {actor.work.step.axis}.")


def _find_wrong_moves(plan: Plan) -> Iterator[Fault]:
    """A move has shape, dtype and locations of its tensors."""
    for actor in plan.actors:
        if not isinstance(actor.work, BoxWork | TransferWork):
            continue
        for move in actor.work.moves:
            for name, location in ((move.read, move.source), (move.made, move.target)):
                tensor = plan.tensors[name]
                if (tensor.shape, tensor.dtype) != (move.shape, move.dtype):
                    yield Fault(actor, f"it moves {tensor} as {move.dtype}{move.shape}.")
                if location != plan.locations[name]:
                    fact = f"%{name} lies as {plan.locations[name]}, and moves as {location}."
                    yield Fault(actor, fact)


def _find_bad_overwrites(plan: Plan) -> Iterator[Fault]:
    """A result is written over an equal tensor that nobody reads any more."""
    for actor, work in _regions(plan):
        maker = {name: (k, op) for k, op in enumerate(work.ops) for name in op.makes}
        for result, over in work.overwrites:
            k, op = maker.get(result, (0, None))
            if op is None or over not in op.inputs:
                yield Fault(actor, f"no op of it reads %{over} and makes %{result}.")
                continue
            if replace(plan.tensors[result], name=over) != plan.tensors[over]:
                fact = f"{plan.tensors[result]} is written over {plan.tensors[over]}."
                yield Fault(actor, fact)
            for reader in (op.name for op in work.ops[k + 1 :] if over in op.inputs):
                fact = f"%{result} is written over %{over}, which op {reader} reads later."
                yield Fault(actor, fact)


def _find_wrong_orders(plan: Plan) -> Iterator[Fault]:
    """The order of a group, by which its ranks issue, has each act of its collectives once."""
    orders: dict[tuple[int, int], Counter[tuple[int, int]]] = {}
    for actor in plan.actors:
        queue = plan.queue(actor)
        if queue >= 0:
            acts = ((actor.id, act) for act in range(plan.acts_per_step(actor)))
            orders.setdefault((actor.stage, queue), Counter()).update(acts)
    given = {group: Counter(acts) for group, acts in plan.order}
    for stage, axis in dict.fromkeys((*orders, *given)):
        wanted, listed = orders.get((stage, axis), Counter()), given.get((stage, axis), Counter())
        if wanted != listed:
            first = next(iter((wanted - listed) + (listed - wanted)))
            name = f"stage {stage}, {plan.queues[axis]}"
            times = f"{listed[first]} times, not {wanted[first]}"
            yield Fault(
                plan.actors[first[0]], f"the order of {name} has act {first[1]} of it {times}."
            )


def _regions(plan: Plan) -> Iterator[tuple[Actor, RegionWork]]:
    for actor in plan.actors:
        if isinstance(actor.work, RegionWork):
            yield actor, actor.work


PLAN_RULES: Rules[Plan] = {
    ACTORS: (
        _find_wrong_numbers,
        _find_mixed_regions,
        _find_disordered_regions,
        _find_unmatched_sends,
        _find_mixed_boxings,
        _find_wrong_moves,
        _find_lost_ops,
    ),
    **REGISTER_RULES,
    BUFFERS: (_find_bad_overwrites,),
    ORDER: (_find_wrong_orders,),
}
