"""reopen_files: what a forked process reads, at a position of its own.

A file that the data set opened before the fork is one open file for all ranks: each read or seek of
one moves the others.  Here each descriptor gets an open file of its own, at the same place, under
the same number, so that whatever object holds it (a file, a zip archive, an HDF5 library) notices
nothing.  Linux alone; elsewhere nothing changes.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

_OPENED = Path("/proc/self/fd")
_STANDARD = 3  # descriptors below: input, output, errors


def reopen_files() -> None:
    """Reopen regular files that are open for reading, in a process just forked, before it reads."""
    for name in os.listdir(_OPENED) if _OPENED.is_dir() else ():
        if int(name) >= _STANDARD:
            with suppress(OSError):  # closed by now, or no longer readable for this user
                _reopen(int(name))


def _reopen(number: int) -> None:
    flags = fcntl.fcntl(number, fcntl.F_GETFL)
    if flags & os.O_ACCMODE != os.O_RDONLY or not stat.S_ISREG(os.fstat(number).st_mode):
        return
    new = os.open(_OPENED / str(number), os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.lseek(new, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(new, number, os.get_inheritable(number))
    finally:
        os.close(new)
