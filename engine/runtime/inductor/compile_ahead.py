"""compile_ahead: the code of a plan's regions, made on all cores before ranks are forked.

Each program is compiled in a process of its own, which leaves it in Inductor's cache on disk; this
process then takes it from there.  So no thread or pool is started that a fork would lose.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from flowrun.engine.errors import RunError
from flowrun.engine.runtime.inductor.compiled import CompiledPiece, CompiledRegions
from flowrun.engine.runtime.inductor.inductor import cache_folder


def to_compile(regions: CompiledRegions) -> tuple[CompiledPiece, ...]:
    """What no run on this host has compiled."""
    folder = _compiled()
    return tuple(part for key, part in regions.different.items() if not (folder / key).exists())


def compile_ahead(regions: CompiledRegions, processes: int = os.cpu_count() or 1) -> None:
    """Compile what is new, `processes` at a time, then load everything.

    Raises RunError for the first program that Inductor does not compile.
    """
    new = to_compile(regions)
    if len(new) > 1 and processes > 1:
        _in_processes(regions, new, processes)
    folder = _compiled()
    for key, part in regions.different.items():
        regions.kernel(part)
        (folder / key).touch()


def _compiled() -> Path:
    """A folder with an empty file for each key that Inductor's cache has."""
    folder = cache_folder() / "flowrun"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _in_processes(regions: CompiledRegions, parts: Iterable[CompiledPiece], processes: int) -> None:
    fork = multiprocessing.get_context("fork")
    waiting = list(parts)
    running: list[Any] = []
    while waiting or running:
        while waiting and len(running) < processes:
            process = fork.Process(target=_compile_quietly, args=(regions, waiting.pop()))
            process.start()
            running.append(process)
        wait([process.sentinel for process in running])
        running = [process for process in running if process.is_alive()]


def _compile_quietly(regions: CompiledRegions, part: CompiledPiece) -> None:
    """What fails here fails again in the parent, which says so."""
    try:
        regions.kernel(part)
    except RunError:
        os._exit(1)
