"""Rows of a file, of the files of a folder or of a split, and of saved Hugging Face data sets.

Files of a URL are read by ranges, saved data sets from a copy.

Rows are as they stand there: text stays text, and each row knows its place, counted from 1.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from io import TextIOWrapper
from itertools import islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.corpus.documents import digest_file
from flowrun.launcher.data.corpus.plain_text import find_visible_files, is_visible
from flowrun.launcher.data.huggingface import load_saved
from flowrun.launcher.urls.ranged_file import CACHE_BYTES, RangedFile, find_ranged, is_ranged
from flowrun.launcher.urls.url_cache import data_on_disk

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

_CACHE_VERSION = 3  # version of the row format; a change makes caches stale
_SAVED = ("dataset_info.json", "dataset_dict.json")  # what save_to_disk leaves
ALL = "all"  # in place of a split: all files, whatever their names say
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_AT_ONCE = 1000  # rows
_SHARD = re.compile(r"(?P<split>\w+)-\d{5}-of-\d{5}")  # names that the hub writes
# word in the name of a file or of its folder -> split, as `datasets` reads them
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}

DataFile = Path | RangedFile
Fields = dict[str, object]  # of a row, as JSON has them


@dataclass(frozen=True)
class PlacedRow:
    """A row.  place: where it is, for messages: the file, and a line or a row, from 1 on."""

    place: str
    fields: Fields


@dataclass(frozen=True)
class RowSource:
    """Rows on a disk or at a URL.

    path: a file, a folder of files of one kind, or a folder that `datasets` wrote by save_to_disk
    (pip install flowrun[huggingface]); or a URL of one of these.
    split: of a saved data set that holds several; of files whose names say their split; or `all`
    of files.
    cache_bytes: of all that this host keeps of what was read by ranges.
    """

    path: str
    split: str | None = None
    cache_bytes: int = CACHE_BYTES

    @cached_property
    def where(self) -> Path:
        """The path; of a URL that of its copy."""
        return data_on_disk(self.path)

    @cached_property
    def _there(self) -> dict[PurePath, DataFile]:
        """All files, without hidden ones, by their names in the folder."""
        if is_ranged(self.path):
            found = find_ranged(self.path, self.cache_bytes)
            named = {PurePath(name or Path(self.path).name): found[name] for name in found}
            return {name: file for name, file in named.items() if is_visible(name)}
        if self.where.is_file():
            return {PurePath(self.where.name): self.where}
        files = sorted(find_visible_files(self.where))
        return {file.relative_to(self.where): file for file in files}

    def digest(self) -> str:
        """Return a digest of the bytes of all files that are read, and of the split.  Raise
        ValueError for an unknown split or an unknown file type.
        """
        hashed = hashlib.sha256(f"{_CACHE_VERSION} {self.split}\n".encode())
        for file in self.files():
            digest = file.digest() if isinstance(file, RangedFile) else digest_file(file)
            hashed.update(f"{file.suffix} {digest}\n".encode())
        return hashed.hexdigest()

    def batches(self, size: int) -> Iterator[list[PlacedRow]]:
        """Yield rows in lists of `size`.  Raise ValueError for a file without rows, or with one
        that cannot be read.
        """
        rows = self._saved_rows() if self._is_saved() else self._file_rows()
        while some := [*islice(rows, size)]:
            yield some

    def _file_rows(self) -> Iterator[PlacedRow]:
        for file in self.files():
            row = None
            try:
                for row in PARSERS[file.suffix](file):
                    yield row
            except ValueError as error:
                raise ArgumentError("path", f"{error}.") from error
            if row is None:
                raise ArgumentError("path", f"{file} holds no row.")

    def _saved_rows(self) -> Iterator[PlacedRow]:
        saved = load_saved(str(self.where), self.split)
        if not len(saved):
            raise ArgumentError("path", f"{self.path} holds no row.")
        for number, fields in enumerate(saved, 1):
            yield PlacedRow(f"{self.path}, row {number}", fields)

    def _is_saved(self) -> bool:
        return any(PurePath(name) in self._there for name in _SAVED)

    def files(self) -> list[DataFile]:
        """Return the files that are read; of a saved data set, all.  Raises ArgumentError."""
        files = {name: file for name, file in self._there.items() if name.name != "README.md"}
        if not files:
            raise ArgumentError(
                "path",
                f"there is no file or folder {self.path} with rows.",
                "Of a data set of the hub, datasets.load_dataset(NAME).save_to_disk(FOLDER) writes "
                "one.",
            )
        if self._is_saved():
            return [*files.values()]
        kinds = {name.suffix for name in files}
        if len(kinds) > 1 or not kinds <= PARSERS.keys():
            known, other = ", ".join(PARSERS), ", ".join(sorted(kinds))
            raise ArgumentError(
                "path", f"{self.path}: files must be of one kind, of {known}; these are {other}."
            )
        return self._choose({file: _split_of(name) for name, file in files.items()})

    def _choose(self, splits: dict[DataFile, str | None]) -> list[DataFile]:
        """Return the files of the split.  splits: file -> what its name says."""
        if self.split == ALL:
            return [*splits]
        known = sorted({split for split in splits.values() if split})
        if self.split is None:
            if known and len(set(splits.values())) > 1:
                other = next((file for file, split in splits.items() if split is None), None)
                beside = f" and that of {Path(str(other)).name} none" if other else ""
                one = "train" if "train" in known else known[0]
                raise ArgumentError(
                    "split",
                    f"{self.path}: names of files say the splits {', '.join(known)}{beside}.",
                    f"Write data.split={one}, or data.split={ALL} to read all files.",
                )
            return [*splits]
        wanted = (self.split, _SPLITS.get(self.split, self.split))
        chosen = [file for file, split in splits.items() if split in wanted]
        if not chosen:
            said = f"say {', '.join(known)}" if known else "say none"
            raise ArgumentError(
                "split",
                f"{self.path}: there is no split {self.split!r}; names of files {said}.",
                f"Write data.split={'|'.join((*known, ALL))}, or leave it out.",
            )
        return chosen


def _split_of(file: PurePath) -> str | None:
    """Return the split that a name says, or else those of the folders around it."""
    if shard := _SHARD.fullmatch(file.stem):
        return shard["split"]
    for name in (file.stem, *reversed(file.parts[:-1])):
        for word in re.split(r"[^a-z]+", name.lower()):
            if word in _SPLITS:
                return _SPLITS[word]
    return None


def text_of(fields: Fields, name: str) -> str:
    """Return a field of a row that is text.  Raise ValueError if it is missing, null or no text."""
    return check_text(field_of(fields, name), name)


def field_of(fields: Fields, name: str) -> object:
    """Return a field of a row.  Raise ValueError if it is missing or null."""
    if name not in fields:
        raise ValueError(f"there is no {name!r} in it; it has {', '.join(fields) or 'no field'}")
    if fields[name] is None:
        raise ValueError(f"{name!r} is null")
    return fields[name]


def check_text(value: object, name: str) -> str:
    """Return a value that is text.  Raise ValueError for another one of the field `name`."""
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is not text: {_show(value)}")
    return value


def _show(value: object) -> str:
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 40 else shown[:40] + '…'}"


# ---- parsers: all raise ValueError that names the file and the line or row -----------------------


def _read_lines(file: DataFile) -> Iterator[PlacedRow]:
    """Yield the objects of a file that has one on each line; empty lines are skipped."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            place = f"{file}, line {number}"
            if text := _decode(line, place).strip():
                row = _parse(text, place, "; a row is one object on a line of its own")
                yield PlacedRow(place, _check_object(row, place))


