"""Readers: they give a rank its part of each batch, and the numbers of the engine itself.

They know no buffers and no variables, for an act of a reader may run in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from flowrun.engine.actors.plan import Actor, FeedWork, Plan, PrepareWork
from flowrun.engine.ir.graph import Feed
from flowrun.engine.ir.placement import Slices
from flowrun.engine.ops.flow.ranges import OutOfRange
from flowrun.engine.runtime.rank.readback import await_copies, copy_to_device, make_scalar
from flowrun.engine.runtime.transport.transport import cut

# (step, micro-batch, rows) -> those rows of the batch as logical tensors; a rank cuts its part
SampleList = list[object]  # in preparation
BatchSource = Callable[[int, int, slice], Mapping[str, torch.Tensor]]


Supplied = torch.Tensor | SampleList  # what an act of a reader makes


class StepwiseSamples(Protocol):
    """A source of batches whose samples are made in steps, each by an actor of its own.

    All are asked for `rows` (a slice of samples) of a micro-batch.
    """

    def prepare(
        self, name: str, samples: SampleList | None, step: int, micro_batch: int, rows: slice
    ) -> SampleList:
        """Return the samples after the step `name`; `samples` are those before it, if any."""

    def read_raw_fields(
        self, step: int, micro_batch: int, rows: slice
    ) -> Mapping[str, torch.Tensor]:
        """Return the fields that need no preparation (Strategy.unprepared)."""

    def collate(
        self, samples: SampleList, step: int, micro_batch: int, rows: slice
    ) -> Mapping[str, torch.Tensor]:
        """Return the batch of samples that are ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """The readers of a rank.

    batches: gives the batches.  device: where their tensors go.  adjust(field, value, step): a
    number that the plan has, as it is by now; None: all stay.
    """

    plan: Plan
    rank: int
    batches: BatchSource
    device: torch.device
    adjust: Callable[[str, float, int], float] | None = None

    def supply(self, actor: Actor, act: int, inputs: Sequence[Supplied]) -> list[Supplied]:
        """Return what an act (from step 0) of a reader makes, in the order of its work.

        inputs: the samples that the step of preparation before it made, if any.
        """
        match actor.work:
            case PrepareWork(step=name, feeds=feeds):
                step, micro_batch = divmod(act, self.plan.micro_batches)
                samples = cast(SampleList, inputs[0]) if inputs else None
                rows = _rows(self.plan, self.rank, _fields_of(feeds))
                return [self._samples.prepare(name, samples, step, micro_batch, rows)]
            case FeedWork(feeds) as work:
                fields = self._fields(work, act, inputs)
                return [
                    self._number(feed, actor, act) if feed.is_own else fields[feed.tensor]
                    for feed in feeds
                ]
        raise AssertionError(actor.work)

    def deliver(self, actor: Actor, act: int, inputs: Sequence[Supplied]) -> list[Supplied]:
        """Return what `supply` does, in a thread of its own, when it is on the device."""
        supplied = self.supply(actor, act, inputs)
        await_copies(supplied, self.device)
        return supplied

    def read_first(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of all fields of the first micro-batch, out of turn."""
        read = getattr(self.batches, "reread", self.batches)
        works = (actor.work for actor in self.plan.stage_actors(self.plan.stage_of(self.rank)))
        feeds = [f for work in works if isinstance(work, FeedWork) for f in _fields_of(work.feeds)]
        rows = _rows(self.plan, self.rank, feeds) if feeds else slice(0)
        return self._parts(feeds, rows, read(0, 0, rows)) if feeds else {}

    def locate(self, error: OutOfRange, act: int) -> str:
        """Read the micro-batch of `act` again; return the text of an error with the sample that
        caused it, "" if no field has such a value.
        """
        step, micro_batch = divmod(act, self.plan.micro_batches)
        read = getattr(self.batches, "reread", self.batches)
        works = (actor.work for actor in self.plan.stage_actors(self.plan.stage_of(self.rank)))
        for feed in (f for work in works if isinstance(work, FeedWork) for f in work.feeds):
            if feed.field not in error.fields or feed.per_step:
                continue
            rows = _rows(self.plan, self.rank, [feed])
            value = read(step, micro_batch, rows)[feed.field]
            at = (value == error.value).reshape(len(value), -1).any(1)
            if at.any():
                row = rows.start + int(at.nonzero()[0])
                number = getattr(self.batches, "index", None)
                sample = (
                    f"sample {number(step, micro_batch, row)}"
                    if number
                    else f"row {row} of micro-batch {micro_batch}, step {step}"
                )
                return f"{sample}: {error.describe((feed.field,))}"
        return ""

    @property
    def _samples(self) -> StepwiseSamples:
        return cast(StepwiseSamples, self.batches)

    def _number(self, feed: Feed, actor: Actor, act: int) -> torch.Tensor:
        step, micro_batch = divmod(act, self.plan.acts_per_step(actor))
        value: float
        match feed.field:
            case "@step":
                value = step + 1
            case "@draw":
                value = step * self.plan.micro_batches + micro_batch
            case _ if feed.values:
                value = feed.values[min(step, len(feed.values) - 1)]
                value = self.adjust(feed.field, value, step) if self.adjust else value
            case other:
                raise AssertionError(other)
        return make_scalar(value, self.plan.tensors[feed.tensor].dtype, self.device)

    def _fields(
        self, work: FeedWork, act: int, samples: Sequence[Supplied]
    ) -> dict[str, torch.Tensor]:
        """Return this rank's part of the batch's fields.  samples: the prepared ones, if any."""
        feeds = _fields_of(work.feeds)
        if not feeds:
            return {}
        rows = _rows(self.plan, self.rank, feeds)
        step, micro_batch = divmod(act, self.plan.micro_batches)
        if samples:
            batch = self._samples.collate(cast(SampleList, samples[0]), step, micro_batch, rows)
        elif work.unprepared:
            batch = self._samples.read_raw_fields(step, micro_batch, rows)
        else:
            batch = self.batches(step, micro_batch, rows)
        return self._parts(feeds, rows, batch)

    def _parts(
        self, feeds: Sequence[Feed], rows: slice, batch: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return this rank's part of the fields of these rows, on the device."""
        out = {}
        for feed in feeds:
            (start, length), *rest = _held(self.plan, self.rank, feed)
            value = cut(batch[feed.field], ((start - rows.start, length), *rest))
            out[feed.tensor] = copy_to_device(value, self.device)
        return out


def item_rows(plan: Plan, rank: int) -> slice | None:
    """Return the rows of each micro-batch of which a rank reads whole items, all by one reader;
    None: it reads none.
    """
    for actor in plan.stage_actors(plan.stage_of(rank)):
        work = actor.work
        if isinstance(work, FeedWork) and not work.unprepared and (feeds := _fields_of(work.feeds)):
            return _rows(plan, rank, feeds)
    return None


def _held(plan: Plan, rank: int, feed: Feed) -> Slices:
    shape = plan.tensors[feed.tensor].shape
    return plan.placements[feed.stage].slices(rank, shape, feed.nd_sbp)


def _rows(plan: Plan, rank: int, feeds: Sequence[Feed]) -> slice:
    """Return the rows of a micro-batch of which a rank holds fields."""
    held = [_held(plan, rank, feed)[0] for feed in feeds]
    return slice(min(start for start, _ in held), max(map(sum, held)))


def _fields_of(feeds: Sequence[Feed]) -> list[Feed]:
    return [feed for feed in feeds if not feed.is_own]
