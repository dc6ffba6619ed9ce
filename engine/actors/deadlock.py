"""deadlock: an error that names who waits for which register of which rank, around the cycle."""

from __future__ import annotations

from collections.abc import Sequence

from flowrun.engine.actors.plan import Plan, TransferWork
from flowrun.engine.actors.protocol import counts
from flowrun.engine.actors.scheduler import Scheduler
from flowrun.engine.errors import PlanError

Wait = tuple[str, int]  # ("input" | "credit", register), ("turn", axis), ("peer", channel or -1)


def deadlock(plan: Plan, ranks: Sequence[Scheduler]) -> PlanError:
    """Return the error that names who waits for which register of which rank, around the cycle.

    plan: the plan that does not end.  ranks: one scheduler of each stage, as they stand.
    """
    cycle = _cycle(plan, ranks)
    problem = "the plan would deadlock: its registers do not suffice."
    for actor, wait in cycle:
        stage = plan.actors[actor].stage
        first = plan.placements[stage].ranks[0]
        problem += f"\n{describe_wait(ranks[stage], first, actor, *wait)}"
    short = [register for _, (why, register) in cycle if why == "credit"]
    if not short:
        return PlanError("plan", problem)
    more = "Give the registers more slots: a larger placement.in_flight or engine.register_slots."
    return PlanError(f"placement.in_flight (register {short[0]})", problem, more)


def _cycle(plan: Plan, ranks: Sequence[Scheduler]) -> list[tuple[int, Wait]]:
    """Follow an actor that waits to the one it waits for, until one repeats."""
    waits: dict[int, Wait] = {a: why[0] for rank in ranks for a, why in rank.waits().items()}
    for rank in ranks:
        waits.update({actor: ("peer", _channel(plan, actor)) for actor in rank.busy()})
    seen: dict[int, Wait] = {}
    actor = next(iter(waits), None)
    while actor in waits and actor not in seen:
        seen[actor] = waits[actor]
        actor = _awaited_actor(plan, ranks, actor, *waits[actor])
    chain = list(seen.items())
    return chain[list(seen).index(actor) :] if actor in seen else chain


def _awaited_actor(
    plan: Plan, ranks: Sequence[Scheduler], actor: int, why: str, what: int
) -> int | None:
    """Return the actor that one waits for; None if one rank of each stage does not show it."""
    if why == "peer":
        ends = (a.id for a in plan.actors if what >= 0 and _channel(plan, a.id) == what)
        return next((end for end in ends if end != actor), None)
    return awaited_on_rank(ranks[plan.actors[actor].stage], actor, why, what)


def awaited_on_rank(rank: Scheduler, actor: int, why: str, what: int) -> int | None:
    """Return the actor of the same rank that one waits for."""
    match why:
        case "input":
            return rank.plan.registers[what].producer
        case "credit":
            return _holder(rank, what)
    return rank.actor_before(actor)


def _holder(rank: Scheduler, register: int) -> int:
    """Return the reader that has returned the fewest credits: it holds the oldest slot."""
    maker = rank.plan.registers[register].producer
    assert maker is not None, f"register {register} is constant: nobody waits for a slot of it"
    spec = rank.specs[maker]
    ports = zip(counts(spec, rank.states[maker]), spec.ports, strict=True)
    ends = ((n, port.other.to) for n, port in ports if port.fills and port.register == register)
    return min(ends)[1]


def describe_wait(scheduler: Scheduler, rank: int, actor: int, why: str, what: int) -> str:
    """Describe what one actor waits for."""
    plan = scheduler.plan
    place = f"{name_actor(plan, actor)} on rank {rank} (stage {plan.actors[actor].stage})"
    match why:
        case "input":
            maker = name_actor(plan, plan.registers[what].producer)
            return f"{place} waits to read register {what} from {maker}"
        case "credit":
            holder = name_actor(plan, _holder(scheduler, what))
            free = f"a free slot ({plan.registers[what].slots} in all) of register {what}"
            return f"{place} waits for {free}, held by {holder}"
        case "turn":
            others = f" in the order of {plan.queues[what]}" if what >= 0 else ""
            return f"{place} waits for its turn{others}"
    other = f"the other end of channel {what}" if what >= 0 else "the other ranks of its group"
    return f"{place} waits for {other}"


def name_actor(plan: Plan, actor: int | None) -> str:
    """Return the number and the name of an actor."""
    return "nobody" if actor is None else f"actor {actor} {plan.actors[actor].name}"


def _channel(plan: Plan, actor: int) -> int:
    work = plan.actors[actor].work
    return work.channel if isinstance(work, TransferWork) else -1
