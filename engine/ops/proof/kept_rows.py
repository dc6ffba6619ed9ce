"""kept_rows: found rows on disk, by the text of a call form.

`found_rows.json` in this folder ships with the project, for one minor release of torch; what it
lacks is tried once and kept in a file of the user's own, for one build of torch and this prover.
With others, ops are tried again.  Only rows of torch's own ops are kept: the code of others may
change from run to run.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from flowrun.engine.ir import table
from flowrun.engine.ir.own_files import Unusable, own_folder, read_own, write_own
from flowrun.engine.ir.sbp import Split
from flowrun.engine.ir.signature import Signature
from flowrun.engine.ir.table import FoundRow, FoundTable, parse_found_row
from flowrun.engine.ops.proof.call_form import CallForm
from flowrun.engine.ops.proof.in_child import experiments

SHIPPED = Path(__file__).with_name("found_rows.json")
TORCH = "torch " + ".".join(torch.__version__.split(".")[:2])


@dataclass(frozen=True, slots=True)
class KeptRow:
    """The rows of a form.  sizes: letter -> the size that it had when it was tried."""

    sizes: Mapping[str, int]
    rows: tuple[FoundRow, ...]

    def texts(self) -> list[str]:
        """The sizes, then a row each."""
        return [" ".join(f"{k}={n}" for k, n in self.sizes.items()), *map(str, self.rows)]


def _entry(texts: Sequence[str]) -> KeptRow:
    sizes = (word.split("=") for word in texts[0].split())
    return KeptRow({k: int(n) for k, n in sizes}, tuple(map(parse_found_row, texts[1:])))


Entries = Mapping[str, KeptRow]  # by the text of the form


def read_rows(text: str, holds_for: str = TORCH) -> dict[str, KeptRow]:
    """Entries of a text; none if it holds for another torch.  Raises ValueError if it is broken."""
    read = json.loads(text)
    if read.get("holds_for") != holds_for:
        return {}
    return {key: _entry(texts) for key, texts in read["rows"].items()}


def rows_text(entries: Entries, holds_for: str = TORCH) -> str:
    """Print one form of torch's a line: its sizes, then rows."""
    kept = sorted(key for key in entries if key.startswith("aten."))
    inside = ",\n".join(f"  {json.dumps(k)}: {json.dumps(entries[k].texts())}" for k in kept)
    return f'{{"holds_for": {json.dumps(holds_for)}, "rows": {{\n{inside}\n}}}}\n'


@cache
def _prover() -> str:
    """The build of torch and the files by which rows are found."""
    hashed = hashlib.sha256()
    for file in (*sorted(SHIPPED.parent.glob("*.py")), Path(table.__file__)):
        hashed.update(file.read_bytes())
    return f"torch {torch.__version__}, prover {hashed.hexdigest()}"


@cache
def shipped_rows() -> Entries:
    """Return the rows of the project; none with another release of torch."""
    return read_rows(SHIPPED.read_text()) if SHIPPED.exists() else {}


@dataclass
class KeptRows:
    """All rows that are known, and those that are tried now.

    file: of the user's own; None: what is tried is kept in memory alone.
    seconds: that experiments took.
    """

    file: Path | None = None
    own: dict[str, KeptRow] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.file is not None:
            prover = _prover()
            try:
                self.own.update(read_rows(read_own(self.file).decode(), prover))
            except (Unusable, ValueError, KeyError, OSError):
                self.own.clear()  # written again with the next experiment

    def learn(self, forms: Iterable[CallForm]) -> None:
        """Try those that are not known."""
        new = {str(form): form for form in forms if self._known(form) is None}
        if not new:
            return
        began = time.perf_counter()
        held = experiments(list(new.values()))
        for (key, form), rows in zip(new.items(), held, strict=True):
            unique = {row.signature: row for row in reversed(rows)}
            self.own[key] = KeptRow(dict(form.sizes), tuple(reversed(unique.values())))
        self.seconds += time.perf_counter() - began
        self._write()

    def table(self, forms: Iterable[CallForm]) -> FoundTable | None:
        """Return the rows of an op by its readings; None if there are none."""
        rows: dict[Signature, FoundRow] = {}
        for form in forms:
            for row in self._known(form) or ():
                rows.setdefault(row.signature, row)
        return FoundTable(tuple(rows.values())) if rows else None

    def decides(self, form: CallForm) -> bool:
        """True if a split is known of this reading, so that no other is asked for."""
        rows = self._known(form) or ()
        return any(isinstance(sbp, Split) for row in rows for sbp in row.signature.inputs)

    def _known(self, form: CallForm) -> tuple[FoundRow, ...] | None:
        key = str(form)
        entry = shipped_rows().get(key, self.own.get(key))
        return None if entry is None else entry.rows

    def _write(self) -> None:
        if self.file is not None:
            content = rows_text(self.own, _prover()).encode()
            try:
                own_folder(self.file.parent)
                write_own(self.file, content)
            except (Unusable, OSError):
                self.file = None  # no place to keep them: the next run tries again


@cache
def kept_rows(file: Path | None) -> KeptRows:
    """Return the rows of a file, one object a process: what it has tried it does not try again."""
    return KeptRows(file)
