"""Text as bytes: any file or folder, by default the Python standard library's own source."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flowrun.models.data.windows import Windows


class Text(Windows):
    """Windows of a byte stream: {tokens (T,), targets (T,)}, int64 below 256, targets one byte
    ahead.

    path: a file, or a folder whose files are read in sorted order; None: the Python standard
    library's own .py files.
    length: T; windows do not overlap.  max_bytes: bytes of the stream that are read.
    """

    def __init__(
        self, path: str | None = None, length: int = 64, max_bytes: int = 8_000_000
    ) -> None:
        stream = b"".join(_read_bytes(_files(path), max_bytes))
        if len(stream) <= length:
            raise ValueError(f"{path}: {len(stream)} bytes do not fill a window of {length} + 1")
        self.stream = np.frombuffer(stream, dtype=np.uint8)
        super().__init__(self.stream, length)


def _files(path: str | None) -> list[Path]:
    if path is None:
        return sorted(_standard_library())
    root = Path(path).expanduser()
    if root.is_dir():
        return sorted(f for f in root.rglob("*") if f.is_file())
    if not root.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    return [root]


def _standard_library() -> Iterator[Path]:
    """Yield Python's own source files, without those of installed packages."""
    others = {"site-packages", "dist-packages", "__pycache__"}
    for folder, inner, files in os.walk(sysconfig.get_paths()["stdlib"]):
        inner[:] = [name for name in inner if name not in others]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _read_bytes(files: list[Path], max_bytes: int) -> Iterator[bytes]:
    """Yield the contents of files until max_bytes are read."""
    left = max_bytes
    for file in files:
        if left <= 0:
            return
        with file.open("rb") as stream:
            piece = stream.read(left)
        left -= len(piece)
        yield piece
