"""Say to a person what went wrong on a rank: rank and actor, the error, the user's own lines."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowrun.engine.errors import TRACEBACK, FlowrunError, PlanError, RunError
from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.user_code import user_lines
from flowrun.engine.runtime.drivers.distributed import LostPeer
from flowrun.launcher.data.collate import ItemError

_GLOO = re.compile(r"\[/\S+\] | This is typically caused by.*", re.DOTALL)  # paths, guesses


def describe(error: BaseException, rank: int | None = None) -> tuple[str, str, str]:
    """Describe an error: (where, problem with the user's own lines, whole traceback)."""
    story = "".join(traceback.format_exception(error))
    if not isinstance(error, FlowrunError):
        return (
            f"rank {rank}",
            "\n".join([_name_error(error), *user_lines(error.__traceback__)]),
            story,
        )
    if isinstance(error, LostPeer):
        return error.where, _GLOO.sub("", error.problem), story
    cause = error.__cause__
    lines: list[str] = []
    if cause and not isinstance(cause, ItemError):  # which says all that there is
        lines = [*getattr(cause, "__notes__", []), *user_lines(cause.__traceback__)]
    said = [error.problem, *lines, *error.instead.splitlines()]
    return error.where, "\n".join(said), story


def describe_exit(code: int) -> str:
    """Say how a process ended.  code: its exit status; below 0: of the signal that killed it."""
    if code == -signal.SIGKILL:
        how = "was killed by SIGKILL, most likely by the kernel because memory ran out"
    elif code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    else:
        how = f"ended with exit status {code}"
    return f"the process {how}."


def own_fault(error: Exception) -> FlowrunError:
    """The error for what only a fault of flowrun's raises: in which function, at which op.  What
    the system refuses is none.
    """
    if isinstance(error, OSError):
        return RunError(str(error.filename or "the system"), _name_error(error))
    if isinstance(error, MemoryError):
        return RunError(
            "this process",
            f"no more memory is to be had: {error or 'MemoryError'}.",
            "Free some, or raise the limit of this shell or job (ulimit -v unlimited).",
        )
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = traceback.extract_tb(error.__traceback__)[-1]
    ops = [op for frame in frames if isinstance(op := frame.f_locals.get("op"), Op)]
    at = f", at {ops[-1].target} of module {ops[-1].module or '(top level)'}" if ops else ""
    place = f"{Path(last.filename).name}:{last.lineno} in {last.name}"
    return PlanError(
        f"a bug in flowrun ({place}{at})",
        " ".join(_name_error(error).split()),
        f"Please report it with the recipe. {TRACEBACK}=1 shows where it comes from.",
    )


@contextmanager
def with_peers(rank: int, when: str) -> Iterator[None]:
    """Around what needs the other ranks: a failure there is most likely another's."""
    try:
        yield
    except RuntimeError as error:
        what = f"{type(error).__name__}: {error}"
        raise LostPeer(f"rank {rank}", f"lost another rank {when}: {what}") from error


@contextmanager
def compiling() -> Iterator[None]:
    """Within nothing has started: what goes wrong is an error of the recipe, or flowrun's fault."""
    try:
        yield
    except (FlowrunError, OSError):
        raise
    except Exception as error:
        raise own_fault(error) from error


def _name_error(error: BaseException) -> str:
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
