"""A listener: what is called while a run goes on, and what it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

STOP = "stop"  # what a callback returns to end the run
# how a run ends; or its ranks start again
COMPLETE, PREEMPTED, STOPPED, FAILED = "complete", "preempted", "stopped", "failed"
RESTARTED = "restarted"
# tag -> what it is; a step has those that are measured (docs/how_to/follow.md)
TAGS: Mapping[str, str] = {
    "loss": "mean over the samples of the step",
    "lr": "learning rate of parameters that no group gives another",
    "loss/NAME": "of another update of the step, as are `lr/NAME` and `grad_norm/NAME`",
    "grad_norm": "norm of all gradients, before clipping",
    "tokens_per_s": "tokens a second; samples, where they are no sequences of tokens",
    "step_s": "seconds since the step before ended",
    "flop_utilisation": "the model's FLOPs, of the peak; with a profile of this machine",
    "memory_bytes": "of the rank that has most: of its process, or CUDA's allocator; once a second",
    "waited_s": "seconds of the step for which one rank waited for others; on CPUs, the longest",
    "skipped_updates": "updates that were left out so far",
    "validation/NAME": "loss and metrics of an evaluation",
}


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """A run, as a listener needs it.

    folder: of the run.  name: of the recipe.  recipe: its keys, nested.  first_step: 0 unless the
    run was resumed, or went back to a checkpoint: later steps that are known already come again.
    steps: of the whole training.
    """

    folder: Path
    name: str
    recipe: Mapping[str, Any]
    first_step: int
    steps: int


class Listener(Protocol):
    """A logger or a callback.  It may leave out methods.

    `on_start` is called before the first of the others, when the ranks have been forked: threads
    and connections begin there, and not in `__init__`.  Steps count from 0.  A callback returns
    "stop" to end the run: after the step under way a checkpoint and the weights are written.

    Before anything starts, a callback's `check(recipe)` is given the keys, nested, and returns what
    is wrong, by argument of its own or by key.
    """

    def on_start(self, run: RunInfo) -> None:
        """The first step has ended; also after ranks were started again."""

    def on_step(self, step: int, values: Mapping[str, float]) -> str | None:
        """A step has ended.  values: by tag, see TAGS."""

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> str | None:
        """An evaluation has ended, with the weights after `step`.  values: by name."""

    def on_save(self, step: int, folder: Path) -> str | None:
        """A checkpoint of `step` steps is complete in `folder`."""

    def on_end(self, status: str) -> None:
        """The run has ended: complete, preempted, stopped or failed; or its ranks start again:
        restarted.
        """


class Curves(ABC):
    """Loggers share this: an evaluation is written as a step is."""

    @abstractmethod
    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """See Listener."""

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self.on_step(step, {f"validation/{name}": value for name, value in values.items()})
