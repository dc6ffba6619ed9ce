"""Rows of a file, of the files of a folder or of a split, and of saved Hugging Face data sets."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.corpus.find_files import find_visible_files
from flowrun.launcher.data.corpus.row_files import READERS, PlacedRow

_FORM = 2  # of rows; another one is tokenised anew
_SAVED = ("dataset_info.json", "dataset_dict.json")  # what save_to_disk leaves
ALL = "all"  # in place of a split: all files, whatever their names say
_SHARD = re.compile(r"(?P<split>\w+)-\d{5}-of-\d{5}")  # names that the hub writes
# word in the name of a file or of its folder -> split, as `datasets` reads them
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}


@dataclass(frozen=True)
class RowSource:
    """Rows on a disk.

    path: a file, a folder of files of one kind, or a folder that `datasets` wrote by save_to_disk
    (pip install flowrun[huggingface]).
    split: of a saved data set that holds several; of files whose names say their split; or `all`
    of files.
    """

    path: str
    split: str | None = None

    def digest(self) -> str:
        """Return a digest of the bytes of all files that are read, and of the split.  Raise
        ValueError for a split or a kind of file that is none.
        """
        hashed = hashlib.sha256(f"{_FORM} {self.split}\n".encode())
        for file in self._files():
            hashed.update(f"{file.suffix} {file.stat().st_size}\n".encode())
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    hashed.update(block)
        return hashed.hexdigest()

    def batches(self, size: int) -> Iterator[list[PlacedRow]]:
        """Yield rows in lists of `size`.  Raise ValueError for a file without rows, or with one
        that cannot be read.
        """
        rows = self._saved_rows() if self._is_saved() else self._file_rows()
        while some := [*islice(rows, size)]:
            yield some

    def _file_rows(self) -> Iterator[PlacedRow]:
        for file in self._files():
            row = None
            try:
                for row in READERS[file.suffix](file):
                    yield row
            except ValueError as error:
                raise ArgumentError("path", f"{error}.") from error
            if row is None:
                raise ArgumentError("path", f"{file} holds no row.")

    def _saved_rows(self) -> Iterator[PlacedRow]:
        import datasets

        found: Any = datasets.load_from_disk(str(Path(self.path).expanduser()))
        if isinstance(found, datasets.DatasetDict):
            if self.split not in found:
                known = ", ".join(found)
                raise ArgumentError("split", f"it must be one of {known}, not {self.split!r}.")
            found = found[self.split]
        elif self.split not in (None, found.split):
            one = "has no splits" if found.split is None else f"holds the split {found.split} alone"
            raise ArgumentError(
                "split",
                f"{self.path} {one}, so split={self.split} cannot be read.",
                "Leave out data.split.",
            )
        if not len(found):
            raise ArgumentError("path", f"{self.path} holds no row.")
        number = 0
        for columns in found.iter(batch_size=1000):
            for values in zip(*columns.values(), strict=True):
                number += 1
                fields = dict(zip(columns, values, strict=True))
                yield PlacedRow(f"{self.path}, row {number}", fields)

    def _is_saved(self) -> bool:
        return any(Path(self.path).expanduser().joinpath(name).exists() for name in _SAVED)

    def _files(self) -> list[Path]:
        """Return the files that are read; of a saved data set, all."""
        where = Path(self.path).expanduser()
        inside = (file for file in find_visible_files(where) if file.name != "README.md")
        files = [where] if where.is_file() else sorted(inside)
        if not files:
            raise ArgumentError(
                "path",
                f"there is no file or folder {self.path} with rows.",
                "Of a data set of the hub, datasets.load_dataset(NAME).save_to_disk(FOLDER) writes "
                "one.",
            )
        if self._is_saved():
            return files
        kinds = {file.suffix for file in files}
        if len(kinds) > 1 or not kinds <= READERS.keys():
            known, other = ", ".join(READERS), ", ".join(sorted(kinds))
            raise ArgumentError(
                "path", f"{self.path}: files must be of one kind, of {known}; these are {other}."
            )
        root = where.parent if where.is_file() else where
        return self._choose({file: _split_of(file.relative_to(root)) for file in files})

    def _choose(self, splits: dict[Path, str | None]) -> list[Path]:
        """Return the files of the split.  splits: file -> what its name says."""
        if self.split == ALL:
            return [*splits]
        known = sorted({split for split in splits.values() if split})
        if self.split is None:
            if known and len(set(splits.values())) > 1:
                other = next((file for file, split in splits.items() if split is None), None)
                beside = f" and that of {other.name} none" if other else ""
                one = "train" if "train" in known else known[0]
                raise ArgumentError(
                    "split",
                    f"{self.path}: names of files say the splits {', '.join(known)}{beside}.",
                    f"Write data.split={one}, or data.split={ALL} to read all files.",
                )
            return [*splits]
        wanted = (self.split, _SPLITS.get(self.split, self.split))
        found = [file for file, split in splits.items() if split in wanted]
        if not found:
            said = f"say {', '.join(known)}" if known else "say none"
            raise ArgumentError(
                "split",
                f"{self.path}: there is no split {self.split!r}; names of files {said}.",
                f"Write data.split={'|'.join((*known, ALL))}, or leave it out.",
            )
        return found


def _split_of(file: Path) -> str | None:
    """Return the split that a name says, or else those of the folders around it.  file: relative
    to the folder of the rows.
    """
    if shard := _SHARD.fullmatch(file.stem):
        return shard["split"]
    for name in (file.stem, *reversed(file.parts[:-1])):
        for word in re.split(r"[^a-z]+", name.lower()):
            if word in _SPLITS:
                return _SPLITS[word]
    return None
