"""A call stack without edges that a loop can lie on.

CPython 3.11 to 3.13 keeps the frames of Python calls in chunks of 16 kB (DATA_STACK_CHUNK_SIZE of
its pystate.c).  A call that does not fit into the newest chunk maps another, and unmaps it when it
returns.  A loop that calls at such an edge maps and unmaps a chunk in every turn: 8 microseconds,
a hundred times the call itself.  The depth of the stack alone decides which loops these are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Params = ParamSpec("Params")
Returned = TypeVar("Returned")

# A frame of this many slots of 8 bytes gets a chunk of 1 MB, of which calls use the other half.
_SLOTS = 66_000


def in_one_chunk(function: Callable[Params, Returned]) -> Callable[Params, Returned]:
    """Return `function`, run such that the frames of all calls in it lie in one chunk of memory.

    They may take 500 kB, some thousands of calls; deeper ones go to chunks of 16 kB.  Pages that no
    call touches take no memory.  Each thread has a stack of its own.
    """

    def call(*args: Params.args, **kwargs: Params.kwargs) -> Returned:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_SLOTS)
    return functools.wraps(function)(call)
