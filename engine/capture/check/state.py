"""state: what Python holds where forward writes to it, as a value that can be compared."""

from __future__ import annotations

import dataclasses
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowrun.engine.capture.side_effects import Effect

_MOST = 10_000  # parts of an object that are looked at
_PLAIN = (type(None), bool, int, float, complex, str, bytes)

EffectState = Mapping[tuple[int, str], Any]  # (number of the effect, attribute) -> what is there


def state_of(effects: Iterable[Effect]) -> EffectState:
    """What stands where each effect writes: plain values whole; tensors as a word, for numbers tell
    what they do.
    """
    return {key: _Seen().value(there) for key, there in _places(effects)}


def tensors_read(
    effects: Iterable[Effect], outside: Iterable[Tensor]
) -> dict[tuple[int, str], Tensor]:
    """Of the tensors that the captured graph holds as numbers (outside), those that stand where an
    effect writes, as they are now.
    """
    held = {id(tensor) for tensor in outside}
    return {
        key: there.detach().clone()
        for key, there in _places(effects)
        if isinstance(there, Tensor) and id(there) in held
    }


def has_changed(effects: Sequence[Effect], key: tuple[int, str], before: Tensor) -> bool:
    """Whether another value stands there now."""
    now = _at(effects[key[0]].owner, key[1])
    same = isinstance(now, Tensor) and now.shape == before.shape and now.dtype == before.dtype
    return not (same and torch.equal(now, before))


def _places(effects: Iterable[Effect]) -> Iterator[tuple[tuple[int, str], Any]]:
    for k, effect in enumerate(effects):
        for attribute in effect.attributes or ("",):
            yield (k, attribute), _at(effect.owner, attribute)


def _at(owner: Any, attribute: str) -> Any:
    """An attribute, or the owner; None if it is not there."""
    if not attribute:
        return owner
    if isinstance(owner, types.CellType):
        try:
            return owner.cell_contents
        except ValueError:  # empty
            return None
    if isinstance(owner, nn.Module) and attribute in owner.__dict__.get("_buffers", ()):
        return None  # a buffer's numbers are compared
    return vars(owner).get(attribute) if hasattr(owner, "__dict__") else getattr(owner, attribute)


class _Seen:
    """One walk through an object: each part once."""

    def __init__(self) -> None:
        self.ids: set[int] = set()

    def value(self, x: Any) -> Any:
        if isinstance(x, _PLAIN):
            return x
        if isinstance(x, Tensor):
            return "tensor"
        if id(x) in self.ids or len(self.ids) > _MOST:
            return "seen"
        self.ids.add(id(x))
        if isinstance(x, Mapping):
            return ("mapping", [(self.value(k), self.value(v)) for k, v in x.items()])
        if isinstance(x, (list, tuple, deque)):
            return ("line", [self.value(item) for item in x])
        if isinstance(x, (set, frozenset)):
            return ("set", sorted(repr(self.value(item)) for item in x))
        return self._object(x)

    def _object(self, x: Any) -> Any:
        """By its fields; an iterator by how it would be made again."""
        if isinstance(x, (type, types.ModuleType, types.FunctionType, nn.Module)):
            return ("named", id(x))
        if dataclasses.is_dataclass(x) or hasattr(x, "__dict__"):
            fields = dict(getattr(x, "__dict__", {}))
            if dataclasses.is_dataclass(x):
                fields |= {f.name: getattr(x, f.name, None) for f in dataclasses.fields(x)}
            return (type(x).__qualname__, self.value(fields))
        try:
            return (type(x).__qualname__, self.value(x.__reduce__()[1:]))
        except Exception:  # whatever an object without fields may raise
            return (type(x).__qualname__, repr(x))
