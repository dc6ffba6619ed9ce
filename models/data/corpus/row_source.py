"""Rows of jsonl, Parquet and CSV files and of saved Hugging Face data sets, read by `datasets`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# suffix -> the reader of `datasets`
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_SAVED = ("dataset_info.json", "dataset_dict.json")  # what save_to_disk leaves


@dataclass(frozen=True)
class RowSource:
    """Rows on a disk (pip install flowrun[huggingface]).

    path: a file, a folder of files of one kind, or a folder that `datasets` wrote by save_to_disk.
    split: of the latter, if it holds several.
    """

    path: str
    split: str | None = None

    def digest(self) -> str:
        """Return a digest of the bytes of all files, and of the split."""
        hashed = hashlib.sha256(f"{self.split}\n".encode())
        for file in self._files():
            hashed.update(f"{file.suffix} {file.stat().st_size}\n".encode())
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    hashed.update(block)
        return hashed.hexdigest()

    def batches(self, size: int) -> Iterator[list[dict[str, Any]]]:
        """Yield rows in lists of `size`.  Raise ValueError for a split or a kind that is none."""
        for columns in self._open().iter(batch_size=size):
            values = zip(*columns.values(), strict=True)
            yield [dict(zip(columns, row, strict=True)) for row in values]

    def _open(self) -> Any:
        import datasets

        where = Path(self.path).expanduser()
        if not any((where / name).exists() for name in _SAVED):
            files, kinds = self._files(), {READERS.get(file.suffix) for file in self._files()}
            kind = kinds.pop()
            if kinds or kind is None:
                known = ", ".join(READERS)
                raise ValueError(f"{self.path}: files must be of one kind, of {known}")
            return datasets.load_dataset(
                kind, data_files=[*map(str, files)], split="train", streaming=True
            )
        found = datasets.load_from_disk(str(where))
        if isinstance(found, datasets.DatasetDict):
            if self.split not in found:
                known = ", ".join(found)
                raise ValueError(f"{self.path}: split must be one of {known}, not {self.split!r}")
            found = found[self.split]
        return found

    def _files(self) -> list[Path]:
        where = Path(self.path).expanduser()
        files = [where] if where.is_file() else sorted(f for f in where.rglob("*") if f.is_file())
        if not files:
            raise FileNotFoundError(
                f"there is no file or folder {self.path} with rows; of the hub, write one by "
                f"datasets.load_dataset(NAME).save_to_disk(FOLDER)"
            )
        return files


def field_of(row: Mapping[str, Any], name: str) -> Any:
    """Return a field of a row.  Raise ValueError if there is none."""
    if row.get(name) is None:
        raise ValueError(f"there is no {name!r} in it; it has {', '.join(row)}")
    return row[name]
