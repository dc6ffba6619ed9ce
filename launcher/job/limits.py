"""Limits of the system that a run would hit after it has started: looked at before, and named.

`ulimit -n` is raised where that is allowed, `ulimit -v` and `-f` make arenas smaller
(transport/arena.py); what is still too small is an error.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass

from flowrun.engine.compile import Rehearsed
from flowrun.engine.runtime.process.process_memory import address_space
from flowrun.engine.runtime.rank.shards import written_bytes
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.recipe_errors import PlacedError
from flowrun.launcher.terminal.units import size

_FILES, _FILES_A_RANK, _FILES_A_PEER = 16, 18, 4  # of 2 to 8 ranks; a peer is on another host
_LIBRARIES = 2**28  # bytes of address space for threads and allocators of a rank


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of the system.

    name: what a person calls it.  needed, allowed: in one unit.  what: what is limited, with the
    needed number.
    """

    name: str
    needed: int
    allowed: float
    what: str

    def check(self) -> None:
        """Raise RecipeError if it is too small."""
        if self.needed > self.allowed:
            allowed = f"{self.allowed:,.0f}" if self.name == "ulimit -n" else size(self.allowed)
            raise PlacedError(
                self.name,
                "",
                f"{self.what}, and this limit allows {allowed}.",
                f"Raise it in the shell or the job that starts flowrun: {self.name} unlimited, or"
                " use fewer ranks on this host.",
            )


def check_limits(job: Job, training: Rehearsed, local_ranks: int) -> None:
    """Look at the limits of this process, which its ranks inherit.

    job, training: what the ranks will do.  local_ranks: their number on this host.  Raises
    RecipeError for one that is too small.
    """
    for limit in _find_limits(job, training, local_ranks):
        limit.check()
    try:
        multiprocessing.get_context("fork").Lock()
    except OSError as error:
        raise PlacedError(
            "/dev/shm",
            "",
            f"no semaphore can be made there: {error.strerror or error}.",
            "The ranks of a host need it writable, with a page free: mount -o remount,rw /dev/shm",
        ) from error


def _find_limits(job: Job, training: Rehearsed, local_ranks: int) -> Iterator[Limit]:
    others = training.plan.num_ranks - local_ranks
    files = _count_open_files() + _FILES + _FILES_A_RANK * local_ranks + _FILES_A_PEER * others
    what = f"a process of {local_ranks} ranks on this host opens about {files:,} files and sockets"
    yield Limit("ulimit -n", files, _raise_open_files(files), what)

    most = max(training.rehearsal.bound_bytes)
    space = address_space() + 2 * (most + _LIBRARIES)  # half of what is left is for arenas
    what = f"a rank maps about {size(space)} of address space"
    yield Limit("ulimit -v", space, _read_limit(resource.RLIMIT_AS), what)

    largest = max(_find_files(job, training), default=0)
    what = f"the largest file that this run writes has {size(largest)}"
    yield Limit("ulimit -f", largest, _read_limit(resource.RLIMIT_FSIZE), what)


def _find_files(job: Job, training: Rehearsed) -> Iterator[int]:
    """Yield the bytes of large files: weights, and what a rank writes of a checkpoint."""
    train, plan = job.recipe.train, training.plan
    if train.save:
        yield sum(math.prod(shape) * dtype.itemsize for shape, dtype in job.saved.values())
    if train.save_every:
        yield from (written_bytes(plan, placement.ranks[0]) for placement in plan.placements)


def _raise_open_files(needed: int) -> float:
    """Let this process open as many files as it needs, as far as it may; return how many it can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = math.inf if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < needed <= most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return needed
    return math.inf if soft == resource.RLIM_INFINITY else soft


def _read_limit(limit: int) -> float:
    soft, _ = resource.getrlimit(limit)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def _count_open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
