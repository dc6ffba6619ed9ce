"""Rank: the buffers of one rank, its variables and its kernels.

It runs acts, and knows no protocol, no clock and no other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from flowrun.engine.actors.plan import (
    Actor,
    BoxWork,
    CopyWork,
    FeedWork,
    Plan,
    PrepareWork,
    RegionWork,
    ReportWork,
)
from flowrun.engine.errors import RunError
from flowrun.engine.ir.graph import Variable
from flowrun.engine.ir.placement import Slices
from flowrun.engine.ops.flow.ranges import OutOfRange
from flowrun.engine.runtime.kernels.kernels import Kernels, eager_kernels
from flowrun.engine.runtime.rank.dry_acts import act_dry
from flowrun.engine.runtime.rank.readback import HostReadback, copy_between
from flowrun.engine.runtime.rank.readers import BatchSource, Readers
from flowrun.engine.runtime.rank.register_versions import (
    ActorBindings,
    RegisterVersions,
    bind_actor,
)
from flowrun.engine.runtime.transport.shared_weight_memory import Weight
from flowrun.engine.runtime.transport.transport import BucketLayout, bucket_layout, cut

_OUT_OF_RANGE = (
    "Plain torch refuses it too. Use labels and ids that the model has; a label that is to be"
    " ignored must be the loss's ignore_index (-100)."
)
Results = dict[str, Any]  # of a step: name -> a number, or a list with a number of each rank


class LentVariables(NamedTuple):
    """The variables of a rank that the same rank of another plan reads, by that plan's tensors.

    side_by_side: those of which a host has one copy.
    """

    variables: dict[str, torch.Tensor]
    side_by_side: dict[str, Weight]


class Rank:
    """The buffers, variables and kernels of one rank of a plan.

    plan, rank: the rank of the plan.  device: holds its tensors.
    batches(step, micro_batch, rows): rows (a slice of samples) of a micro-batch as logical tensors.
    initial: logical initial value of each parameter and buffer by variable name, read one at a
    time; None: the caller fills the variables.  lent: variables of a rank of another plan, which
    this rank uses (`lend_variables`).  side_by_side: of the others, those of which its host has one
    copy.  kernels: makes the kernels of its regions.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        batches: BatchSource,
        initial: Mapping[str, torch.Tensor] | None,
        device: torch.device,
        kernels: Kernels = eager_kernels,
        lent: LentVariables | None = None,
        side_by_side: Mapping[str, Weight] | None = None,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.stage = plan.stage_of(rank)
        self.placement = plan.placements[self.stage]
        self.grid = self.placement.shape
        self.coordinate = self.placement.coordinate(rank)
        self.device = device
        self.readers = Readers(plan=plan, rank=rank, batches=batches, device=device)
        self.variables: dict[str, torch.Tensor] = {}
        self.rings = {r.id: RegisterVersions() for r in plan.registers if r.stage == self.stage}
        self.results: dict[int, Results] = {}
        self.on_update: Callable[[Actor, int], None] | None = None  # an act has changed variables
        self.kernels = kernels(plan, rank, device)
        if device.type == "cuda":
            act_dry(plan, rank, self.kernels, self.readers.read_first(), device)
        self._layouts: dict[int, BucketLayout] = {}
        self.side_by_side = (lent.side_by_side if lent else side_by_side) or {}
        self._make_variables(initial, lent.variables if lent else {})
        self.bindings: dict[int, ActorBindings] = {
            actor.id: bind_actor(plan, actor, self.rings, self.variables)
            for actor in plan.stage_actors(self.stage)
        }

    # ------------------------------------------------------------------ set-up

    def _make_variables(
        self, initial: Mapping[str, torch.Tensor] | None, lent: Mapping[str, torch.Tensor]
    ) -> None:
        """Take the variables that are lent, and make and fill the others.

        Those with an initial value come first: a value is made whole, and its memory is free again
        when the states of the optimizer are made.
        """
        own = [v for v in self.plan.variables.values() if v.stage == self.stage]
        self.variables |= {v.tensor: lent[v.tensor] for v in own if v.tensor in lent}
        states: list[tuple[Variable, float]] = []
        pieces: dict[str, list[tuple[torch.Tensor, Slices]]] = {}  # of one initial value
        for v in (v for v in own if v.tensor not in lent):
            if v.kind == "state" and v.start is not None:
                states.append((v, v.start))
            else:
                pieces.setdefault(v.of or v.name, []).append(self._empty(v))
        if initial is not None:
            for name, unfilled in pieces.items():
                value = initial[name]
                for target, slices in unfilled:
                    target.copy_(cut(value, slices))
                del value  # before the next is made
        for v, start in states:
            self._empty(v)[0].fill_(start)

    def _empty(self, variable: Variable) -> tuple[torch.Tensor, Slices]:
        """Make this rank's piece of a variable, without values; return it and its slices."""
        tensor = self.plan.tensors[variable.tensor]
        slices = self.placement.slices(self.rank, tensor.shape, variable.nd_sbp)
        if (lies := self.side_by_side.get(variable.tensor)) is not None:
            value = lies.piece
        else:
            lengths = [length for _, length in slices]
            where, pinned = self.device, False
            if variable.copies:
                where, pinned = torch.device("cpu"), self.device.type == "cuda"
            value = torch.empty(lengths, dtype=tensor.dtype, device=where, pin_memory=pinned)
        self.variables[variable.tensor] = value
        return value, slices

    def lend_variables(self, plan: Plan, instead: Mapping[str, str]) -> LentVariables:
        """Return the variables that the same rank of another plan reads (evaluation of training's).

        instead: by name of its variable, the name of this plan's, where they differ.
        """
        own = {v.name: tensor for tensor, v in self.plan.variables.items()}
        names = {tensor: instead.get(v.name, v.name) for tensor, v in plan.variables.items()}
        read = {tensor: own[name] for tensor, name in names.items() if name in own}
        return LentVariables(
            {tensor: self.variables[k] for tensor, k in read.items() if k in self.variables},
            {tensor: self.side_by_side[k] for tensor, k in read.items() if k in self.side_by_side},
        )

    @property
    def most_live(self) -> dict[int, int]:
        """The most versions that were live at once, by register."""
        return {register: ring.most for register, ring in self.rings.items() if ring.most}

    def adjust_numbers(self, adjust: Callable[[str, float, int], float]) -> None:
        """Let numbers that the plan has be adjusted; see Readers."""
        self.readers = replace(self.readers, adjust=adjust)

    # ------------------------------------------------------------------ acts

    def inputs(self, actor: Actor, act: int) -> list[torch.Tensor]:
        """Return the tensors that an act reads, in the order of its work."""
        return [
            self.variables[name] if ring is None else ring.versions[act // every][position]
            for name, ring, position, every in self.bindings[actor.id].sources
        ]

    def compute(self, actor: Actor, act: int) -> None:
        """Run one act of an actor that needs no other rank.  Raises RunError."""
        match actor.work:
            case RegionWork():
                self._region(actor, actor.work, act)
            case PrepareWork() | FeedWork():
                supplied = self.readers.supply(actor, act, self.inputs(actor, act))
                self.store(actor, act, cast(list[torch.Tensor], supplied))
            case CopyWork():
                self.store(actor, act, self.copy(actor, act, self.inputs(actor, act)))
            case ReportWork():
                self.report(actor, act)()
            case other:
                raise AssertionError(other)

    def report(self, actor: Actor, act: int) -> Callable[[], None]:
        """Begin to read back a step's results; return a function that waits, in any thread."""
        assert isinstance(actor.work, ReportWork)
        values = dict(zip(actor.reads, self.inputs(actor, act), strict=True))
        names, tensors = zip(*actor.work.results, strict=True)
        readback = HostReadback(values[tensor] for tensor in tensors)

        def read() -> None:
            self.results[act] = dict(zip(names, readback.read(), strict=True))

        return read

    def copy(self, actor: Actor, act: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors to the device, or, of variables on the host, back into them; any thread."""
        targets = [self.variables[variable] for variable, _ in actor.updates]
        copied = targets or [torch.empty_like(x, device=self.device) for x in inputs]
        copy_between(inputs, copied)
        return copied

    def _region(self, actor: Actor, work: RegionWork, act: int) -> None:
        inputs: list[torch.Tensor | None] = [*self.inputs(actor, act)]
        inputs += [
            ring.versions[act // every][position] if ring and act % every else None
            for _, ring, position, every in self.bindings[actor.id].sums
        ]
        self.give_up(actor, act)
        try:
            results = self.kernels[actor.id](cast(list[torch.Tensor], inputs))
        except OutOfRange as error:
            problem = self.readers.locate(error, act) or str(error)
            where = f"rank {self.rank}, actor {actor.name}"
            raise RunError(where, problem, _OUT_OF_RANGE) from None  # our traceback would not help
        if work.updates:
            for (variable, _), new in zip(work.updates, results[len(work.makes) :], strict=True):
                if new is not self.variables[variable]:
                    self.variables[variable].copy_(new)
        self.store(actor, act, results)

    def give_up(self, actor: Actor, act: int) -> None:
        """Empty the slots that no other act will read: a kernel frees their tensors as it goes,
        communication when it has copied them.
        """
        for ring, every, *_ in self.bindings[actor.id].read:
            if (act + 1) % every == 0 and ring.left[act // every] == 1:
                ring.versions[act // every] = []

    def store(self, actor: Actor, act: int, results: Sequence[torch.Tensor]) -> None:
        """Put the tensors of an act, in the order of its work, into the slots of its registers."""
        if actor.updates and self.on_update is not None:
            self.on_update(actor, act)
        for binding in self.bindings[actor.id].filled:
            versions, every = binding.ring.versions, binding.every
            values = [results[k] for k in binding.positions]
            version, part = divmod(act, every)
            if every > 1:
                before = versions.get(version, [None] * len(values))
                values = [
                    _join_rows(old, value, part, every)
                    if name in binding.collected
                    # until the last micro-batch sums may lie in any order; their readers need rows
                    else value.contiguous()
                    if part == every - 1 and name not in binding.any_order
                    else value
                    for name, value, old in zip(binding.tensors, values, before, strict=True)
                ]
            versions[version] = values
            if not part:
                binding.ring.left[version] = binding.num_readers
                binding.ring.most = max(binding.ring.most, len(versions))

    def release(self, actor: Actor, act: int) -> None:
        """Drop the versions that an act which has ended was the last to read."""
        for ring, every, *_ in self.bindings[actor.id].read:
            if (act + 1) % every == 0:
                version = act // every
                ring.left[version] -= 1
                if not ring.left[version]:
                    del ring.left[version], ring.versions[version]

    def find_layouts(self, actor: Actor) -> BucketLayout:
        """Return how the tensors of a collective lie on this rank's group."""
        if actor.id not in self._layouts:
            assert isinstance(actor.work, BoxWork)
            self._layouts[actor.id] = bucket_layout(actor.work, self.grid, self.coordinate)
        return self._layouts[actor.id]


def _join_rows(
    before: torch.Tensor | None, value: torch.Tensor, part: int, parts: int
) -> torch.Tensor:
    """Put the rows of micro-batch `part` after those of earlier ones (flow.collect)."""
    if before is None:
        before = value.new_empty((parts * len(value), *value.shape[1:]))
    before.narrow(0, part * len(value), len(value)).copy_(value)
    return before
