"""Sampler: which samples a step reads, and how a data set makes them.

The samples of a step are a function of the seed and of their numbers in the run, so that every
layout sees the same batches; models/sampling.py has the formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset, default_collate

from flowrun.engine.capture.capture import Batch
from flowrun.engine.errors import RecipeError
from flowrun.launcher.data.collate import Collate, ItemError, batch_of, collate, naming_items
from flowrun.launcher.data.steps import apply_step, preparation, unprepared_fields
from flowrun.models.sampling import Order, held_out_indices, sample_indices

FieldType = tuple[tuple[int, ...], torch.dtype]
FieldTypes = Mapping[str, FieldType]
ORDER = "Write (seed, epoch, numbers in the epoch (B,)) -> indices (B,) of training samples."


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The sampler chooses the samples of a step and makes a batch of them.

    It is called with (step, micro_batch, rows of the micro-batch); steps count from 0.  held_out:
    the last samples of the data set, which are for evaluation.  evaluation: if True, it reads
    these, in order.  field_types: (shape, dtype) of each field of one sample, which all samples
    must have, since the plan was made for them.  every: the steps of the run from one step of this
    sampler to the next (of an update that runs with each second step, 2).  order: of data.order;
    None: permutations.  own_collate: of data.collate; None: items are stacked.  buckets: of
    data.buckets, the longest last; the data set has `lengths`, of each item.  bucket: the one of
    which batches are; 0: the longest.
    """

    data: Dataset[object]
    seed: int
    batch_size: int
    micro_batches: int
    held_out: int
    evaluation: bool = False
    field_types: FieldTypes | None = None
    every: int = 1
    order: Order | None = None
    own_collate: Collate | None = None
    buckets: tuple[int, ...] = ()
    bucket: int = 0

    def __call__(self, step: int, micro_batch: int, rows: slice) -> Batch:
        samples: list[object] | None = None
        for each in preparation(self.data):
            samples = self.prepare(each.name, samples, step, micro_batch, rows)
        if samples is not None:
            return self.collate(samples, step, micro_batch, rows)
        chosen = self._chosen(step, micro_batch, rows)
        batch = self._fit(batch_of(self.data, chosen, self.own_collate), chosen)
        return {field: values.contiguous() for field, values in batch.items()}

    def prepare(
        self, name: str, samples: list[object] | None, step: int, micro_batch: int, rows: slice
    ) -> list[object]:
        """Take samples through one step of their making (launcher/data/steps.py).

        samples: what the step before made; None before the first.  Random choices are functions of
        the seed and of the sample's number in the run alone.
        """
        chosen = self._chosen(step, micro_batch, rows).tolist()
        numbers = self._numbers(step, micro_batch, rows)
        prepared = []
        for number, index, sample in zip(numbers, chosen, samples or chosen, strict=True):
            seed = None if self.evaluation else (self.seed, number)
            with naming_items([index], name):
                prepared.append(apply_step(self.data, name, sample, seed))
        return prepared

    def read_raw_fields(self, step: int, micro_batch: int, rows: slice) -> Batch:
        """Make the fields that need no other part of their samples."""
        chosen = self._chosen(step, micro_batch, rows).tolist()
        return {
            field: default_collate([getattr(self.data, method)(index) for index in chosen])
            for field, method in unprepared_fields(self.data).items()
        }

    def collate(self, samples: list[object], step: int, micro_batch: int, rows: slice) -> Batch:
        """Stack samples into one batch."""
        chosen = self._chosen(step, micro_batch, rows)
        return self._fit(collate(samples, chosen.tolist(), self.own_collate), chosen)

    def turn(self, step: int) -> int:
        """Return the number of the bucket of a step, 0 for the longest: the shortest that holds all
        samples of the step, whichever a rank reads.
        """
        if not self.buckets:
            return 0
        longest = int(self._lengths(self._chosen(step, 0, slice(0, self.batch_size))).max())
        return sum(n >= longest for n in self.buckets) - 1

    def _lengths(self, chosen: torch.Tensor) -> torch.Tensor:
        lengths = self.data.lengths  # type: ignore[attr-defined]
        return torch.tensor([int(lengths[k]) for k in chosen.tolist()], device="cpu")

    def _cut(self, batch: Batch, chosen: torch.Tensor) -> Batch:
        """Cut the fields that are as long as the longest bucket.  Raises ItemError for one with
        something else than padding behind the end of an item.
        """
        longest, out = self.buckets[-1], dict(batch)
        ends = self._lengths(chosen).clamp(min=self.bucket)
        behind = torch.arange(longest, device="cpu") >= ends[:, None]
        for field, values in batch.items():
            if values.shape[1:2] == (longest,):
                unlike = (values != values[:, -1:]).reshape(*behind.shape, -1).any(-1) & behind
                if bool(unlike.any()):
                    item = int(chosen[unlike.any(-1)][0])
                    what = f"field {field!r} of item {item} differs behind its length"
                    raise ItemError(f"{what}: write one value as padding")
                out[field] = values[:, : self.bucket]
        return out

    def _fit(self, batch: Batch, chosen: torch.Tensor) -> Batch:
        """Return a batch of its bucket's length.  Raises ItemError for one that has not the fields,
        shapes and types of the first.
        """
        if self.bucket:
            batch = self._cut(batch, chosen)
        for field, first in (self.field_types or {}).items():
            if field not in batch or _field_type(batch[field]) != first:
                raise ItemError(self._unlike(field, first, chosen.tolist()))
        return batch

    def _unlike(self, field: str, first: FieldType, chosen: list[int]) -> str:
        """Find the item that differs from the first ones: items are made again, one by one."""
        if self.own_collate:
            where = f"data.collate makes {field!r} of items {chosen}"
            return f"{where} another shape or type than {_shown(first)}: pad all batches to one"
        for index in chosen:
            batch = batch_of(self.data, torch.tensor([index]))
            if field not in batch:
                return f"item {index} has no field {field!r}, which the first items have"
            if (other := _field_type(batch[field])) != first:
                return f"field {field!r} of item {index} is {_shown(other)}; so far {_shown(first)}"
        return f"field {field!r} of items {chosen} is not {_shown(first)}, as it was so far"

    def _numbers(self, step: int, micro_batch: int, rows: slice) -> range:
        size = self.batch_size // self.micro_batches
        first = step * self.every * self.batch_size + micro_batch * size
        return range(first + rows.start, first + rows.stop)

    def index(self, step: int, micro_batch: int, row: int) -> int:
        """Return the number in the data set of sample `row` of a micro-batch of a step."""
        return int(self._chosen(step, micro_batch, slice(row, row + 1))[0])

    def _chosen(self, step: int, micro_batch: int, rows: slice) -> torch.Tensor:
        numbers, total = self._numbers(step, micro_batch, rows), length(self.data)
        if self.evaluation:
            return held_out_indices(numbers, self.held_out, total)
        try:
            return sample_indices(self.seed, numbers, total - self.held_out, self.order)
        except ValueError as error:
            raise RecipeError("data.order", f"{error}.", ORDER) from error

    def eval_steps(self, most: int) -> int:
        """Return how many batches of a step's size an evaluation has, at most `most`."""
        return min(most, max(1, self.held_out // self.batch_size)) if self.held_out else 0

    def eval_samples(self, steps: int) -> int:
        """Samples that `steps` evaluation batches read, each counted once."""
        return min(steps * self.batch_size, self.held_out)

    def notes(self, steps: int) -> Iterator[str]:
        """Note samples that weigh more than others in an evaluation of `steps` batches."""
        more = self.batch_size % self.held_out if 0 < self.held_out < self.batch_size else 0
        if steps and more:
            which = "the first counts" if more == 1 else f"the first {more} count"
            yield (
                f"{self.held_out} samples are held out and an evaluation reads a batch of "
                f"{self.batch_size}: {which} once more than the others; a higher eval.fraction or "
                "a smaller train.batch_size weighs each once"
            )


def field_types_of(batch: Batch) -> FieldTypes:
    """Return (shape, dtype) of each field of one sample of a batch."""
    return {field: _field_type(value) for field, value in batch.items()}


def _field_type(value: torch.Tensor) -> FieldType:
    return tuple(value.shape[1:]), value.dtype


def _shown(field_type: FieldType) -> str:
    return f"{str(field_type[1]).removeprefix('torch.')} of shape {field_type[0]}"


def length(data: Dataset[object]) -> int:
    """Return the number of samples of a data set, which dataset_checks.py knows to have one."""
    return len(data)  # type: ignore[arg-type]
