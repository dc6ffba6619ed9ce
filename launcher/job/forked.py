"""Run a function in a fork of this process, concurrently or so that this one stays as it was."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import TypeVar

from flowrun.engine.errors import RunError
from flowrun.launcher.data.open_files import reopen_files
from flowrun.launcher.recipe.device import forks_autograd

T = TypeVar("T")
_UNPICKLED = (AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)


@contextmanager
def start_fork(make: Callable[[], T], here: bool = False) -> Iterator[Callable[[], T]]:
    """Call `make` in a fork of this process; give a function that waits, and returns or raises what
    it does.  The result is pickled.

    The fork starts at once.  Where a concurrent one gains nothing or is not safe (on one core, or
    while other threads run, whose locks it would inherit), `make` is called when its result is
    asked for.  here: then in this process, else in a fork.
    """
    if may_fork():
        with _fork(make, daemon=True) as result:
            yield result
    else:
        yield make if here else lambda: run_in_fork(make)


def run_in_fork(make: Callable[[], T]) -> T:
    """Call `make` in a fork of this process, and return or raise what it does.

    What `make` opens goes away with the fork: autograd's threads, and CUDA, which a process must
    not have touched if its forks are to use it.  Capture opens both, since autograd asks each kind
    of device how many there are.  Raises RunError if the process ends without an answer.
    """
    return run_in_forks([make])[0]


def run_autograd(make: Callable[[], T]) -> T:
    """Call what runs autograd, in a fork where no fork of this process could run it after that."""
    return run_in_fork(make) if forks_autograd() else make()


def run_in_forks(makes: Iterable[Callable[[], T]]) -> list[T]:
    """Call several functions at once, each in a fork of this process; see run_in_fork."""
    with ExitStack() as forks:
        results = [forks.enter_context(_fork(make, daemon=False)) for make in makes]
        return [result() for result in results]


@contextmanager
def _fork(make: Callable[[], T], daemon: bool) -> Iterator[Callable[[], T]]:
    reader, writer = multiprocessing.Pipe(duplex=False)
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_send_result, args=(make, reader, writer), daemon=daemon)
    with delay_interrupts(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)  # NumPy's
        process.start()  # Ctrl-C stays blocked there: it is for the process that waits
    writer.close()

    def result() -> T:
        try:
            made, error = pickle.loads(reader.recv_bytes())
        except (EOFError, OSError):
            raise RunError("a fork of this process", "it ended before it had an answer.") from None
        if error:
            raise error
        return made  # type: ignore[no-any-return]

    try:
        yield result
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


def may_fork() -> bool:
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
        answer = pickle.dumps((make(), None))  # tensors by value: this process ends
    except Exception as error:
        answer = _dump_error(error)
    writer.send_bytes(answer)


def _dump_error(error: Exception) -> bytes:
    """An error that its pickle makes again; what it says, where it does not."""
    try:
        pickle.loads(pickle.dumps(error))
    except (pickle.PickleError, *_UNPICKLED):  # or its own constructor takes other arguments
        error = RunError("a fork of this process", f"{type(error).__name__}: {error}")
    return pickle.dumps((None, error))
