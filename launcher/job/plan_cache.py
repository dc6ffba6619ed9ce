"""Plans that were made before: everything after capture is kept.

Capture runs each time.  The key of a plan is what the compiler is given, as it prints: the captured
graph, the strategy with the hardware, and which engine, torch and Python read them.  A plan of what
prints no content, such as a function, is not kept.  The folder,
$XDG_CACHE_HOME/flowrun or ~/.cache/flowrun, and its files must be the user's own and unbroken
(engine/ir/own_files.py): a pickle runs what its writer likes.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from flowrun.engine.actors.schedules import schedule_of
from flowrun.engine.capture.update_trace import describe_updates
from flowrun.engine.compile import Rehearsed
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ir.own_files import Unusable, cache_folder, own_folder, read_own, write_own
from flowrun.engine.passes.find_rows import find_rows
from flowrun.engine.strategy import OwnSchedule, Strategy

MOST_FILES, MOST_BYTES = 100, 1 << 29  # what the folder may hold; the longest unused goes first
_SUFFIX = ".plan"
# what prints where a value is, or its name, and not what it holds
HIDES = re.compile(r"<\w[^\n]{0,80}? at 0x[0-9a-f]+>|<(class|function|built-in) [^>]*>|tensor\(")
# what pickle raises for a function that has no name, or for bytes of another version
_UNPICKLED = (pickle.PickleError, AttributeError, ImportError, EOFError, TypeError, ValueError)
_ENGINE = Path(__file__).resolve().parents[2] / "engine"


class PlanCache:
    """The plans of one job.  used: False makes each, and keeps none.  notes: what went
    otherwise than a user expects.
    """

    def __init__(self, used: bool) -> None:
        self.used = used
        self.notes: list[str] = []

    def get(
        self, kind: str, made_of: tuple[object, ...], make: Callable[[], Rehearsed]
    ) -> Rehearsed:
        """The plan of a kind ("training", "evaluation"), from disk or made, and then kept.

        made_of: all that `make` reads, as values whose repr is all of them (dataclasses, numbers,
        text).
        """
        if not self.used:
            return make()
        text = repr((kind, made_of, _made_by()))
        file = None
        with self._noting("no plan is kept"):
            if hides := HIDES.search(text):
                raise Unusable(f"{hides[0]} does not print what it is made of")
            key = hashlib.sha256(text.encode()).hexdigest()
            file = own_folder(cache_folder()) / f"{kind}-{key[:32]}{_SUFFIX}"
        if file is None:
            return make()
        return self._read(file) or self._make(file, make)

    def _make(self, file: Path, make: Callable[[], Rehearsed]) -> Rehearsed:
        made = make()
        with self._noting("no plan is kept"):
            write_own(file, pickle.dumps(made, protocol=pickle.HIGHEST_PROTOCOL))
            _tidy(file.parent)
        return made

    def _read(self, file: Path) -> Rehearsed | None:
        with self._noting("the stored plan was not used"), suppress(FileNotFoundError):
            found: Rehearsed = pickle.loads(read_own(file))
            os.utime(file)
            return found
        return None

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Note why a file is not used: once, though there are two plans."""
        try:
            yield
        except (OSError, RuntimeError, Unusable, *_UNPICKLED) as error:
            why = str(error) if isinstance(error, Unusable) else f"{type(error).__name__}: {error}"
            if (note := f"{what}: {why}") not in self.notes:
                self.notes.append(note)


def inputs(strategy: Strategy, *graphs: LogicalGraph) -> tuple[object, ...]:
    """Collect the values that a plan of captured graphs is made from: rows of ops as they are known
    now, and an optimizer's function by what it does.

    strategy: tables that the user gives count where an op has one; an optimizer's function may hold
    others.
    """
    known = tuple(find_rows(graph, strategy) for graph in graphs)
    optimizer = strategy.optimizer
    groups = tuple(
        replace(g, update=g.update and replace(g.update, function=None)) for g in optimizer.groups
    )
    named = replace(optimizer, function=None, groups=groups)
    bare = replace(strategy, kept_rows=None, optimizer=named)
    if isinstance(strategy.in_flight, OwnSchedule):
        bare = replace(bare, in_flight=repr(schedule_of(strategy).table()))
    parameters = [
        (replace(graph.tensors[v.tensor], name=v.name), optimizer.update_of(v.name))
        for graph in graphs
        for v in graph.variables
        if v.kind == "parameter" and f"grad/{v.name}" in dict(graph.results)
    ]
    if not any(update.function for _, update in parameters):
        return known, replace(bare, signatures=())
    return known, bare, describe_updates(parameters)


def found_rows_file(used: bool) -> Path | None:
    """Return the file that keeps rows found by experiment; None if `used` is False."""
    return cache_folder() / "found_rows" if used else None


@cache
def _made_by() -> tuple[str, ...]:
    """The compiler itself: every file of flowrun's engine, torch, Python."""
    hashed = hashlib.sha256()
    for file in sorted(_ENGINE.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            content = file.read_bytes()
            hashed.update(f"{file.relative_to(_ENGINE)} {len(content)}\n".encode())
            hashed.update(content)
    return hashed.hexdigest(), str(torch.__version__), str(torch.version.git_version), sys.version


def _tidy(where: Path) -> None:
    kept = sorted(where.glob(f"*{_SUFFIX}"), key=lambda file: -file.stat().st_mtime)
    total = 0
    for k, file in enumerate(kept):
        total += file.stat().st_size
        if k >= MOST_FILES or (k and total > MOST_BYTES):
            file.unlink(missing_ok=True)
