"""Objects of URLs, read by ranges: data that is larger than memory and disk.

Blocks are kept in a folder of the user's cache that all processes of a host share.  fsspec's own
caches keep whole files (filecache), have no bound and one writer (blockcache), or are memory of
one process (readahead and others).
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowrun.engine.errors import RunError
from flowrun.engine.ir.files import replace_bytes
from flowrun.engine.ir.own_files import drop_unused
from flowrun.launcher.urls.object_store import ObjectStore, is_url, nothing_at
from flowrun.launcher.urls.url_cache import HUB, own_cache, refusing_path

BLOCK_BYTES = 1 << 22
CACHE_BYTES = 64_000_000_000  # what blocks may have on a disk; the longest unused go first
_AT_ONCE = 16  # blocks that are fetched together, and what a reader holds of them in memory
_FOLDER = "blocks"  # of flowrun's cache
_TAGS = ("ETag", "etag", "mtime")  # of an object's content, of which a store says one
BlockBytes = NDArray[np.uint8]


@dataclass(frozen=True)
class RangedFile:
    """An object of a store, read as a file is; forked processes and threads may share it.

    url: of the object.  size: bytes.  tag: another one is another content.  cache_bytes: of all
    blocks on the disk; 0: none is kept.  block_bytes: of what is fetched and kept at a time.
    """

    url: str
    size: int
    tag: str
    cache_bytes: int = CACHE_BYTES
    block_bytes: int = BLOCK_BYTES

    def __str__(self) -> str:
        return self.url

    @property
    def suffix(self) -> str:
        """The end of its name, such as .parquet."""
        return PurePosixPath(self.url).suffix

    def digest(self) -> str:
        """Return a digest that is another one if the content is, as far as the store says."""
        return hashlib.sha256(f"{self.url} {self.size} {self.tag}".encode()).hexdigest()

    def open(self, _mode: str = "rb") -> io.BufferedReader:
        """Open it as a binary file, which is read some blocks ahead."""
        return io.BufferedReader(self.open_unbuffered(), _AT_ONCE // 4 * BLOCK_BYTES)

    def open_unbuffered(self) -> Any:
        """Open it as a binary file of which a read fetches no more than its blocks."""
        from fsspec.spec import AbstractBufferedFile

        class Opened(AbstractBufferedFile):
            def _fetch_range(self, start: int, end: int) -> bytes:
                return bytes(self.fs.gather([start], min(end, self.size) - start))

        return Opened(self, self.url, cache_type="none", size=self.size)

    def gather(self, starts: Sequence[int], length: int) -> BlockBytes:
        """Return `length` bytes from each start, (n, length).  Raises StoreError, and RunError for
        an object that has changed.
        """
        rows: dict[int, list[int]] = {}
        for row, start in enumerate(starts):
            last = (start + length - 1) // self.block_bytes
            for number in range(start // self.block_bytes, last + 1):
                rows.setdefault(number, []).append(row)
        numbers, out = sorted(rows), np.empty((len(starts), length), np.uint8)
        for first in range(0, len(numbers), _AT_ONCE):
            for number, block in self._blocks(numbers[first : first + _AT_ONCE]).items():
                begin = number * self.block_bytes
                for row in rows[number]:
                    start = max(starts[row], begin)
                    stop = min(starts[row] + length, begin + len(block))
                    out[row, start - starts[row] : stop - starts[row]] = block[
                        start - begin : stop - begin
                    ]
        return out

    def _blocks(self, numbers: Sequence[int]) -> dict[int, BlockBytes]:
        """Return blocks, of the cache or fetched at once and kept there."""
        stem, folder = f"{self.digest()[:32]}-{self.block_bytes}", own_cache() / _FOLDER
        files = {number: folder / f"{stem}-{number}" for number in numbers}
        there = {n: b for n in numbers if (b := _map(files[n], self._size_of(n))) is not None}
        if missing := [number for number in numbers if number not in there]:
            got = dict(zip(missing, self._fetch(missing), strict=True))
            kept = missing[: self.cache_bytes // self.block_bytes]
            _keep({files[number]: got[number] for number in kept}, folder, self.cache_bytes)
            there |= {number: np.frombuffer(content, np.uint8) for number, content in got.items()}
        return there

    def _size_of(self, number: int) -> int:
        return min(self.block_bytes, self.size - number * self.block_bytes)

    def _fetch(self, numbers: Sequence[int]) -> list[bytes]:
        store = ObjectStore.connect(self.url, "path")  # one of this process, which may be a fork
        starts = [number * self.block_bytes for number in numbers]
        sizes = [self._size_of(number) for number in numbers]
        got = store.read_ranges(starts, [a + b for a, b in zip(starts, sizes, strict=True)])
        there = tag_of(store.find().get("", {}))
        if there != self.tag or [len(content) for content in got] != sizes:
            instead = "Start the run again: it reads what is there then."
            raise RunError(self.url, "the object has changed since the run began.", instead)
        return got


def is_ranged(path: str) -> bool:
    """Return True for a URL that find_ranged reads; what the hub has is in a cache of its own."""
    return is_url(path) and not path.startswith(HUB)


def find_ranged(path: str, cache_bytes: int = CACHE_BYTES) -> dict[str, RangedFile]:
    """Return the object at a URL, named "", or all in the folder there, by name.  Raises
    ArgumentError for `path`, and where there is none.
    """
    with refusing_path():
        store = ObjectStore.connect(path, "path")
        with store.refusing("path"):
            found = store.find()
        if not found:
            raise nothing_at(path, "path")
    url = path.rstrip("/")
    return {
        name: RangedFile(
            f"{url}/{name}" if name else url, int(str(about["size"])), tag_of(about), cache_bytes
        )
        for name, about in sorted(found.items())
    }


def tag_of(about: Mapping[str, object]) -> str:
    """Return what a store says of an object's content, or else all that it says of it."""
    return next((str(about[name]) for name in _TAGS if name in about), str(about))


def _map(file: Path, size: int) -> BlockBytes | None:
    """Return a block of the cache, which is in use from now on; None: it is not there, whole."""
    try:
        os.utime(file)
        block = np.memmap(file, np.uint8, "r")
    except (OSError, ValueError):  # ValueError: it is empty
        return None
    return block if len(block) == size else None


def _keep(blocks: Mapping[Path, bytes], folder: Path, most_bytes: int) -> None:
    """Write blocks, once those that are the longest unused have made room for them."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new = {f: content for f, content in blocks.items() if _map(f, len(content)) is None}
        drop_unused(folder, "*-*", most_bytes - sum(map(len, new.values())))
        for file, content in new.items():
            replace_bytes(file, content)
