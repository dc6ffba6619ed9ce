"""launch.monitor: a process of its own answers questions about the run.

The process (commands/run_folders/answer.py) reads the run's folder alone, so that the launcher has
no thread for it, and a run that is stuck cannot hold up an answer.  It begins before the plan is
made, outlives restarts of ranks, and ends when the launcher and its ranks do, however they end: it
reads a pipe whose other end they have.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flowrun.engine.errors import RecipeError
from flowrun.launcher.recipe.schema import Launch, monitor_address
from flowrun.launcher.report.progress import Progress
from flowrun.launcher.supervise.hosts.endpoint import Endpoint, listen

_ANSWERS = "flowrun.launcher.commands.run_folders.answer"


@contextmanager
def monitoring(launch: Launch, folder: Path, progress: Progress | None) -> Iterator[None]:
    """Have questions about a run answered within the block, if its recipe says where.

    Raises RecipeError for one that cannot be had.
    """
    address = monitor_address(launch)
    if address is None:
        yield
        return
    with _listen(address, launch) as listening:
        place = f"unix:{address}"
        if not isinstance(address, str):
            place = f"http://{Endpoint(address[0], listening.getsockname()[1])}"
        number = listening.fileno()
        command = [sys.executable, "-m", _ANSWERS, str(folder.absolute()), str(number)]
        answering = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[number], start_new_session=True
        )
    if progress:
        progress.console.print(f"{place}/metrics and /healthz describe this run", style="dim")
    try:
        yield
    finally:
        answering.terminate()
        answering.communicate()
        if isinstance(address, str):
            Path(address).unlink(missing_ok=True)


def _listen(address: tuple[str, int] | str, launch: Launch) -> socket.socket:
    try:
        return _listen_at(Path(address)) if isinstance(address, str) else listen(*address)
    except OSError as error:
        raise RecipeError(
            "launch.monitor",
            f"nothing can listen at {launch.monitor}: {error.strerror or error}.",
            "Write another address, or port 0, for any that is free.",
        ) from None


def _listen_at(path: Path) -> socket.socket:
    """Listen at a path that this user alone may open; one that a killed run has left is free."""
    asking = socket.socket(socket.AF_UNIX)
    with asking, suppress(ConnectionRefusedError, FileNotFoundError):
        asking.connect(str(path))
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    if path.is_socket():
        path.unlink()
    found = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        found.bind(str(path))
    finally:
        os.umask(before)
    found.listen()
    return found
