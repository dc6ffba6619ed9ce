"""digest: any Python object -> text that is equal where two objects would be compiled alike.

Parameters and buffers of a module count by shape and dtype, any other tensor by its numbers (a plan
may carry them); functions and classes by name: their source is the caller's to watch.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum)


class Undigested(Exception):
    """An object has parts that Python does not show."""


def digest(*values: Any) -> str:
    """Hex.  Raises Undigested."""
    hashed = hashlib.sha256()
    _Walk(hashed.update).walk(values)
    return hashed.hexdigest()


class _Walk:
    """Goes through everything that an object refers to, and tells of each part once."""

    def __init__(self, update: Callable[[bytes], None]) -> None:
        self.update = update
        self.seen: dict[int, int] = {}
        self.kept: list[Any] = []  # an id is an object's own only while it lives

    def tell(self, *words: object) -> None:
        self.update(f"{words!r};".encode())

    def walk(self, value: Any) -> None:
        if isinstance(value, (*_PLAIN, *_NAMED)):
            self.tell(type(value).__qualname__, value)
            return
        if id(value) in self.seen:
            self.tell("seen", self.seen[id(value)])
            return
        self.seen[id(value)] = len(self.seen)
        self.kept.append(value)
        self._walk_new(value)

    def _walk_new(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray | np.generic):
            self.tell("array", value.dtype.str, value.shape)
            self.update(value.tobytes())
        elif isinstance(value, Mapping):
            self.tell(_name(type(value)), len(value))
            for key, item in value.items():
                self.walk(key)
                self.walk(item)
        elif isinstance(value, list | tuple):
            self.tell(_name(type(value)), len(value))
            for item in value:
                self.walk(item)
        elif isinstance(value, set | frozenset):
            self.tell(_name(type(value)), sorted(digest(item) for item in value))
        elif isinstance(value, functools.partial):
            self.tell("partial")
            self.walk((value.func, value.args, value.keywords))
        elif inspect.ismethod(value):
            self.tell("method", value.__name__)
            self.walk(value.__self__)
        elif inspect.isfunction(value):
            self.tell("function", _name(value))
            cells = value.__closure__ or ()
            self.walk((value.__defaults__, value.__kwdefaults__, [c.cell_contents for c in cells]))
        elif isinstance(value, type) or inspect.isbuiltin(value) or inspect.ismodule(value):
            self.tell("named", getattr(value, "__module__", ""), value.__name__)
        else:
            self._object(value)

    def _tensor(self, value: torch.Tensor) -> None:
        self.tell("tensor", tuple(value.shape), value.dtype, value.requires_grad)
        if not isinstance(value, nn.Parameter):
            whole = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            self.update(whole.numpy().tobytes())

    def _object(self, value: Any) -> None:
        self.tell("object", _name(type(value)))
        if isinstance(value, nn.Module):
            state = dict(vars(value))
            self.walk([(name, b is None or _shape(b)) for name, b in state.pop("_buffers").items()])
        elif hasattr(value, "__dict__"):
            state = vars(value)
        elif dataclasses.is_dataclass(value):
            state = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        else:
            raise Undigested(_name(type(value)))
        self.walk(state)


def _shape(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.dtype


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
