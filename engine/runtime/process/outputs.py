"""Show what forked processes print as it comes, and keep it in a log of each.

A process prints into pipes that its parent reads.  So a screen or a disk that takes nothing more
ends no process, and what a process printed before it was killed is kept.
"""

from __future__ import annotations

import codecs
import ctypes
import faulthandler
import io
import os
import selectors
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from flowrun.engine.ir.files import open_more

_STREAMS = ("stdout", "stderr")  # descriptors 1 and 2
_CHUNK = 1 << 16
_LINE_BUFFERED = 1  # _IOLBF of setvbuf(3)


class TextStream(Protocol):
    """Takes text, such as a file does."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...


class ProcessOutputs:
    """The outputs of processes of one host: made before they are forked, and entered by each.

    Within its block a thread of the parent reads them; the block is left when the processes have
    ended, and then all that they printed is shown and written.
    """

    def __init__(
        self,
        logs: Sequence[Path],
        screens: tuple[TextStream, TextStream],
        lose: Callable[[str], None],
    ) -> None:
        """logs: files to append to, one for each process; their folder is made.

        screens: take what goes to standard output and error of any process.  lose: takes the reason
        why a log is written no further.
        """
        self._logs = [_LogFile(path, lose) for path in logs]
        self._screens = [_Screen(screen) for screen in screens]
        # of each process: output, errors, and what its log alone has
        self._pipes = [[os.pipe() for _ in range(3)] for _ in logs]
        self._end = os.pipe()
        self._thread = threading.Thread(target=self._read, name="outputs", daemon=True)
        self._log_file: IO[str] = io.StringIO()  # of this process, once it has entered

    def __enter__(self) -> ProcessOutputs:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._end[1])  # not the pipes': a process that a rank left behind may hold those
        self._thread.join()
        os.close(self._end[0])
        for end in [end for pipe in self._all_pipes() for end in pipe]:
            os.close(end)
        for log in self._logs:
            log.close()

    def enter(self, index: int) -> None:
        """Let this process, just forked, print into its pipes: number `index`.

        Where Python crashes, its stacks go to the log.
        """
        *printed, log = [os.dup(writer) for _, writer in self._pipes[index]]
        for reader, writer in [self._end, *self._all_pipes()]:
            os.close(reader)
            os.close(writer)
        for number, (name, writer) in enumerate(zip(_STREAMS, printed, strict=True), 1):
            _redirect(number, name, writer)
            os.close(writer)
        if sys.platform == "linux":  # else a C library keeps its lines until a regular exit
            libc = ctypes.CDLL(None)
            libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _LINE_BUFFERED, 0)
        self._log_file = open(log, "w", errors="backslashreplace")  # noqa: SIM115
        faulthandler.enable(self._log_file)

    def write_log(self, text: str) -> None:
        """Write something to the log of this process that is not shown."""
        with suppress(OSError):
            self._log_file.write(text)
            self._log_file.flush()

    def _all_pipes(self) -> list[tuple[int, int]]:
        return [pipe for pipes in self._pipes for pipe in pipes]

    def _read(self) -> None:
        """Read what processes print, until they have ended and nothing is left."""
        with selectors.DefaultSelector() as ready:
            for log, pipes in zip(self._logs, self._pipes, strict=True):
                for (reader, _), screen in zip(pipes, [*self._screens, None], strict=True):
                    ready.register(reader, selectors.EVENT_READ, (log, screen))
            ready.register(self._end[0], selectors.EVENT_READ)
            while True:
                printed = [key for key, _ in ready.select() if key.data]
                for key in printed:
                    log, screen = key.data
                    text = os.read(key.fd, _CHUNK)
                    log.write(text)
                    if screen:
                        screen.write(text)
                if not printed:
                    return


class _LogFile:
    """A file that bytes are appended to, as long as it takes them."""

    def __init__(self, path: Path, lose: Callable[[str], None]) -> None:
        self._path, self._lose, self._lost = path, lose, False
        self._file: io.FileIO | None = None

    def write(self, text: bytes) -> None:
        if self._lost:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(exist_ok=True)
                self._file = io.FileIO(open_more(self._path), "a")
                if self._file.tell():
                    self._file.write(b"\n")
            while text:
                text = text[self._file.write(text) or 0 :]
        except OSError as error:
            self._lost = True
            self._lose(f"{self._path} is written no further: {error.strerror or error}")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _Screen:
    """A stream of text that takes bytes, with what it cannot show replaced."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, printed: bytes) -> None:
        text = self._decoder.decode(printed)
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self._stream.flush()


def _redirect(number: int, name: str, writer: int) -> None:
    """Make a standard stream of this process write to a pipe; objects that hold the stream, such as
    handlers of logging, are unaware of it.
    """
    os.dup2(writer, number)
    stream: object = getattr(sys, name)
    if isinstance(stream, io.TextIOWrapper):
        if stream.fileno() != number:
            os.dup2(writer, stream.fileno())
        stream.reconfigure(line_buffering=True)
    else:  # of a notebook, or a text in memory
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115
