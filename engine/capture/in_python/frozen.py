"""frozen: what an object of Python holds, as a value that can be compared."""

from __future__ import annotations

import dataclasses
import re
import types
from collections import deque
from collections.abc import Mapping

from torch import Tensor, nn

_MAX_PARTS = 10_000  # of one object, that are looked at
_ADDRESS = re.compile(" at 0x[0-9a-f]+")
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def freeze(x: object) -> object:
    """Return a value that is equal for equal contents; a word stands for each tensor."""
    return _ObjectWalk().freeze(x)


def freeze_class(value: object) -> object:
    """Freeze a value; of a class, its attributes that are no functions."""
    if isinstance(value, type):
        return freeze({k: v for k, v in vars(value).items() if not callable(v) and k[0] != "_"})
    return freeze(value)


class _ObjectWalk:
    """A walk through an object that visits each part once.

    visited: the parts by their ids.  It holds them: the id of what is freed may be another's.
    """

    def __init__(self) -> None:
        self.visited: dict[int, object] = {}

    def freeze(self, x: object) -> object:
        """Return a value that is equal for equal contents."""
        if isinstance(x, _PLAIN):
            return x
        if isinstance(x, Tensor):
            return "tensor"
        if id(x) in self.visited or len(self.visited) > _MAX_PARTS:
            return "seen"
        self.visited[id(x)] = x
        if isinstance(x, Mapping):
            return ("mapping", [(self.freeze(k), self.freeze(v)) for k, v in x.items()])
        if isinstance(x, (list, tuple, deque)):
            return ("sequence", [self.freeze(item) for item in x])
        if isinstance(x, (set, frozenset)):
            return ("set", sorted(repr(self.freeze(item)) for item in x))
        return self._freeze_object(x)

    def _freeze_object(self, x: object) -> object:
        """Return the fields of an object; of an iterator, what pickle would rebuild it from."""
        if isinstance(x, (type, types.ModuleType, nn.Module)):
            return ("named", id(x))
        if isinstance(x, types.FunctionType):  # made anew in each call, perhaps
            closed = [_read_cell(cell) for cell in x.__closure__ or ()]
            return ("function", id(x.__code__), self.freeze((closed, x.__defaults__, vars(x))))
        if isinstance(x, types.GeneratorType):
            at = x.gi_frame
            return ("generator", at and (at.f_lasti, self.freeze(at.f_locals)))
        if dataclasses.is_dataclass(x) or hasattr(x, "__dict__"):
            fields = dict(getattr(x, "__dict__", {}))
            if dataclasses.is_dataclass(x):
                fields |= {f.name: getattr(x, f.name, None) for f in dataclasses.fields(x)}
            return (type(x).__qualname__, self.freeze(fields))
        shown = (type(x).__qualname__, _ADDRESS.sub("", repr(x)))
        if type(x).__reduce__ is object.__reduce__:  # which makes an object of a base in C, and
            return shown  # ends the process where that base is torch's and makes none
        try:
            return (type(x).__qualname__, self.freeze(x.__reduce__()[1:]))
        except Exception:  # of any type: an object may refuse to be reduced
            return shown


def _read_cell(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
