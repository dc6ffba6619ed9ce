"""beside: what a process forked from this one makes, while this one makes something else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Made = TypeVar("Made")


@contextmanager
def beside(make: Callable[[], Made] | None) -> Iterator[Callable[[], Made | None]]:
    """Within, what asks for the result of `make`: it waits, and is given None where there is none.

    make: it is called in a fork of this process, and what it returns is pickled.  What fails there
    fails again here, where the error can be told.  Nothing is started for None, and where a fork
    gains nothing or is not safe: on one core, and beside other threads, whose locks it would
    inherit.
    """
    if make is None or not _may_fork():
        yield lambda: None
        return
    reader, writer = multiprocessing.Pipe(duplex=False)
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_tell, args=(make, reader, writer), daemon=True)
    with uninterrupted(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)  # NumPy's
        process.start()  # Ctrl-C stays blocked there: it is for the process that waits
    writer.close()

    def result() -> Made | None:
        try:
            made: Made = reader.recv()
            return made
        except (EOFError, OSError):
            return None

    try:
        yield result
    finally:
        process.kill()  # it has nothing that it should leave in order
        process.join()
        process.close()
        reader.close()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C within is heard behind it, when it is known what is to be ended.  In what Python runs
    around a fork, logging's locks among it, it would be printed and forgotten.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _may_fork() -> bool:
    """Python's threads count; NumPy's, of its BLAS, end before a fork and begin again behind it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return cores > 1 and threading.active_count() == 1


def _tell(make: Callable[[], Any], reader: Connection, writer: Connection) -> None:
    reader.close()
    try:
        writer.send(make())
    except Exception:
        os._exit(1)
