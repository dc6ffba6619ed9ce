"""in_child: run experiments in a child: a kernel that checks no arguments may crash.

A candidate that ends the child is refuted; the next child continues after it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch

from flowrun.engine.ir.table import FoundRow
from flowrun.engine.ops.proof.call_form import CallForm
from flowrun.engine.ops.proof.experiment import experiment

MOST_SILENT_S = 20.0  # of one candidate
MOST_CRASHES = 8  # of one form: what crashes more often is not tried on

# a candidate that is tried now, a row that holds, the end of a form
TrialEvent = int | FoundRow | None


@dataclass
class _FormProgress:
    """The state of a form's experiment.

    tried: candidates that were tried.  rows: those that held.
    """

    tried: int = 0
    rows: list[FoundRow] = field(default_factory=list)
    crashes: int = 0
    done: bool = False


def experiments(forms: Sequence[CallForm]) -> list[tuple[FoundRow, ...]]:
    """The rows that hold, of each form."""
    progress = [_FormProgress() for _ in forms]
    while left := [k for k, each in enumerate(progress) if not each.done]:
        first = progress[left[0]]
        ended = False
        for k, event in _child([(k, forms[k], progress[k].tried) for k in left]):
            each = progress[k]
            match event:
                case int():
                    each.tried = event + 1
                case FoundRow():
                    each.rows.append(event)
                case None:
                    each.done = True
            ended = k == left[-1] and each.done
        if not ended:
            crashed = next((e for e in progress if not e.done), first)
            crashed.crashes += 1
            crashed.tried = max(crashed.tried, 1)
            crashed.done = crashed.crashes >= MOST_CRASHES
    return [tuple(each.rows) for each in progress]


def _child(work: Sequence[tuple[int, CallForm, int]]) -> Iterator[tuple[int, TrialEvent]]:
    """Yield (number of the form, event), in order."""
    reads, writes = Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: the child uses none
        pid = os.fork()
    if pid == 0:
        reads.close()
        _try_all(work, writes)
    writes.close()
    try:
        with reads, suppress(EOFError, OSError):  # at its end, also in the middle of an event
            while reads.poll(MOST_SILENT_S):
                yield reads.recv()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _try_all(
    work: Sequence[tuple[int, CallForm, int]], writes: Connection[tuple[int, TrialEvent], None]
) -> None:
    """Run the experiments in the child, and end it."""
    try:
        faulthandler.disable()  # what a crashing kernel says concerns nobody
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        torch.set_num_threads(1)  # a fork has none of the pool's threads
        for k, form, tried in work:
            for event in experiment(form, tried):
                writes.send((k, event))
            writes.send((k, None))
    finally:
        os._exit(0)
