"""digest: a graph, a strategy, anything made of plain values -> text that is equal only where all
of it is equal.

A frozen dataclass counts by every field that it is made with, those that `==` leaves out too, so
that a new field can't be forgotten.  What may hide something (a function, a module, an object of
any other class) is refused: nothing counts by its name.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class Undigested(Exception):
    """A value has parts that Python does not show.  Its text names the class."""


def digest(*values: Any) -> str:
    """Sha256, in hex.  Raises Undigested."""
    words: list[str] = []
    _walk(values, words.append)
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def _walk(value: Any, tell: Callable[[str], None]) -> None:
    """Write one line for each value: its class, then its text or the number of its parts."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, _TORCH):
        tell(f"{kind.__name__} {value!r}")  # the text of a string holds no bare line break
    elif isinstance(value, enum.Enum):
        tell(f"{_name(kind)} {value.name}")
    elif isinstance(value, torch.Tensor):
        numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        content = hashlib.sha256(numbers.tobytes()).hexdigest()
        tell(f"tensor {tuple(value.shape)} {value.dtype} {content}")
    elif isinstance(value, list | tuple):
        tell(f"{_name(kind)} {len(value)}")
        for item in value:
            _walk(item, tell)
    elif isinstance(value, Mapping):
        tell(f"{_name(kind)} {len(value)}")
        for key, item in value.items():
            _walk(key, tell)
            _walk(item, tell)
    elif isinstance(value, set | frozenset):
        tell(f"{_name(kind)} {sorted(map(digest, value))}")
    elif dataclasses.is_dataclass(kind):
        tell(_name(kind))
        for name in _fields(kind):
            _walk(getattr(value, name), tell)
    else:
        raise Undigested(_name(kind))


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Return the fields that an instance is made with; the others follow from them."""
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