def _read_json(file: DataFile) -> Iterator[PlacedRow]:
    """Yield the objects of a list, which is the whole file, or those of lines."""
    with file.open("rb") as stream:
        start = stream.read(1000).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if start != b"[":
        yield from _read_lines(file)
        return
    with file.open("rb") as stream:
        text = _decode(stream.read(), str(file))
    for number, row in enumerate(_parse(text, str(file)), 1):
        place = f"{file}, row {number}"
        yield PlacedRow(place, _check_object(row, place))


def _decode(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place} is not UTF-8 text: byte {error.start} is {content[error.start]:#x}"
        ) from None


def _parse(text: str, place: str, instead: str = "") -> Any:
    """Return a value of JSON.  place: of the text.  instead: what to write, for errors."""
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):  # two make a character, one alone makes no text
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if error.lineno > 1 else ""
        raise ValueError(
            f"{place}{line}, column {error.colno} is not JSON: {error.msg}{instead}"
        ) from None
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise ValueError(f"{place}: \\u{half:x} alone is half of a character") from None


def _check_object(value: object, place: str) -> Fields:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is not an object {{field: value}}: {_show(value)}")
    return value


def _read_csv(file: DataFile) -> Iterator[PlacedRow]:
    """Yield the rows of a CSV file with a header; all cells are text.

    A row's line is its last one, as a cell may hold several.
    """
    csv.field_size_limit(sys.maxsize)
    with TextIOWrapper(file.open("rb"), encoding="utf-8-sig", newline="") as stream:
        rows = csv.DictReader(stream, strict=True)
        try:
            names = rows.fieldnames or []
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{file} has more than one column {', '.join(twice)}")
            for row in rows:
                place = f"{file}, line {rows.line_num}"
                if None in row or None in row.values():  # too many cells, or too few
                    raise ValueError(f"{place}: a row has a cell for each of {', '.join(names)}")
                yield PlacedRow(place, row)
        except csv.Error as error:
            raise ValueError(f"{file}, line {rows.reader.line_num} is not CSV: {error}") from None
        except UnicodeDecodeError as error:
            line, byte = rows.reader.line_num + 1, error.object[error.start]
            raise ValueError(
                f"{file}, line {line} or later is not UTF-8 text: a byte is {byte:#x}"
            ) from None


def _read_parquet(file: DataFile) -> Iterator[PlacedRow]:
    """Yield the rows of a Parquet file (pip install flowrun[parquet])."""
    import pyarrow

    number = 0
    try:
        with open_parquet(file) as opened:
            for batch in opened.iter_batches(_AT_ONCE):
                for fields in batch.to_pylist():
                    number += 1
                    yield PlacedRow(f"{file}, row {number}", fields)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file} cannot be read after row {number}: {error}") from error


def open_parquet(file: DataFile) -> ParquetFile:
    """Open a Parquet file.  Raises pyarrow's errors."""
    from pyarrow import parquet

    return parquet.ParquetFile(file.open_unbuffered() if isinstance(file, RangedFile) else file)


PARSERS: dict[str, Callable[[DataFile], Iterator[PlacedRow]]] = {  # by suffix
    ".jsonl": _read_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
