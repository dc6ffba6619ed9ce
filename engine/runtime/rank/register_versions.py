"""Versions of registers: where on a rank the tensors lie that an actor reads and makes."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import torch

from flowrun.engine.actors.plan import Actor, Plan, RegionWork
from flowrun.engine.actors.sums import sums_of
from flowrun.engine.ir.graph import Op
from flowrun.engine.ops.flow.sparse import COLLECT


class RegisterVersions:
    """The live versions of a register.

    versions: tensors, by number of the version.  left: readers that have not returned it, by
    number.  most: the most versions that were live at once, so far.
    """

    __slots__ = ("left", "most", "versions")

    def __init__(self) -> None:
        self.versions: dict[int, list[torch.Tensor]] = {}
        self.left: dict[int, int] = {}
        self.most = 0


class Source(NamedTuple):
    """The place of a tensor of an actor: a variable (ring None), or a position in a register.

    every: number of the actor's acts for which one version lasts.
    """

    name: str
    ring: RegisterVersions | None
    position: int = 0
    every: int = 1


class RegisterBinding(NamedTuple):
    """A register that an actor reads or fills.

    ring: its versions.  every: see Source.  num_readers: actors that read it.
    tensors: the tensors that it holds.  positions: theirs among what the producer makes.
    collected: those of its tensors of which a version is the rows of all micro-batches; the others
    are sums.  any_order: sums that may lie in any order of memory.
    """

    ring: RegisterVersions
    every: int
    num_readers: int
    tensors: tuple[str, ...]
    positions: tuple[int, ...]
    collected: frozenset[str] = frozenset()
    any_order: frozenset[str] = frozenset()


class ActorBindings(NamedTuple):
    """The places of what an actor reads and makes.

    sources: of the tensors that it reads, in the order of its work.  read, filled: its registers
    that have versions; variables are updated in place.  sums: those that a region adds to, in the
    order of its program.
    """

    sources: tuple[Source, ...]
    read: tuple[RegisterBinding, ...]
    filled: tuple[RegisterBinding, ...]
    sums: tuple[Source, ...]


def bind_actor(
    plan: Plan, actor: Actor, rings: Mapping[int, RegisterVersions], variables: Container[str]
) -> ActorBindings:
    """Bind an actor to its registers.

    rings: live versions, by register.  variables: names of the tensors that are variables.
    """
    read = _bind(plan, actor, rings, actor.inputs)
    filled = _bind(plan, actor, rings, actor.outputs)
    inside, made = _places(read), _places(filled)
    sources = (Source(name, None) if name in variables else inside[name] for name in actor.reads)
    sums = sums_of(plan, actor.work) if isinstance(actor.work, RegionWork) else ()
    return ActorBindings(tuple(sources), read, filled, tuple(made[name] for name in sums))


def _places(bindings: Sequence[RegisterBinding]) -> dict[str, Source]:
    return {
        name: Source(name, binding.ring, position, binding.every)
        for binding in bindings
        for position, name in enumerate(binding.tensors)
    }


def _bind(
    plan: Plan, actor: Actor, rings: Mapping[int, RegisterVersions], registers: Sequence[int]
) -> tuple[RegisterBinding, ...]:
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
