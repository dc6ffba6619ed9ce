"""Readers: they give a rank its part of each batch, and the numbers of the engine itself.

They know no buffers and no variables, for an act of a reader may run in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from flowrun.engine.actors.plan import Actor, FeedWork, Plan, PrepareWork
from flowrun.engine.ir.graph import Feed
from flowrun.engine.ir.placement import Slices, local_slices
from flowrun.engine.ops.flow.ranges import OutOfRange
from flowrun.engine.runtime.rank.readback import copy_to_device, make_scalar
from flowrun.engine.runtime.transport.transport import cut

# (step, micro-batch, rows) -> those rows of the batch as logical tensors; a rank cuts its part
BatchSource = Callable[[int, int, slice], Mapping[str, torch.Tensor]]


class StepwiseSamples(Protocol):
    """A source of batches whose samples are made in steps, each by an actor of its own.

    Some fields may need no such step (Strategy.unprepared) and are read separately.
    step, micro_batch: the micro-batch.  rows: a slice of its samples.
    """

    def prepare(
        self, name: str, samples: list[object] | None, step: int, micro_batch: int, rows: slice
    ) -> list[Any]:
        """Return the samples of `rows` of a micro-batch after the step `name` of preparation.

        samples: those after the step before, or None for the first.  step, micro_batch: the
        micro-batch.
        """

    def read_raw_fields(
        self, step: int, micro_batch: int, rows: slice
    ) -> Mapping[str, torch.Tensor]:
        """Return the fields that need no preparation, for `rows` of `micro_batch` of `step`."""

    def collate(
        self, samples: list[object], step: int, micro_batch: int, rows: slice
    ) -> Mapping[str, torch.Tensor]:
        """Return the batch of `samples` that are ready: `rows` of `micro_batch` of `step`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """The readers of the rank at a coordinate of a stage.

    batches: gives the batches.  device: where their tensors go.
    """

    plan: Plan
    stage: int
    coordinate: tuple[int, ...]
    batches: BatchSource
    device: torch.device

    def supply(self, actor: Actor, act: int, inputs: Sequence[Any]) -> list[Any]:
        """Return what an act of a reader makes, in the order of its work.

        actor: the reader.  act: number of the act, from step 0.  inputs: the samples that the step
        of preparation before it made, if any.
        """
        match actor.work:
            case PrepareWork(step=name, feeds=feeds):
                step, micro_batch = divmod(act, self.plan.micro_batches)
                samples = inputs[0] if inputs else None
                rows = self._rows(_fields_of(feeds))
                return [self._samples.prepare(name, samples, step, micro_batch, rows)]
            case FeedWork(feeds) as work:
                fields = self._fields(work, act, inputs)
                return [
                    self._number(feed, actor, act) if feed.is_own else fields[feed.tensor]
                    for feed in feeds
                ]
        raise AssertionError(actor.work)

    def locate(self, error: OutOfRange, act: int) -> str:
        """Return the text of an error with the sample that caused it.

        It reads the micro-batch of `act` again; the text is "" if no field has such a value.
        """
        step, micro_batch = divmod(act, self.plan.micro_batches)
        read = getattr(self.batches, "reread", self.batches)
        for feed in self._feeds_of_stage():
            if feed.field not in error.fields or feed.per_step:
                continue
            rows = self._rows([feed])
            value = read(step, micro_batch, rows)[feed.field]
            at = (
                (value == error.value).flatten(1).any(1)
                if value.dim() > 1
                else value == error.value
            )
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

    def _feeds_of_stage(self) -> Iterator[Feed]:
        for actor in self.plan.stage_actors(self.stage):
            if isinstance(actor.work, FeedWork):
                yield from actor.work.feeds

    @property
    def _samples(self) -> StepwiseSamples:
        return cast(StepwiseSamples, self.batches)

    def _number(self, feed: Feed, actor: Actor, act: int) -> torch.Tensor:
        """Return a number that the engine itself supplies, as a scalar."""
        step, micro_batch = divmod(act, self.plan.acts_per_step(actor))
        value: float
        match feed.field:
            case "@step":
                value = step + 1
            case "@draw":
                value = step * self.plan.micro_batches + micro_batch
            case _ if feed.values:
                value = feed.values[min(step, len(feed.values) - 1)]
            case other:
                raise AssertionError(other)
        return make_scalar(value, self._dtype(feed), self.device)

    def _dtype(self, feed: Feed) -> torch.dtype:
        return self.plan.tensors[feed.tensor].dtype

    def _held(self, feed: Feed) -> Slices:
        return _held(self.plan, feed, self.coordinate)

    def _rows(self, feeds: Sequence[Feed]) -> slice:
        return _rows(self.plan, feeds, self.coordinate)

    def _fields(self, work: FeedWork, act: int, samples: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return this rank's part of the batch's fields.  samples: the prepared ones, if any."""
        feeds = _fields_of(work.feeds)
        if not feeds:
            return {}
        rows = self._rows(feeds)
        step, micro_batch = divmod(act, self.plan.micro_batches)
        if samples:
            batch = self._samples.collate(samples[0], step, micro_batch, rows)
        elif work.unprepared:
            batch = self._samples.read_raw_fields(step, micro_batch, rows)
        else:
            batch = self.batches(step, micro_batch, rows)
        out = {}
        for feed in feeds:
            (start, length), *rest = self._held(feed)
            value = cut(batch[feed.field], ((start - rows.start, length), *rest))
            out[feed.tensor] = copy_to_device(value, self.device)
        return out


def item_rows(plan: Plan, rank: int) -> slice | None:
    """Return the rows of each micro-batch of which a rank reads whole items; None: it reads none.

    All of them come from one reader (lowering/add_readers.py).
    """
    stage = plan.stage_of(rank)
    coordinate = plan.placements[stage].coordinate(rank)
    for actor in plan.stage_actors(stage):
        work = actor.work
        if isinstance(work, FeedWork) and not work.unprepared and (feeds := _fields_of(work.feeds)):
            return _rows(plan, feeds, coordinate)
    return None


def _held(plan: Plan, feed: Feed, coordinate: tuple[int, ...]) -> Slices:
    """Return the slices of a feed that the rank at a coordinate of its stage holds."""
    grid = plan.placements[feed.stage].shape
    return local_slices(plan.tensors[feed.tensor].shape, feed.nd_sbp, grid, coordinate)


def _rows(plan: Plan, feeds: Sequence[Feed], coordinate: tuple[int, ...]) -> slice:
    """Return the rows of a micro-batch of which the rank at a coordinate holds fields."""
    held = [_held(plan, feed, coordinate)[0] for feed in feeds]
    return slice(min(start for start, _ in held), max(map(sum, held)))


def _fields_of(feeds: Sequence[Feed]) -> list[Feed]:
    """Return the feeds that are fields of the batch."""
    return [feed for feed in feeds if not feed.is_own]
