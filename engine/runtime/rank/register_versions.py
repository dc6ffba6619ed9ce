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


def locate_inputs(
    plan: Plan, actor: Actor, rings: Mapping[int, RegisterVersions], variables: Container[str]
) -> tuple[Source, ...]:
    """Return the places of the tensors that an actor reads, in the order of its work.

    rings: live versions, by register.  variables: names of the tensors that are variables.
    """
    places: dict[str, Source] = {}
    acts = plan.acts_per_step(actor)
    for register in (plan.registers[k] for k in actor.inputs):
        for position, name in enumerate(register.tensors):
            every = acts if register.per_step else 1
            places[name] = Source(name, rings[register.id], position, every)
    return tuple(Source(name, None) if name in variables else places[name] for name in actor.reads)


def bind_registers(
    plan: Plan, actor: Actor, rings: Mapping[int, RegisterVersions], registers: Sequence[int]
) -> tuple[RegisterBinding, ...]:
    """Bind an actor to those of `registers` (its inputs, or its outputs) that have versions;
    variables are updated in place.
    """
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


def locate_sums(plan: Plan, actor: Actor, filled: Sequence[RegisterBinding]) -> tuple[Source, ...]:
    """Return the places of the sums that a region adds to, in the order of its program.

    filled: the registers that it fills.
    """
    if not isinstance(actor.work, RegionWork):
        return ()
    places = {
        name: Source(name, binding.ring, position, binding.every)
        for binding in filled
        for position, name in enumerate(binding.tensors)
    }
    return tuple(places[name] for name in sums_of(plan, actor.work))
