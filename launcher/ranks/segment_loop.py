"""Train segment by segment, with evaluations and checkpoints where they are due."""

from __future__ import annotations

from typing import Protocol

from flowrun.launcher.job.job import Job


class Trainer(Protocol):
    """A trainer is a rank, or all of a virtual cluster."""

    def run_segment(self, last: int, first: int) -> None:
        """Train up to `last` steps, or to a halt, and check the numbers."""

    def save(self, step: int) -> None:
        """Save a checkpoint of `step` steps."""

    def compare(self, step: int) -> None:
        """Compare what several ranks hold alike."""

    def evaluate(self, step: int) -> None:
        """Evaluate after `step` steps, if something is held out."""


class Gate(Protocol):
    """A gate, as a rank sees it, or the cluster."""

    @property
    def begun(self) -> int: ...

    def go_on(self) -> bool: ...


def train_segments(job: Job, gate: Gate, trainer: Trainer) -> bool:
    """Train until the end, or a halt that the run ends at; return whether it was the end."""
    saved = job.saved_steps  # of the newest checkpoint
    for segment in job.segments:
        while gate.begun < segment.last:
            trainer.run_segment(segment.last, gate.begun)
            if gate.begun == segment.last:
                break
            if gate.begun > saved:  # all ranks rest here, at a halt
                saved = gate.begun
                trainer.save(saved)
            if not gate.go_on():
                return False
        if segment.verify:
            trainer.compare(segment.last)
        if segment.evaluate:
            trainer.evaluate(segment.last)
        if segment.save:
            saved = segment.last
            trainer.save(saved)
    return True
