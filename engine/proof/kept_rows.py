"""kept_rows: found rows on disk, by the text of a call form.

`found_rows.json`, beside this file, ships with the project; what it lacks is tried once and kept in
a file of the user's own.  Both hold for one release of torch: with another, ops are tried anew.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from flowrun.engine.graph import Op
from flowrun.engine.ops.table import FoundRow, FoundTable, parse_found
from flowrun.engine.placement import Shape
from flowrun.engine.proof.call_form import CallForm, call_forms
from flowrun.engine.proof.experiment import experiment, is_tried
from flowrun.engine.sbp import Split

SHIPPED = Path(__file__).with_name("found_rows.json")
TORCH = ".".join(torch.__version__.split(".")[:2])

Rows = Mapping[str, tuple[FoundRow, ...]]


def read_rows(file: Path) -> dict[str, tuple[FoundRow, ...]]:
    """Rows of a file, by form; none if it is missing or of another release of torch.

    Raises ValueError if it is broken.
    """
    if not file.exists():
        return {}
    read = json.loads(file.read_text())
    if read.get("torch") != TORCH:
        return {}
    return {key: tuple(map(parse_found, texts)) for key, texts in read["rows"].items()}


def write_rows(file: Path, rows: Rows) -> None:
    """A file that a person can read: one form a line, its rows behind it."""
    lines = [
        f"{json.dumps(key)}: {json.dumps([str(r) for r in rows[key]])}" for key in sorted(rows)
    ]
    inside = ",\n".join(f"  {line}" for line in lines)
    text = f'{{"torch": "{TORCH}", "rows": {{\n{inside}\n}}}}\n'
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as opened:
        opened.write(text)
    os.replace(opened.name, file)


@cache
def shipped_rows() -> Rows:
    """Those of the project."""
    return read_rows(SHIPPED)


@dataclass
class KeptRows:
    """All rows that are known, and those that are tried now.

    file: of the user's own; None: what is tried is kept in memory alone.
    seconds: that experiments took.
    """

    file: Path | None = None
    own: dict[str, tuple[FoundRow, ...]] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.file is not None:
            try:
                self.own.update(read_rows(self.file))
            except (ValueError, KeyError, OSError):
                self.own.clear()  # written anew with the next experiment

    def table(
        self,
        op: Op,
        in_shapes: Sequence[Shape],
        in_dtypes: Sequence[torch.dtype],
        out_shapes: Sequence[Shape | None],
    ) -> FoundTable | None:
        """What is found of an op; None if it has no row but the one that is all B."""
        if not op.inputs or not is_tried(op.target):
            return None
        found: dict[object, FoundRow] = {}
        for form in call_forms(op, in_shapes, in_dtypes, out_shapes):
            rows = self._rows(form)
            for row in rows:
                found.setdefault(row.signature, row)
            if any(isinstance(sbp, Split) for row in rows for sbp in row.signature.inputs):
                break
        return FoundTable(tuple(found.values())) if found else None

    def _rows(self, form: CallForm) -> tuple[FoundRow, ...]:
        key = str(form)
        known = shipped_rows().get(key, self.own.get(key))
        if known is None:
            began = time.perf_counter()
            known = self.own[key] = experiment(form)
            self.seconds += time.perf_counter() - began
            self._write()
        return known

    def _write(self) -> None:
        if self.file is not None:
            try:
                write_rows(self.file, self.own)
            except OSError:
                self.file = None  # no place to keep them: the next run tries again


@cache
def kept_rows(file: Path | None = None) -> KeptRows:
    """One for each file: what a process has tried it does not try again."""
    return KeptRows(file)
