"""Run a function in a fork of this process, concurrently or so that this one stays as it was."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TypeVar

from flowrun.engine.errors import RunError
from flowrun.launcher.data.open_files import reopen_files

T = TypeVar("T")


@contextmanager
def fork_concurrently(make: Callable[[], T] | None) -> Iterator[Callable[[], T | None]]:
    """Call `make` in a fork of this process; give a function that waits for its result, or None.

    The result is pickled.  What fails there fails again here, where the error can be shown.
    Nothing is started for None, nor where a fork gains nothing or is not safe: on one core, or
    while other threads run, whose locks it would inherit.
    """
    if make is None or not _may_fork():
        yield lambda: None
        return
    with _fork(make, daemon=True) as wait_for:

        def result() -> T | None:
            made, error = wait_for()
            return None if error else made

        yield result


@contextmanager
def start_fork(make: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Call `make` in a fork of this process; give a function that waits and returns or raises.

    The fork starts at once, or, where a concurrent one gains nothing or is not safe, when its
    result is asked for.
    """
    if not _may_fork():
        yield lambda: run_in_fork(make)
        return
    with _fork(make, daemon=True) as wait_for:

        def result() -> T:
            made, error = wait_for()
            if error:
                raise error
            return made  # type: ignore[return-value]

        yield result


def run_in_fork(make: Callable[[], T]) -> T:
    """Call `make` in a fork of this process, and return or raise what it does.

    What `make` opens goes away with the fork: autograd's threads, and CUDA, which a process must
    not have touched if its forks are to use it.  Capture opens both, since autograd asks each kind
    of device how many there are.  Raises RunError if the process ends without an answer.
    """
    with _fork(make, daemon=False) as wait_for:
        made, error = wait_for()
    if error:
        raise error
    return made  # type: ignore[return-value]


@contextmanager
def _fork(
    make: Callable[[], T], daemon: bool
) -> Iterator[Callable[[], tuple[T | None, Exception | None]]]:
    """Fork; give a function that waits for the result of `make`, or for its error."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_send_result, args=(make, reader, writer), daemon=daemon)
    with delay_interrupts(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)  # NumPy's
        process.start()  # Ctrl-C stays blocked there: it is for the process that waits
    writer.close()

    def wait_for() -> tuple[T | None, Exception | None]:
        try:
            found: tuple[T | None, Exception | None] = pickle.loads(reader.recv_bytes())
            return found
        except Exception as error:  # or what an exception's own constructor does not take
            how = f"it ended before it had an answer ({type(error).__name__})."
            return None, RunError("the process that plans", how)

    try:
        yield wait_for
    finally:
        process.kill()  # it has nothing that it should leave in order
        process.join()
        process.close()
        reader.close()


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the block ends, when it is known what has to be ended.  In what Python
    runs around a fork, such as logging's locks, the signal would be printed and forgotten.
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


def _send_result(make: Callable[[], object], reader: Connection, writer: Connection) -> None:
    import torch  # which who asks has imported

    reader.close()
    reopen_files()
    # A fork's pool of threads is renewed at the next call that sets their number, and two threads
    # that do so at once (autograd's, of which a build with CUDA has one more) find none.
    torch.set_num_threads(torch.get_num_threads())
    try:
        writer.send_bytes(pickle.dumps((make(), None)))  # tensors by value: this process ends
    except Exception as error:
        try:
            writer.send_bytes(pickle.dumps((None, error)))
        except (pickle.PicklingError, AttributeError, RuntimeError, TypeError, ValueError):
            os._exit(1)
