"""files: how a file is written in a folder that others can touch.

A file is whole or absent, whenever a process or a host ends: it is written under another name, is
on the disk, and only then takes its own.  A new name is made exclusively and no link at a name is
followed, as somebody else may have put it there.  An OSError names the file.

What is read back has a digest of its own: own_files.py (caches), a checkpoint's checkpoint.json.
"""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

# what reading values of damaged JSON raises: of another kind, without end, or in many brackets
DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
PARTIAL = ".partial"  # ends the name of what is not complete yet
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MORE = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_NUMBERS = itertools.count()


@contextmanager
def name_file(file: Path) -> Iterator[None]:
    """Give an OSError within the name of a file, if it has none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error


def make(file: Path, mode: int = 0o666) -> int:
    """Make an empty file and return its descriptor, for writing.

    What has the name goes first, a link too; what it links to stays.  mode: before the umask.
    Raises OSError.
    """
    file.unlink(missing_ok=True)
    return os.open(file, _NEW, mode)


def open_again(file: Path) -> int:
    """Return a descriptor for writing of a file that is there and no link.  Raises OSError."""
    return os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def open_more(file: Path) -> int:
    """Return a descriptor that appends to a file, which may be new.  Raises OSError for a link."""
    return os.open(file, _MORE, 0o666)


@contextmanager
def replacing(file: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a file under another name, which is on the disk and has the name `file` at the end.

    Several processes and threads may replace one file: the last one's stays.  An error within
    leaves what was there.  mode: before the umask.  Raises OSError.
    """
    partial = file.with_name(_partial_name(file))
    with name_file(file):
        handle = make(partial, mode)
        try:
            with open(handle, "wb") as opened:
                yield opened
                opened.flush()
                os.fsync(opened.fileno())
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)  # there only after an error


def replace_bytes(file: Path, content: bytes) -> None:
    """Write a file that is whole, old or new, whenever the process ends.  Raises OSError."""
    with replacing(file) as opened:
        opened.write(content)


def replace_text(file: Path, text: str) -> None:
    """Write UTF-8 as replace_bytes does."""
    replace_bytes(file, text.encode())


@contextmanager
def replacing_files(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, whose files replace those of `folder` at the end.

    For libraries that write files by names of their own, and follow links.  Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prefix = f".{platform.node()}-{os.getpid()}-"  # as drop_partial has it
    with name_file(folder), tempfile.TemporaryDirectory(PARTIAL, prefix, folder) as made:
        yield Path(made)
        for file in sorted(Path(made).iterdir()):
            sync(file)
            file.replace(folder / file.name)
        sync(folder)


@contextmanager
def making_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder under another name, which is on the disk and is `folder` at the end.

    Where another process was first, its folder stays.  An error within leaves nothing.  Raises
    OSError.
    """
    partial = folder.with_name(_partial_name(folder))
    partial.mkdir()
    try:
        yield partial
        for file in partial.iterdir():
            sync(file)
        sync(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _partial_name(path: Path) -> str:
    """Return a name that this process alone uses, and once."""
    return f"{path.name}.{platform.node()}-{os.getpid()}-{next(_NUMBERS)}{PARTIAL}"


def drop_partial(folder: Path) -> None:
    """Remove what processes of this host that have ended were making in a folder."""
    for left in folder.glob(f"*.{platform.node()}-*-*{PARTIAL}"):
        process = left.name.removesuffix(PARTIAL).split("-")[-2]
        if process.isdecimal() and not is_running(int(process)):
            remove(left)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def is_running(process: int) -> bool:
    """Return True for a process of this host that has not ended, of any user."""
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True
