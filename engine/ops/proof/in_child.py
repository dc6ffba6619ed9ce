"""in_child: run experiments in a child process: a kernel that does not check its arguments may
read out of bounds and crash.

A candidate that ends the child is refuted; the next child continues after it.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import struct
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from flowrun.engine.ir.table import FoundRow
from flowrun.engine.ops.proof.call_form import CallForm
from flowrun.engine.ops.proof.experiment import experiment

MOST_SILENT_S = 20.0  # of one candidate
MOST_CRASHES = 8  # of one form: what crashes more often is not tried on

_SIZE = struct.Struct("<I")
TrialEvent = (
    int | FoundRow | None
)  # a candidate that is tried now, a row that holds, the end of a form


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
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: the child uses none
        pid = os.fork()
    if pid == 0:
        os.close(reads)
        _try_all(work, writes)
    os.close(writes)
    try:
        yield from _events(reads)
    finally:
        os.close(reads)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _try_all(work: Sequence[tuple[int, CallForm, int]], writes: int) -> None:
    """Run the experiments in the child, and end it."""
    try:
        faulthandler.disable()  # what a crashing kernel says concerns nobody
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        torch.set_num_threads(1)  # a fork has none of the pool's threads
        for k, form, tried in work:
            for event in experiment(form, tried):
                _send(writes, (k, event))
            _send(writes, (k, None))
    finally:
        os._exit(0)


def _send(writes: int, event: tuple[int, TrialEvent]) -> None:
    text = pickle.dumps(event)
    os.write(writes, _SIZE.pack(len(text)) + text)


def _events(reads: int) -> Iterator[tuple[int, TrialEvent]]:
    held = b""
    while select.select([reads], [], [], MOST_SILENT_S)[0]:
        got = os.read(reads, 1 << 16)
        if not got:
            return
        held += got
        while len(held) >= _SIZE.size:
            (size,) = _SIZE.unpack(held[: _SIZE.size])
            if len(held) < _SIZE.size + size:
                break
            yield pickle.loads(held[_SIZE.size : _SIZE.size + size])
            held = held[_SIZE.size + size :]
