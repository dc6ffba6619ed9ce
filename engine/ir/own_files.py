"""own_files: what is kept between runs, in files of the user's own.

A file begins with the sha256 of the rest, which is looked at before anything is read; nobody else
may own it or write to it, nor to its folder.
"""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

from flowrun.engine.ir.files import remove, replacing

_CHECKSUM_BYTES = hashlib.sha256().digest_size


class Unusable(Exception):
    """A file or a folder that is not read; the message says why."""


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/flowrun or ~/.cache/flowrun, which may not be there."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowrun"


def own_folder(where: Path) -> Path:
    """Return the folder, made if need be.  Raises Unusable if others can write into it."""
    where.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_own(where, os.stat(where))
    return where


def _check_own(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise Unusable(f"{path} belongs to another user (uid {status.st_uid})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unusable(f"others may write to {path} (mode {stat.S_IMODE(status.st_mode):o})")


def read_own(file: Path) -> bytes:
    """Return what write_own wrote.  Raises Unusable if it was changed, OSError if it is missing."""
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as opened:
        _check_own(file, os.fstat(opened.fileno()))
        checksum, content = opened.read(_CHECKSUM_BYTES), opened.read()
    if hashlib.sha256(content).digest() != checksum:
        raise Unusable(f"{file} is broken: its checksum does not fit")
    return content


def write_own(file: Path, content: bytes) -> None:
    """All of it or nothing."""
    with replacing(file, 0o600) as opened:
        opened.write(hashlib.sha256(content).digest() + content)


def drop_unused(folder: Path, pattern: str, most_bytes: int, kept: int = 0) -> None:
    """Remove the longest unused of what a folder has until the rest has `most_bytes`: files, or
    folders of files.

    kept: this number of the newest stay, whatever they have.
    """
    total = 0
    for k, each in enumerate(sorted(folder.glob(pattern), key=_last_use, reverse=True)):
        with suppress(OSError):  # another process is at it
            total += sum(file.stat().st_size for file in (each, *each.rglob("*")) if file.is_file())
        if k >= kept and total > most_bytes:
            with suppress(OSError):
                remove(each)


def _last_use(path: Path) -> int:
    """Return when a path was used last, in ns; 0 if another process has removed it."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
