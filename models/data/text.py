"""Text as bytes: any file or folder, by default the Python standard library's own source."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class Text(Dataset[dict[str, Tensor]]):
    """Windows of a byte stream: {tokens (T,), targets (T,)}, int64 below 256, targets one byte
    ahead.

    path: a file, or a folder whose files are read in sorted order; None: the Python standard
    library's own .py files.
    length: T; windows do not overlap.  max_bytes: of the stream.
    """

    def __init__(
        self, path: str | None = None, length: int = 64, max_bytes: int = 8_000_000
    ) -> None:
        stream = b"".join(_capped(_files(path), max_bytes))
        self.length = length
        self.stream = np.frombuffer(stream, dtype=np.uint8)
        if len(self) < 1:
            raise ValueError(f"{path}: {len(stream)} bytes do not fill a window of {length} + 1")

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self.length
        window = torch.from_numpy(self.stream[start : start + self.length + 1].astype(np.int64))
        return {"tokens": window[:-1], "targets": window[1:]}


def _files(path: str | None) -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"] if path is None else path).expanduser()
    if path is None:
        others = {"site-packages", "dist-packages", "__pycache__"}
        return sorted(f for f in root.rglob("*.py") if others.isdisjoint(f.parts))
    if root.is_dir():
        return sorted(f for f in root.rglob("*") if f.is_file())
    if not root.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    return [root]


def _capped(files: list[Path], max_bytes: int) -> Iterator[bytes]:
    """Contents of the files until max_bytes are read."""
    left = max_bytes
    for file in files:
        if left <= 0:
            return
        with file.open("rb") as stream:
            piece = stream.read(left)
        left -= len(piece)
        yield piece
