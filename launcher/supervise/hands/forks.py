"""The processes of this host's ranks: forked by the main thread, watched and killed by the loop.

The launcher forks them itself, with the variables that torch.distributed reads.  They must be
forked by the main thread: the kernel ends a child whose parent's thread has ended
(engine/runtime/process/lifetime.py).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

from flowrun.launcher.ranks.failure import describe_exit
from flowrun.launcher.supervise.hosts.endpoint import MeetingPlace


class RankProcesses:
    """Processes of this host, by number among them.  first: the rank of the first."""

    def __init__(self, first: int) -> None:
        self.first = first
        self._processes: list[BaseProcess] = []
        self._ended: set[int] = set()  # their numbers

    def fork(self, live: Callable[[], None], place: MeetingPlace, count: int, threads: int) -> None:
        """Fork all of them.

        live: what each does, from its first line to its exit.  place: where they meet.  count: of
        this host.  threads: of each.
        """
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        context = multiprocessing.get_context("fork")
        with _frozen():
            for local in range(count):
                variables = _variables(place, local, count)
                process = context.Process(
                    target=_live, args=(live, variables), name=f"rank {self.first + local}"
                )
                process.start()
                self._processes.append(process)

    def poll(self) -> Iterator[tuple[int, str]]:
        """Yield the ranks that have ended badly since the last call, and how."""
        for number, process in enumerate(self._processes):
            if number not in self._ended and (status := process.exitcode) is not None:
                self._ended.add(number)
                if status:
                    yield self.first + number, describe_exit(status)

    @property
    def are_gone(self) -> bool:
        """True if all have ended."""
        return len(self._ended) == len(self._processes)

    def kill(self) -> None:
        """Kill those that run."""
        for process in self._processes:
            process.kill()


def _live(live: Callable[[], None], variables: Mapping[str, str]) -> None:
    os.environ |= variables
    live()


def _variables(place: MeetingPlace, local: int, count: int) -> dict[str, str]:
    """Return what torch.distributed reads of the environment (init_method env://)."""
    return {
        "RANK": str(place.number * count + local),
        "LOCAL_RANK": str(local),
        "GROUP_RANK": str(place.number),
        "WORLD_SIZE": str(place.num_hosts * count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_WORLD_SIZE": str(place.num_hosts),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher's: no rank opens one
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "flowrun",
    }


@contextmanager
def _frozen() -> Iterator[None]:
    """Neither this process nor a rank looks for garbage among what is there now, graphs and plans.
    To look is to write to each object: every rank would copy all their pages, 0.4 s of its first
    steps for a GPT of 4 blocks on 4 ranks.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
