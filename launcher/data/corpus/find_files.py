"""The files of a text, or of rows: those that a person sees in a folder."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from flowrun.engine.errors import ArgumentError


def find_text_files(path: str | None) -> list[Path]:
    """Return a file, or the visible files of a folder, sorted; None: those of Python's standard
    library.  Raise ArgumentError for a path that is not there.
    """
    if path is None:
        return sorted(_find_standard_library())
    root = Path(path).expanduser()
    if root.is_dir():
        return sorted(find_visible_files(root))
    if not root.exists():
        raise ArgumentError("path", f"there is no file or folder {path}.")
    return [root]


def find_visible_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of those in it, without hidden ones and `__pycache__`."""
    for file in folder.rglob("*"):
        parts = file.relative_to(folder).parts
        if file.is_file() and not any(p.startswith(".") or p == "__pycache__" for p in parts):
            yield file


def _find_standard_library() -> Iterator[Path]:
    """Yield Python's own source files, without those of installed packages."""
    others = {"site-packages", "dist-packages", "__pycache__"}
    for folder, inner, files in os.walk(sysconfig.get_paths()["stdlib"]):
        inner[:] = [name for name in inner if name not in others]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))
