"""add_readers: the actors that supply fields of the batch and numbers of the step.

Where the data set says in which steps a sample is made, each step is an actor of its own, before
the reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from flowrun.engine.actors.plan import READER, Actor, FeedWork, Plan, PrepareWork
from flowrun.engine.ir.graph import COUNT, FORWARD, UPDATE, Feed, LogicalTensor
from flowrun.engine.ir.location import Location
from flowrun.engine.ir.placement import largest_shape
from flowrun.engine.lowering.lower import set_actors
from flowrun.engine.strategy import Strategy


def add_readers(plan: Plan, strategy: Strategy) -> Plan:
    """Add the readers of every stage, before all other actors (a pass)."""
    tensors, locations = dict(plan.tensors), dict(plan.locations)
    readers: list[Actor] = []
    for stage in range(strategy.num_stages):
        for per_step in (False, True):
            here = [f for f in plan.graph.feeds if f.stage == stage and f.per_step == per_step]
            for feeds in _together(plan, strategy, tuple(here)):
                chain = list(_chain_of_steps(plan, strategy, feeds))
                for samples, lies, actor in chain:
                    tensors[samples.name], locations[samples.name] = samples, lies
                    readers.append(actor)
                source = chain[-1][0].name if chain else None
                readers.append(_reader(strategy, feeds, source))
    plan = replace(plan, tensors=tensors, locations=locations)
    return set_actors(plan, (*readers, *plan.actors))


def _reader(strategy: Strategy, feeds: tuple[Feed, ...], source: str | None) -> Actor:
    work = FeedWork(feeds, source, _are_unprepared(strategy, feeds))
    stage, per_step = feeds[0].stage, feeds[0].per_step
    name, phase = ("step", UPDATE) if per_step else ("batch", FORWARD)
    return Actor(0, name, READER, stage, phase=phase, per_step=per_step, work=work)


def _are_unprepared(strategy: Strategy, feeds: tuple[Feed, ...]) -> bool:
    """True if all fields among them can be had without the rest of their samples."""
    fields = {feed.field for feed in feeds if not feed.is_own}
    return bool(fields) and fields <= set(strategy.unprepared)


def _together(
    plan: Plan, strategy: Strategy, feeds: tuple[Feed, ...]
) -> Iterator[tuple[Feed, ...]]:
    """Group the feeds that one reader supplies.

    Counts of a step read it ahead: their fields have a reader of their own if these can be had
    without the rest of their samples.
    """
    counted = tuple(
        feed
        for feed in feeds
        if any(op.phase == COUNT for op in plan.graph.consumers.get(feed.tensor, ()))
    )
    if {feed.field for feed in counted} <= set(strategy.unprepared):
        yield from filter(None, (counted, tuple(f for f in feeds if f not in counted)))
    elif feeds:
        yield feeds


def _chain_of_steps(
    plan: Plan, strategy: Strategy, feeds: tuple[Feed, ...]
) -> Iterator[tuple[LogicalTensor, Location, Actor]]:
    """Yield an actor for each step that makes a sample, with what it makes, and where.

    Samples are described as a tensor of bytes that lies as the field of which most is held.
    """
    fields = [feed for feed in feeds if not feed.is_own]
    if not fields or _are_unprepared(strategy, feeds):
        return
    stage, tensors = fields[0].stage, plan.tensors
    grid = strategy.placements[stage].shape
    widest = max(fields, key=lambda f: largest_shape(tensors[f.tensor].shape, f.nd_sbp, grid)[0])
    rows = tensors[widest.tensor].shape[0]
    source: str | None = None
    for step in strategy.preparation:
        name = f"batch.{step.name}"
        samples = LogicalTensor(f"{name}@{stage}", (rows, step.num_bytes), torch.uint8)
        work = PrepareWork(step.name, source, samples.name, feeds)
        actor = Actor(0, name, READER, stage, phase=FORWARD, per_step=False, work=work)
        yield samples, Location(stage, widest.nd_sbp), actor
        source = samples.name
