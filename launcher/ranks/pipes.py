"""A pipe from each rank to its launcher: events as JSON, each after its length.

A rank writes from any of its threads, and waits where the pipe is full.  The launcher reads without
waiting, also what a rank that was killed has left.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator

from flowrun.launcher.ranks.wire import Notice, decode, encode

_LENGTH = struct.Struct(">I")
_PART = 1 << 16


class EventSender:
    """Sends to the launcher what happens on a rank.  Threads may share it."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._writing = threading.Lock()  # a thread that saves sends, too

    def send(self, event: Notice) -> None:
        """Send an event."""
        data = encode(event)
        frame = memoryview(_LENGTH.pack(len(data)) + data)
        with self._writing:
            while frame:
                frame = frame[os.write(self._pipe, frame) :]


class EventReader:
    """The launcher's end of a rank's pipe.  ended: nothing more comes."""

    def __init__(self, pipe: int) -> None:
        self.pipe, self.ended = pipe, False
        self._came = bytearray()
        os.set_blocking(pipe, False)

    def read(self) -> Iterator[Notice]:
        """Yield what has come, of one part of the pipe; it never waits."""
        try:
            part = os.read(self.pipe, _PART)
        except BlockingIOError:
            return
        self.ended = not part
        self._came += part
        at = 0
        while len(self._came) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._came, at)
            end = at + _LENGTH.size + length
            if end > len(self._came):
                break
            yield decode(bytes(self._came[at + _LENGTH.size : end]))
            at = end
        del self._came[:at]

    def drain(self) -> Iterator[Notice]:
        """Yield all that is left, once its rank has ended."""
        while True:
            before = len(self._came)
            events = list(self.read())
            yield from events
            if self.ended or (not events and len(self._came) == before):
                return

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.pipe)
