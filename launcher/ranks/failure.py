"""Say to a person what went wrong on a rank: rank and actor, the error, the user's own lines."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from flowrun.engine.errors import FlowrunError
from flowrun.engine.ir.user_code import user_lines
from flowrun.engine.runtime.drivers.distributed import LostPeer
from flowrun.launcher.data.collate import ItemError
from flowrun.launcher.job.faults import name_error, own_fault
from flowrun.launcher.ranks.rank_events import Reason

_GLOO = re.compile(r"\[/\S+\] | This is typically caused by.*", re.DOTALL)  # paths, guesses


def describe(error: BaseException, rank: int | None = None) -> Reason:
    """Describe an error of a rank, with the user's own lines and the whole traceback."""
    story = "".join(traceback.format_exception(error))
    if not isinstance(error, FlowrunError):
        said = [name_error(error), *user_lines(error.__traceback__)]
        return Reason(f"rank {rank}", "\n".join(said), story=story)
    if isinstance(error, LostPeer):
        return Reason(error.where, _GLOO.sub("", error.problem), story=story)
    cause = error.__cause__
    lines: list[str] = []
    if cause and not isinstance(cause, ItemError):  # which says all that there is
        lines = [*getattr(cause, "__notes__", []), *user_lines(cause.__traceback__)]
    said = [error.problem, *lines, *error.instead.splitlines()]
    return Reason(error.where, "\n".join(said), story=story)


def reason_of(error: BaseException) -> Reason:
    """Return an error of the launcher as its machine takes it."""
    if isinstance(error, OSError) and error.filename:
        return Reason(str(error.filename), f"{error.strerror}.")
    if isinstance(error, Exception) and not isinstance(error, (FlowrunError, OSError, MemoryError)):
        error = own_fault(error)
    if isinstance(error, FlowrunError):
        return Reason(error.where, error.problem, error.instead)
    return Reason("the launcher", name_error(error))


def describe_exit(code: int) -> str:
    """Say how a process ended.  code: its exit status; below 0: of the signal that killed it."""
    if code == -signal.SIGKILL:
        how = "was killed by SIGKILL, most likely by the kernel because memory ran out"
    elif code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    else:
        how = f"ended with exit status {code}"
    return f"the process {how}."


@contextmanager
def with_peers(rank: int, when: str) -> Iterator[None]:
    """Around what needs the other ranks: a failure there is most likely another's."""
    try:
        yield
    except RuntimeError as error:
        what = f"{type(error).__name__}: {error}"
        raise LostPeer(f"rank {rank}", f"lost another rank {when}: {what}") from error
