"""garbage: when Python does not look for cycles of objects that nobody refers to any more."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collection() -> Iterator[None]:
    """Pause garbage collection.

    Modules and graphs stay until the plan is made.  To look through all of them repeatedly takes a
    sixth of the time of `import torch`, and two fifths of that of a large plan.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
