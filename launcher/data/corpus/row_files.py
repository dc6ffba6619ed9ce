"""Rows of one file, as they stand in it: text stays text, and each row knows its place.

READERS has a function for each kind.  All raise ValueError that names the file and the line or row,
both counted from 1.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_AT_ONCE = 1000  # rows of a Parquet file
_INSTEAD = "; a row is one object on a line of its own"


@dataclass(frozen=True)
class PlacedRow:
    """A row.  place: of it, for a person: the file, and a line or a row from 1 on."""

    place: str
    fields: dict[str, Any]


def text_of(fields: dict[str, Any], name: str) -> str:
    """Return a field of a row that is text.  Raise ValueError if it is missing, null or no text."""
    return check_text(field_of(fields, name), name)


def field_of(fields: dict[str, Any], name: str) -> Any:
    """Return a field of a row.  Raise ValueError if it is missing or null."""
    if name not in fields:
        raise ValueError(f"there is no {name!r} in it; it has {', '.join(fields) or 'no field'}")
    if fields[name] is None:
        raise ValueError(f"{name!r} is null")
    return fields[name]


def check_text(value: Any, name: str) -> str:
    """Return a value that is text.  Raise ValueError for another one of the field `name`."""
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is no text: {_show(value)}")
    return value


def _show(value: Any) -> str:
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 40 else shown[:40] + '…'}"


def _read_lines(file: Path) -> Iterator[PlacedRow]:
    """Yield the objects of a file that has one on each line; empty lines are none."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            place = f"{file}, line {number}"
            if text := _decode(line, place).strip():
                yield PlacedRow(place, _check_object(_parse(text, place, _INSTEAD), place))


def _read_json(file: Path) -> Iterator[PlacedRow]:
    """Yield the objects of a list, which is the whole file, or those of lines."""
    with file.open("rb") as stream:
        start = stream.read(1000).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if start != b"[":
        yield from _read_lines(file)
        return
    for number, found in enumerate(_parse(_decode(file.read_bytes(), str(file)), str(file)), 1):
        place = f"{file}, row {number}"
        yield PlacedRow(place, _check_object(found, place))


def _decode(content: bytes, place: str) -> str:
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise ValueError(f"{place} is not UTF-8 text: byte {error.start} is {byte:#x}") from None


def _parse(text: str, place: str, instead: str = "") -> Any:
    """Return a value of JSON.  place: of the text.  instead: what to write, for errors."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if error.lineno > 1 else ""
        raise ValueError(
            f"{place}{line}, column {error.colno} is no JSON: {error.msg}{instead}"
        ) from None
    if _SURROGATE.search(text):  # two make a character
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ord(error.object[error.start])
            raise ValueError(f"{place}: \\u{half:x} alone is half of a character") from None
    return found


def _check_object(found: Any, place: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"{place} is no object {{field: value}}: {_show(found)}")
    return found


def _read_csv(file: Path) -> Iterator[PlacedRow]:
    """Yield the rows of a table whose first line names the columns; all cells are text."""
    csv.field_size_limit(sys.maxsize)  # a cell may be a long document
    with file.open(encoding="utf-8-sig", newline="") as stream:
        cells, line = csv.reader(stream, strict=True), 1
        try:
            names = next(cells, [])
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{file} has more than one column {', '.join(twice)}")
            line = cells.line_num + 1
            for row in cells:
                place, line = f"{file}, line {line}", cells.line_num + 1
                if row:
                    yield PlacedRow(place, _name_cells(names, row, place))
        except csv.Error as error:
            raise ValueError(f"{file}, line {line} is no CSV: {error}") from None
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise ValueError(
                f"{file}, line {line} or later is not UTF-8 text: a byte is {byte:#x}"
            ) from None


def _name_cells(names: Sequence[str], cells: Sequence[str], place: str) -> dict[str, Any]:
    if len(names) != len(cells):
        raise ValueError(f"{place} has {len(cells)} cells, and there are {len(names)} columns")
    return dict(zip(names, cells, strict=True))


def _read_parquet(file: Path) -> Iterator[PlacedRow]:
    """Yield the rows of a Parquet file (pip install flowrun[parquet])."""
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(file) as found:
            for batch in found.iter_batches(_AT_ONCE):
                for fields in batch.to_pylist():
                    number += 1
                    yield PlacedRow(f"{file}, row {number}", fields)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file} cannot be read behind row {number}: {error}") from error


Reader = Callable[[Path], Iterator[PlacedRow]]
READERS: dict[str, Reader] = {  # suffix -> reader
    ".jsonl": _read_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
