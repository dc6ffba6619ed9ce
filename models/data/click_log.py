"""Click logs: a CSV or Parquet file with a column of clicks."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrun.models.data.stacked import Rows


class ClickLog(Rows):
    """Rows of a click log as {ids (F,) int64, numbers (N,) float32, clicks () float32}.

    These are the fields of Wide & Deep.
    path: a .csv file with a header, or a .parquet file (pip install flowrun[parquet]).
    click: name of the column that is 0 or 1.  categories: columns whose values become ids; numbers:
    columns of numbers, which become log(1 + x) if x > 0; an empty cell is 0.
    ids: rows of the model's table, over all categories.  Each category owns an equal number; a
    value's row is a checksum of its text, so that it is the same in every file.
    """

    def __init__(
        self,
        path: str,
        click: str,
        categories: Sequence[str],
        numbers: Sequence[str] = (),
        ids: int = 100_000,
    ) -> None:
        if ids < len(categories):
            raise ValueError(f"{ids} ids are too few for {len(categories)} categories")
        wanted = [click, *categories, *numbers]
        columns = _columns(Path(path).expanduser(), wanted)
        rows = ids // max(len(categories), 1)
        found = [_rows(columns[name], rows) + k * rows for k, name in enumerate(categories)]
        clicks = _numbers(columns[click])
        logs = [_log_of_positive(_numbers(columns[name])) for name in numbers]
        super().__init__(
            ids=torch.stack(found, 1),
            numbers=torch.stack(logs, 1) if numbers else torch.empty(len(clicks), 0),
            clicks=clicks,
        )


def _columns(file: Path, names: Sequence[str]) -> Mapping[str, Sequence[Any]]:
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    if file.suffix == ".parquet":
        import pyarrow.parquet

        known = pyarrow.parquet.read_schema(file).names
        _check(file, names, known)
        table = pyarrow.parquet.read_table(file, columns=list(names))
        return {name: table[name].to_pylist() for name in names}
    with file.open(newline="", encoding="utf-8") as stream:
        reader = csv.reader(stream)
        known = next(reader, [])
        _check(file, names, known)
        at = [known.index(name) for name in names]
        cells = [[row[k] for k in at] for row in reader if row]
    return dict(zip(names, zip(*cells, strict=True), strict=True))


def _check(file: Path, names: Sequence[str], known: Sequence[str]) -> None:
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(f"{file} has no column {missing[0]!r}; it has {', '.join(known)}")


def _rows(cells: Sequence[Any], rows: int) -> Tensor:
    texts = ("" if cell is None else str(cell) for cell in cells)
    return torch.tensor([zlib.crc32(text.encode()) % rows for text in texts])


def _numbers(cells: Sequence[Any]) -> Tensor:
    values = [0.0 if cell in (None, "") else float(cell) for cell in cells]
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _log_of_positive(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.clamp(min=0).log1p(), x)
