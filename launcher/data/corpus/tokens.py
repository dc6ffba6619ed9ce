"""Token files: consecutive ids as 16 or 32 bit numbers, mapped into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.corpus.windows import Windows
from flowrun.launcher.urls.url_cache import data_on_disk

DTYPES = ("uint16", "uint32")


class Tokens(Windows):
    """Windows of a token file: {tokens (T,), targets (T,)}, int64, targets one token ahead.

    path: little-endian ids without a header, a file or a URL.  length: T; windows do not overlap.
    dtype: uint16, or uint32 for vocabularies above 65536.
    """

    def __init__(self, path: str, length: int = 1024, dtype: str = "uint16") -> None:
        if dtype not in DTYPES:
            raise ArgumentError("dtype", f"it must be one of {', '.join(DTYPES)}, not {dtype!r}.")
        file = data_on_disk(path)
        if not file.is_file():
            raise ArgumentError("path", f"there is no file {path}.")
        kind, num_bytes = np.dtype(dtype).newbyteorder("<"), file.stat().st_size
        if num_bytes % kind.itemsize:
            problem = f"{num_bytes} bytes of {path} are not a whole number of {dtype}."
            raise ArgumentError("dtype", problem)
        ids = np.memmap(file, dtype=kind, mode="r") if num_bytes else np.empty(0, kind)
        super().__init__(ids, length, f"tokens of {path}")


def write_tokens(path: str | Path, pieces: Iterable[Sequence[int]], dtype: str = "uint16") -> int:
    """Write a token file of uint16 or uint32; return the number of tokens.

    Raise ValueError for an id that does not fit.
    """
    largest, total = np.iinfo(dtype).max, 0
    with Path(path).open("wb") as file:
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
