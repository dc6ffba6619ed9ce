"""Segments: a run in pieces that end where something happens besides training.

Ranks in processes and virtual ranks walk the same segments.  What the ranks hold stays from one to
the next; a segment drains the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flowrun.launcher.data.data_workers import BatchReading
from flowrun.launcher.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps `first` to `last` - 1, counted from 0, and what is done then, in this order."""

    first: int
    last: int
    evaluate: bool
    save: bool
    verify: bool = False  # before the others: what ranks hold alike


def segments(recipe: Recipe, first: int = 0, ended: bool = True) -> tuple[Segment, ...]:
    """The rest of a run of which `first` steps are done.  At the end it evaluates, and saves if it
    ever does.

    recipe: says when.  ended: what was due after the steps that are done is done, too; else the
    first segment has no steps.
    """
    steps, evaluate, save = recipe.train.steps, recipe.eval.every, recipe.train.save_every
    both = save if recipe.train.keep_best else 0  # what is saved is evaluated first
    verify = recipe.engine.verify_every
    every = (evaluate, save, verify)
    due = [k for k in range(max(1, first + ended), steps) if any(_due(k, n) for n in every)]
    ends = (*due, steps)
    return tuple(
        Segment(
            begin,
            end,
            evaluate=end == steps or _due(end, evaluate) or _due(end, both),
            save=_due(end, save, end == steps),
            verify=_due(end, verify, end == steps),
        )
        for begin, end in zip((first, *due), ends, strict=True)
    )


@dataclass(frozen=True, slots=True)
class RankRows:
    """The rows that a rank reads of each micro-batch of a plan."""

    rows: slice
    micro_batches: int

    def readings(self, evaluation: bool, steps: range) -> Iterator[BatchReading]:
        """Yield the batches of some steps.  evaluation: these are of held-out samples."""
        for step in steps:
            for micro_batch in range(self.micro_batches):
                yield BatchReading(evaluation, step, micro_batch, self.rows)


@dataclass(frozen=True, kw_only=True)
class ReadingOrder:
    """The batches that a rank reads until its run ends, in order.

    segments: of the run.  training, evaluation: what the rank reads of each; None: nothing.
    eval_steps: batches of one evaluation.
    """

    segments: tuple[Segment, ...]
    training: RankRows | None
    evaluation: RankRows | None
    eval_steps: int

    def __iter__(self) -> Iterator[BatchReading]:
        for segment in self.segments:
            if self.training:
                yield from self.training.readings(False, range(segment.first, segment.last))
            if segment.evaluate and self.evaluation:
                yield from self.evaluation.readings(True, range(self.eval_steps))


def _due(step: int, every: int, last: bool = False) -> bool:
    return every > 0 and (last or step % every == 0)
