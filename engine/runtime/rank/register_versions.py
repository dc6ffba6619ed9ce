"""Ports: where on a rank the tensors lie that an actor reads and makes."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import torch

from flowrun.engine.actors.plan import (
    Actor,
    Plan,
    RegionWork,
)
from flowrun.engine.actors.sums import sums_of
from flowrun.engine.ir.graph import Op
from flowrun.engine.ops.flow.sparse import COLLECT


class RegisterVersions:
    """The versions of a register that are there.

    versions: number -> tensors.  left: number -> readers that have not returned it.  most: versions
    there at once, so far.
    """

    __slots__ = ("left", "most", "versions")

    def __init__(self) -> None:
        self.versions: dict[int, list[torch.Tensor]] = {}
        self.left: dict[int, int] = {}
        self.most = 0


class Source(NamedTuple):
    """Where an input tensor of an actor lies: a variable (ring None), or a place in a register.

    every: acts of the actor that one version lasts.
    """

    name: str
    ring: RegisterVersions | None
    position: int = 0
    every: int = 1


class RegisterBinding(NamedTuple):
    """A register that an actor reads or fills.

    every: see Source.  tensors, positions: what it holds, and where the producer has it among what
    it makes.
    collected: of its tensors, those of which a version is the rows of all micro-batches; the others
    are sums.  any_order: sums that may lie in any order of memory.
    """

    ring: RegisterVersions
    every: int
    num_readers: int
    tensors: tuple[str, ...]
    positions: tuple[int, ...]
    collected: frozenset[str] = frozenset()
    any_order: frozenset[str] = frozenset()


def sources(
    plan: Plan, actor: Actor, rings: Mapping[int, RegisterVersions], variables: Container[str]
) -> tuple[Source, ...]:
    """Of the tensors that an act reads, in the order of its work.  rings: by register."""
    places: dict[str, Source] = {}
    acts = plan.acts_per_step(actor)
    for register in (plan.registers[k] for k in actor.inputs):
        for position, name in enumerate(register.tensors):
            every = acts if register.per_step else 1
            places[name] = Source(name, rings[register.id], position, every)
    return tuple(Source(name, None) if name in variables else places[name] for name in actor.reads)


def ports(
    plan: Plan, actor: Actor, rings: Mapping[int, RegisterVersions], registers: Sequence[int]
) -> tuple[RegisterBinding, ...]:
    """Those registers of an actor whose versions come and go: variables are updated in place."""
    acts = plan.acts_per_step(actor)
    at = {name: k for k, name in enumerate(actor.makes)}
    ops: tuple[Op, ...] = ()
    any_order: frozenset[str] = frozenset()
    if isinstance(actor.work, RegionWork):
        ops, any_order = actor.work.ops, frozenset(actor.work.sent)
    collected = frozenset(name for op in ops if op.target == COLLECT for name in op.makes)
    return tuple(
        RegisterBinding(
            rings[r.id],
            acts if r.per_step else 1,
            len(r.readers),
            r.tensors,
            tuple(at[name] for name in r.tensors) if r.producer == actor.id else (),
            collected,
            any_order,
        )
        for r in (plan.registers[k] for k in registers)
        if not r.initial
    )


def summed(plan: Plan, actor: Actor, filled: Sequence[RegisterBinding]) -> tuple[Source, ...]:
    """What a region adds to, in the order of its program.  filled: its ports."""
    if not isinstance(actor.work, RegionWork):
        return ()
    places = {
        name: Source(name, port.ring, position, port.every)
        for port in filled
        for position, name in enumerate(port.tensors)
    }
    return tuple(places[name] for name in sums_of(plan, actor.work))
