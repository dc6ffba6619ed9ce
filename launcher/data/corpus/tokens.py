"""Windows of a stream of ids, for models that predict the next id; and token files.

A token file has consecutive ids as 16 or 32 bit numbers: mapped into memory, or read by ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.stacked import Numbers, StackedDataset
from flowrun.launcher.urls.ranged_file import CACHE_BYTES, RangedFile, find_ranged, is_ranged
from flowrun.launcher.urls.url_cache import data_on_disk

DTYPES = ("uint16", "uint32")


@dataclass(frozen=True)
class RangedIds:
    """Ids of a file at a URL.  kind: of an id."""

    file: RangedFile
    kind: np.dtype[np.unsignedinteger]

    def __len__(self) -> int:
        return self.file.size // self.kind.itemsize

    def gather(self, starts: Numbers, count: int) -> NDArray[np.integer]:
        """Return `count` ids from each start, (n, count)."""
        size = self.kind.itemsize
        return self.file.gather((starts * size).tolist(), count * size).view(self.kind)


class Windows(StackedDataset):
    """{tokens (T,), targets (T,)}, int64, targets one id ahead; windows do not overlap.

    stream: ids (N,) of any integer dtype, in memory, mapped or of a URL.  length: T, less than N.
    of: what the ids are and where they come from, for an error.
    """

    def __init__(
        self, stream: NDArray[np.integer] | RangedIds, length: int, of: str = "ids"
    ) -> None:
        if len(stream) <= length:
            problem = f"{len(stream)} {of} do not fill a window of {length} + 1."
            raise ArgumentError("length", problem)
        self.stream, self.length = stream, length

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.length

    def stacked(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the items; both fields are views of the same windows."""
        starts = indices.numpy() * self.length
        if isinstance(self.stream, RangedIds):
            found = self.stream.gather(starts, self.length + 1)
        else:
            every = np.lib.stride_tricks.sliding_window_view(self.stream, self.length + 1)
            found = every[starts]  # of a view: nothing else is read
        windows = torch.from_numpy(found.astype(np.int64))
        return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


class Tokens(Windows):
    """Windows of a token file: {tokens (T,), targets (T,)}, int64, targets one token ahead.

    path: little-endian ids without a header, a file or a URL, which is read by ranges.  length: T;
    windows do not overlap.  dtype: uint16, or uint32 for vocabularies above 65536.  cache_bytes: of
    all that this host keeps of what was read by ranges.
    """

    def __init__(
        self, path: str, length: int = 1024, dtype: str = "uint16", cache_bytes: int = CACHE_BYTES
    ) -> None:
        if dtype not in DTYPES:
            raise ArgumentError("dtype", f"it must be one of {', '.join(DTYPES)}, not {dtype!r}.")
        ranged = find_ranged(path, cache_bytes).get("") if is_ranged(path) else None
        file = Path(path) if ranged else data_on_disk(path)
        if not (ranged or file.is_file()):
            raise ArgumentError("path", f"there is no file {path}.")
        kind = np.dtype(dtype).newbyteorder("<")
        num_bytes = ranged.size if ranged else file.stat().st_size
        if num_bytes % kind.itemsize:
            problem = f"{num_bytes} bytes of {path} are not a whole number of {dtype}."
            raise ArgumentError("dtype", problem)
        ids: NDArray[np.integer] | RangedIds = np.empty(0, kind)
        if num_bytes:
            ids = RangedIds(ranged, kind) if ranged else np.memmap(file, dtype=kind, mode="r")
        super().__init__(ids, length, f"tokens of {path}")


def write_tokens(path: str | Path, pieces: Iterable[Sequence[int]], dtype: str = "uint16") -> int:
    """Write a token file of uint16 or uint32, or an object of a URL; return the number of tokens.

    Raise ValueError for an id that does not fit.
    """
    import fsspec

    largest, total = np.iinfo(dtype).max, 0
    with fsspec.open(str(path), "wb") as file:
        for piece in pieces:
            ids = np.asarray(piece, dtype=np.int64)
            if ids.size and not 0 <= ids.min() <= ids.max() <= largest:
                raise ValueError(f"an id of {ids.min()} to {ids.max()} does not fit {dtype}")
            file.write(ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
            total += ids.size
    return total


def tokenise(
    files: Iterable[str | Path],
    path: str | Path,
    encode: Callable[[str], Sequence[int]],
    end: int | None = None,
    dtype: str = "uint16",
) -> int:
    """Write the tokens of text files to a token file; return their number.

    encode: text -> ids, such as a tokenizer's `encode`.  end: an id that follows each file; None:
    none.  Raise ValueError for an id that does not fit.
    """
    tail = [] if end is None else [end]
    texts = (Path(file).read_text(encoding="utf-8") for file in files)
    return write_tokens(path, ([*encode(text), *tail] for text in texts), dtype)
