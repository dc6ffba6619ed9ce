"""Processes that make a rank's batches ahead of it (launch.data_workers).

torch's DataLoader runs them.  What it takes for an item is a whole batch, and what it takes for a
sampler is the order in which the rank reads batches until the run ends, evaluations included.  So
each batch is the one that the rank would make itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess

import torch
from torch.utils.data import DataLoader, Dataset

from flowrun.engine.capture.capture import Batch
from flowrun.engine.errors import RunError
from flowrun.engine.ir.user_code import user_lines
from flowrun.engine.runtime.process.lifetime import end_with
from flowrun.launcher.data.collate import ItemError
from flowrun.launcher.data.open_files import reopen_files
from flowrun.launcher.data.sampler import Sampler

_ENDS_S = 1.0  # until a process that closed its side of a pipe can be asked how it ended
_DIED = "Most likely the host's memory or /dev/shm ran out, or a library of the data set failed."


@dataclass(frozen=True, slots=True)
class BatchReading:
    """A batch that a rank reads: `rows` of a micro-batch of a step.

    evaluation: of the samples that are held out.
    """

    evaluation: bool
    step: int
    micro_batch: int
    rows: slice


# Why a batch could not be made is text: at which item, and in which of the user's own lines.
Made = tuple[BatchReading, Batch | str]


class DataWorkers:
    """The data workers of a rank, which make its batches in `order` and ahead of it.

    They are forked here, from a process without other threads.  samplers: of training and of
    evaluation.  number: of processes.  rank: whose they are, for errors.  fail: is called, in a
    thread of its own, with the error of a process that died.
    """

    def __init__(
        self,
        samplers: tuple[Sampler, Sampler],
        order: Iterable[BatchReading],
        number: int,
        rank: int,
        fail: Callable[[RunError], object],
    ) -> None:
        self._where, self._fail, self._closed = f"rank {rank}, a data worker", fail, False
        self.training, self.evaluation = (BatchesAhead(self, sampler) for sampler in samplers)
        self._made = _start_loader(samplers, order, number)
        self._processes = multiprocessing.active_children()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises wherever this thread is
        threading.Thread(target=self._watch, name="data workers", daemon=True).start()

    def take(self, reading: BatchReading) -> Batch:
        """Return the next batch, that of `reading`.  Raises RunError if it could not be made."""
        try:
            number, batch = next(self._made)
        except (OSError, EOFError, RuntimeError) as error:  # of what a process left half done
            raise self._name_the_dead() from error
        assert number == reading, (number, reading)
        if isinstance(batch, str):
            raise RunError(self._where, batch)
        return batch

    def close(self) -> None:
        """End the processes at once, whatever they make."""
        self._closed = True
        for process in self._processes:
            process.kill()
        self._made = iter(())

    def _watch(self) -> None:
        """Wait for a process to end, and let that end the rank."""
        connection.wait([process.sentinel for process in self._processes])
        if not self._closed:
            self._fail(self._name_the_dead())

    def _name_the_dead(self) -> RunError:
        dead = connection.wait([process.sentinel for process in self._processes], _ENDS_S)
        gone = [process for process in self._processes if process.sentinel in dead]
        ended = [f"process {process.pid} {_say_how(process)}" for process in gone]
        return RunError(self._where, f"{', '.join(ended) or 'it gave no batch'}.", _DIED)


def _start_loader(
    samplers: tuple[Sampler, Sampler], order: Iterable[BatchReading], number: int
) -> Iterator[Made]:
    """Fork `number` processes, which make the batches of `order` in turns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*suggested max number of worker")  # they may wait
        loader = DataLoader(
            _Batches(samplers),
            sampler=order,
            batch_size=None,
            num_workers=number,
            collate_fn=tuple,  # what it is already: a batch stays as it was made
            worker_init_fn=partial(_begin, os.getpid()),
            multiprocessing_context="fork",
            generator=torch.Generator(),  # its seeds are not drawn from the process's numbers
        )
        return iter(loader)


def _say_how(process: BaseProcess) -> str:
    process.join(_ENDS_S)
    exitcode = process.exitcode or 0
    if exitcode >= 0:
        return f"ended with status {exitcode}"
    return f"was killed by {signal.Signals(-exitcode).name}"


class BatchesAhead:
    """The batches of a plan as its readers ask for them, made ahead by data workers.

    Fields that need no item, and a batch that is read again to explain an error, are made here.
    """

    def __init__(self, workers: DataWorkers, sampler: Sampler) -> None:
        self._workers = workers
        self.reread = sampler
        self.index = sampler.index
        self.read_raw_fields = sampler.read_raw_fields

    def __call__(self, step: int, micro_batch: int, rows: slice) -> Batch:
        evaluation = self.reread.evaluation
        return self._workers.take(BatchReading(evaluation, step, micro_batch, rows))


class _Batches(Dataset[Made]):
    """The batches of readings: a data worker makes each, in shared memory."""

    def __init__(self, samplers: tuple[Sampler, Sampler]) -> None:
        self.samplers = samplers

    def __getitem__(self, reading: BatchReading) -> Made:
        try:
            sampler = self.samplers[reading.evaluation]
            batch = sampler(reading.step, reading.micro_batch, reading.rows)
            return reading, {field: _share(value) for field, value in batch.items()}
        except Exception as error:
            facts = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
            if not isinstance(error, ItemError):  # which says all
                facts += user_lines(error.__traceback__)
            return reading, "\n".join(facts)


def _share(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in shared memory, without what else its storage holds."""
    alone = value.untyped_storage().nbytes() == value.nbytes
    own = value if alone else value.clone()
    own.share_memory_()
    return own


def _begin(parent: int, _: int) -> None:
    """Begin a data worker."""
    end_with(parent)
    reopen_files()
