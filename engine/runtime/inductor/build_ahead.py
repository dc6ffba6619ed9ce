"""build_ahead: build a plan's regions on all cores before ranks are forked.

Each program is built in a process of its own, which leaves the code in Inductor's cache on disk;
this process then loads it.  So this process starts no thread or pool, which a fork would lose.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from flowrun.engine.errors import RunError
from flowrun.engine.runtime.inductor.built import BuiltPiece, BuiltRegions, marker_folder


def list_new_pieces(regions: BuiltRegions) -> tuple[BuiltPiece, ...]:
    """Return the pieces that no run on this host has built."""
    folder = marker_folder()
    return tuple(part for key, part in regions.different.items() if not (folder / key).exists())


def build_ahead(regions: BuiltRegions, processes: int = os.cpu_count() or 1) -> None:
    """Compile what is new in `processes` processes at a time, then load all code.  Raises RunError
    for the first program that Inductor does not build.
    """
    new = list_new_pieces(regions)
    if len(new) > 1 and processes > 1:
        _build_in_processes(regions, new, processes)
    folder = marker_folder()
    for key, part in regions.different.items():
        regions.kernel(part)
        (folder / key).touch()


def _build_in_processes(regions: BuiltRegions, parts: Iterable[BuiltPiece], processes: int) -> None:
    fork = multiprocessing.get_context("fork")
    waiting = list(parts)
    running: list[BaseProcess] = []
    while waiting or running:
        while waiting and len(running) < processes:
            process = fork.Process(target=_build_quietly, args=(regions, waiting.pop()))
            process.start()
            running.append(process)
        wait([process.sentinel for process in running])
        running = [process for process in running if process.is_alive()]


def _build_quietly(regions: BuiltRegions, part: BuiltPiece) -> None:
    """Compile a piece; exit quietly on failure, which the parent meets again and reports."""
    try:
        regions.kernel(part)
    except RunError:
        os._exit(1)
