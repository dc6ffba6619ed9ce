"""Columns of Parquet files as tensors, read by row groups, from a disk or a URL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.corpus.row_source import DataFile, RowSource, open_parquet
from flowrun.launcher.data.huggingface import choose_fields
from flowrun.launcher.data.stacked import Numbers, StackedDataset
from flowrun.launcher.urls.object_store import each
from flowrun.launcher.urls.ranged_file import CACHE_BYTES, RangedFile

if TYPE_CHECKING:
    from pyarrow import ChunkedArray
    from pyarrow.parquet import FileMetaData

_FOOTER_BYTES = 1 << 16  # of a file, fetched to see what it holds
RowGroup = Mapping[str, NDArray[np.generic]]  # column -> its values, (rows, …)


class ParquetRows(StackedDataset):
    """Columns of Parquet files as tensors (pip install flowrun[parquet]).

    path: a .parquet file, a folder of them, or a URL of one of these.  split: see RowSource.
    fields: field of the batch -> column; None: every column under its own name.  Columns hold
    numbers, or nested lists of numbers with the same lengths in all rows.  cache_bytes: of all that
    this host keeps of URLs.  held_bytes: of the row groups that a process keeps in memory, decoded;
    at least one.
    """

    def __init__(
        self,
        path: str,
        split: str | None = None,
        fields: Mapping[str, str] | None = None,
        cache_bytes: int = CACHE_BYTES,
        held_bytes: int = 1 << 28,
    ) -> None:
        files = RowSource(path, split, cache_bytes).files()
        footers = each(_read_footer, files)
        first, *others = [footer.schema.to_arrow_schema() for footer in footers]
        self.fields = choose_fields(fields, first.names, path)
        for file, schema in zip(files[1:], others, strict=True):
            for name in self.fields.values():
                if name not in schema.names or schema.field(name).type != first.field(name).type:
                    problem = f"{file} has no column {name!r} of {first.field(name).type}."
                    raise ArgumentError("path", problem, f"{files[0]} has one.")
        every = [*zip(files, footers, strict=True)]
        self.groups = [(file, k) for file, footer in every for k in range(footer.num_row_groups)]
        counts = [f.row_group(k).num_rows for _, f in every for k in range(f.num_row_groups)]
        self.starts: Numbers = np.cumsum([0, *counts])
        self.held_bytes = held_bytes
        self._held: dict[int, RowGroup] = {}  # the newest last
        self._lock = Lock()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def stacked(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the items; each row group of theirs is read once."""
        chosen = indices.numpy()
        groups = np.searchsorted(self.starts, chosen, side="right") - 1
        out: dict[str, NDArray[np.generic]] = {}
        for number in np.unique(groups).tolist():
            here = groups == number
            for column, values in self._group(number).items():
                found = values[chosen[here] - self.starts[number]]
                whole = out.setdefault(
                    column, np.empty((len(chosen), *found.shape[1:]), found.dtype)
                )
                whole[here] = found
        return {field: torch.from_numpy(out[column]) for field, column in self.fields.items()}

    def _group(self, number: int) -> RowGroup:
        with self._lock:
            group = self._held.pop(number, None) or self._read(*self.groups[number])
            self._held[number] = group  # as the newest
            while len(self._held) > 1 and _size(self._held.values()) > self.held_bytes:
                del self._held[next(iter(self._held))]
            return group

    def _read(self, file: DataFile, number: int) -> RowGroup:
        with open_parquet(file) as opened:
            table = opened.read_row_group(number, [*self.fields.values()], use_threads=False)
        try:
            return {name: _values(table.column(name)) for name in table.column_names}
        except ValueError as error:
            raise ValueError(f"{file}, row group {number}: {error}") from error


def _read_footer(file: DataFile) -> FileMetaData:
    """Return what a file holds.  Raises ArgumentError if it is not a Parquet file."""
    import pyarrow

    small = replace(file, block_bytes=_FOOTER_BYTES) if isinstance(file, RangedFile) else file
    try:
        with open_parquet(small) as opened:
            return opened.metadata
    except pyarrow.ArrowException as error:
        raise ArgumentError("path", f"{file} cannot be read: {error}.") from error


def _values(column: ChunkedArray) -> NDArray[np.generic]:
    """Return a column as int64, float32 or bool.  Raises ValueError for text, null and lists of
    different lengths.
    """
    from pyarrow import compute, types

    array, shape = column.combine_chunks(), [len(column)]
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    while any(is_kind(array.type) for is_kind in lists) and not array.null_count:
        lengths = compute.unique(compute.list_value_length(array)).to_pylist()
        if len(lengths) > 1:
            raise ValueError(f"lists of column have lengths {lengths}")
        shape, array = [*shape, *lengths], array.flatten()
    values = array.to_numpy(zero_copy_only=False)
    if array.null_count or values.dtype.kind not in "biuf":
        raise ValueError(f"{array.type} with {array.null_count} nulls makes no column of numbers")
    kind = {"b": np.bool_, "f": np.float32}.get(values.dtype.kind, np.int64)
    numbers: NDArray[np.generic] = values.astype(kind).reshape(shape)
    return numbers


def _size(groups: Iterable[RowGroup]) -> int:
    return sum(values.nbytes for group in groups for values in group.values())
