"""Click logs, in the fields of Wide & Deep: of a CSV or Parquet file, or generated."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.stacked import Rows

if TYPE_CHECKING:
    from pyarrow import ChunkedArray, Table


class ClickLog(Rows):
    """Rows of a click log as {ids (F,) int64, numbers (N,) float32, clicks () float32}.

    These are the fields of Wide & Deep.
    path: a .csv file with a header, or a .parquet file; pyarrow reads both (pip install
    flowrun[parquet]).
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
        columns = _columns(Path(path).expanduser(), categories, [click, *numbers])
        rows = ids // max(len(categories), 1)
        coded = [_rows(columns[name], rows) + k * rows for k, name in enumerate(categories)]
        clicks = _numbers(columns[click])
        logs = [_log_of_positive(_numbers(columns[name])) for name in numbers]
        super().__init__(
            ids=torch.stack(coded, 1),
            numbers=torch.stack(logs, 1) if numbers else torch.empty(len(clicks), 0),
            clicks=clicks,
        )


def _columns(file: Path, categories: Sequence[str], numbers: Sequence[str]) -> Table:
    """Read columns as an Arrow table: numbers as float64, and categories of CSV as text."""
    from pyarrow import csv, dataset, float64, string

    if not file.is_file():
        raise ArgumentError("path", f"there is no file {file}.")
    types = dict.fromkeys(categories, string()) | dict.fromkeys(numbers, float64())
    cells = csv.ConvertOptions(column_types=types, null_values=[""])
    is_csv = file.suffix != ".parquet"
    kind = dataset.CsvFileFormat(convert_options=cells) if is_csv else "parquet"
    table = dataset.dataset(file, format=kind)
    missing = [name for name in types if name not in table.schema.names]
    if missing:
        known = ", ".join(table.schema.names)
        raise ValueError(f"{file} has no column {missing[0]!r}; it has {known}")
    return table.to_table(columns=[*types])


def _rows(column: ChunkedArray, rows: int) -> Tensor:
    """Return the row of each cell; a value is hashed once."""
    from pyarrow.types import is_dictionary

    plain = column.cast(column.type.value_type) if is_dictionary(column.type) else column
    coded = plain.combine_chunks().dictionary_encode("encode")
    texts = ("" if value is None else str(value) for value in coded.dictionary.to_pylist())
    hashed = np.array([zlib.crc32(text.encode()) % rows for text in texts], np.int64)
    return torch.from_numpy(hashed[coded.indices.to_numpy()])


def _numbers(column: ChunkedArray) -> Tensor:
    values = column.cast("float64").fill_null(0.0).to_numpy()
    return torch.from_numpy(values.astype(np.float32))


def _log_of_positive(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.clamp(min=0).log1p(), x)


class Clicks(Rows):
    """Click logs {ids (F,) int64, numbers (N,), clicks () float32} with ids by Zipf's law.

    samples: number of items.  ids: rows of the model's table, over all fields; each field owns an
    equal number of them.  exponent: of the law, p(rank r) ~ r ** -exponent within a field.  Clicks
    follow a hidden weight of each id and the numbers, so that there is something to learn.
    """

    def __init__(
        self,
        samples: int = 100_000,
        ids: int = 100_000,
        fields: int = 8,
        numbers: int = 4,
        exponent: float = 1.05,
        seed: int = 0,
    ) -> None:
        if ids < fields:
            raise ValueError(f"{ids} ids are too few for {fields} fields; each needs at least one")
        random = np.random.default_rng(seed)
        rows = ids // fields
        ranks = zipf_ranks(random.random((samples, fields)), rows, exponent)
        chosen = ranks + np.arange(fields) * rows
        measured = random.standard_normal((samples, numbers))
        score = np.sin(chosen * 12.9898).sum(1) + measured.sum(1) / 2
        clicked = random.random(samples) < 1 / (1 + np.exp(-score))
        super().__init__(
            ids=torch.from_numpy(chosen),
            numbers=torch.from_numpy(measured.astype(np.float32)),
            clicks=torch.from_numpy(clicked.astype(np.float32)),
        )


def zipf_ranks(uniform: np.ndarray, rows: int, exponent: float) -> np.ndarray:
    """Return ranks 0 to rows - 1 by Zipf's law, by the inverse of its continuous distribution.

    uniform: numbers in [0, 1).
    """
    power, end = 1 - exponent, rows + 1.0
    if abs(power) < 1e-9:
        ranks = end**uniform
    else:
        ranks = (1 + uniform * (end**power - 1)) ** (1 / power)
    return np.minimum(ranks.astype(np.int64), rows) - 1
