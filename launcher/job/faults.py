"""Errors that are no user's: a fault of flowrun's own, or what the system refuses."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowrun.engine.errors import TRACEBACK, FlowrunError, PlanError, RunError
from flowrun.engine.ir.graph import Op


def own_fault(error: Exception) -> FlowrunError:
    """The error for what only a fault of flowrun's raises: in which function, at which op.  What
    the system refuses is none.
    """
    if isinstance(error, OSError):
        return RunError(str(error.filename or "the system"), name_error(error))
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
        " ".join(name_error(error).split()),
        f"Please report it with the recipe. {TRACEBACK}=1 shows where it comes from.",
    )


@contextmanager
def compiling() -> Iterator[None]:
    """Within nothing has started: what goes wrong is an error of the recipe, or flowrun's fault."""
    try:
        yield
    except (FlowrunError, OSError):
        raise
    except Exception as error:
        raise own_fault(error) from error


def name_error(error: BaseException) -> str:
    """Return the kind of an error, its text and its notes."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
