"""Messages: frozen dataclasses that go to JSON and come back, checked field by field; a pipe from
each rank to its launcher carries them.

Every event of a run and every word between launchers is one.  `decode` makes an object only of a
frame whose fields all have the types that its class says, so that nothing of a frame that makes no
sense reaches a state.
"""

from __future__ import annotations

import json
import os
import threading
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Union, dataclass_transform, get_args, get_origin, get_type_hints

KIND = "is"  # the field that names the class
_KINDS: dict[str, type] = {}


@dataclass_transform(frozen_default=True)
class Notice:
    """A message: each subclass is a frozen dataclass, registered by its name."""

    def __init_subclass__(cls) -> None:
        assert cls.__name__ not in _KINDS, f"two messages are called {cls.__name__}"
        dataclass(frozen=True)(cls)
        _KINDS[cls.__name__] = cls


def encode(sent: Notice) -> bytes:
    """Return the JSON of a message."""
    return json.dumps(_write(sent), separators=(",", ":")).encode()


def decode(data: bytes | bytearray | str) -> Notice:
    """Return the message of some JSON.  Raises ValueError for anything else."""
    try:
        found = _read_message(json.loads(data))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    assert isinstance(found, Notice)
    return found


def _write(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        written = {each.name: _write(getattr(value, each.name)) for each in fields(value)}
        named = type(value).__name__
        return {KIND: named, **written} if named in _KINDS else written
    if isinstance(value, Mapping):
        return {str(key): _write(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_write(each) for each in value]
    return value


def _read_message(value: Any) -> Any:
    if not isinstance(value, dict) or value.get(KIND) not in _KINDS:
        raise ValueError("it is no message")
    kind = _KINDS[value[KIND]]
    return _read_fields(kind, {name: each for name, each in value.items() if name != KIND})


def _read_fields(kind: type, given: Mapping[str, Any]) -> Any:
    hints = _hints(kind)
    if given.keys() != hints.keys():
        differ = ", ".join(sorted(given.keys() ^ hints.keys()))
        raise ValueError(f"{kind.__name__} has other fields: {differ}")
    return kind(**{name: _read(hints[name], each) for name, each in given.items()})


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}  # type: ignore[arg-type]


def _read(hint: Any, value: Any) -> Any:
    """Return a value of JSON as its hint says.  Raises ValueError where it is something else."""
    if hint is object or (hint in (int, str, bool) and type(value) is hint):
        return value
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint is Notice:
        return _read_message(value)
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return _read_fields(hint, value)
    return _read_generic(hint, get_args(hint), value)


def _read_generic(hint: Any, inner: tuple[Any, ...], value: Any) -> Any:
    """Return a value as X | None, tuple[X, ...] or Mapping[str, X] says."""
    origin = get_origin(hint)
    if origin in (types.UnionType, Union):
        return None if value is None else _read(inner[0], value)
    if origin is tuple and isinstance(value, list):
        kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return tuple(_read(kind, each) for kind, each in zip(kinds, value, strict=True))
    if origin is Mapping and isinstance(value, dict):
        return {_read(inner[0], key): _read(inner[1], each) for key, each in value.items()}
    raise ValueError(f"{str(value)[:40]!r} is not of the type {hint}")


_PART = 1 << 16
_END = b"\n"  # of an event: JSON has no line break inside of its text


class EventSender:
    """Sends to the launcher what happens on a rank, an event a line.

    Threads may share it; it waits where the pipe is full.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._writing = threading.Lock()  # a thread that saves sends, too

    def send(self, event: Notice) -> None:
        """Send an event."""
        frame = memoryview(encode(event) + _END)
        with self._writing:
            while frame:
                frame = frame[os.write(self._pipe, frame) :]


class EventReader:
    """The launcher's end of a rank's pipe, also of one that was killed.

    ended: nothing more comes.
    """

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
        if _END in part:
            *lines, self._came = self._came.split(_END)
            yield from map(decode, lines)

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
