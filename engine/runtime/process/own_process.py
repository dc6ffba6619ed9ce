"""Work in a process of its own, which can be ended at any moment, whatever a library does in it.

A library of Rust or C sees no signal until it returns, and may end its process.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

from flowrun.engine.runtime.process.lifetime import end_with

T = TypeVar("T")
MOST_S, MOST_BYTES = 10.0, 1 << 30  # of a core, and more than there are, for one chat template


def run_in_child(work: Callable[[], T], what: str, log: logging.Logger) -> T:
    """Return what `work` returns in a fork of this process, or raise what it raises there.

    The result is pickled.  What interrupts this process kills the other one at once.  what: is done
    there, for the error.  log: its records there are records here.  Raises ChildProcessError for a
    process that ends without an answer.
    """
    reader, writer = Pipe(duplex=False)
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the fork uses none
        process = os.fork()
    if not process:
        _answer(work, writer, parent, log)
    writer.close()
    status = 0
    try:
        with suppress(EOFError):
            while isinstance(message := reader.recv(), str):
                log.info(message)
            result, error = message
            if error is not None:
                raise error
            return result  # type: ignore[no-any-return]
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        reader.close()
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    raise ChildProcessError(f"the process that was {what} ended by {how}.")


def _answer(
    work: Callable[[], object], writer: Connection, parent: int, log: logging.Logger
) -> NoReturn:
    """Work, send the result or the error, and end this process."""
    status = 1
    try:
        end_with(parent)
        log.handlers, log.propagate = [_Sender(writer)], False
        try:
            answer: tuple[object, BaseException | None] = work(), None
        except Exception as error:  # of any library
            answer = None, error
        try:
            writer.send(answer)
        except (TypeError, AttributeError, ValueError):  # an error that cannot be pickled
            writer.send((None, RuntimeError(str(answer[1]))))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


class _Sender(logging.Handler):
    def __init__(self, writer: Connection) -> None:
        super().__init__()
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        self.writer.send(record.getMessage())


@contextmanager
def bound_work(what: str, most_s: float | None = None) -> Iterator[None]:
    """Bound the seconds of a core and the memory that foreign code within may take, such as a
    template.

    what: it is, for the error.  Raises ValueError, also for whatever it raises, and again after as
    long where that was caught or ignored (Python ignores what a callback of its garbage collector
    raises).  Signals are the main thread's: another thread is not bounded.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise ValueError(f"{what} took more than {seconds:g} s")

    seconds = MOST_S if most_s is None else most_s
    before = signal.signal(signal.SIGVTALRM, stop)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
        if (held := _held_bytes()) and limits[0] == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_DATA, (held + MOST_BYTES, limits[1]))
        yield
    except MemoryError:
        raise ValueError(f"{what} took more than {MOST_BYTES >> 30} GiB") from None
    except ValueError:
        raise
    except Exception as error:  # of any kind
        raise ValueError(f"{what} failed: {type(error).__name__}: {error}") from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def _held_bytes() -> int:
    """Return the bytes that RLIMIT_DATA counts now; 0 where the system does not say it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
