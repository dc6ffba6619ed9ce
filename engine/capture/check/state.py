"""state: snapshots of the Python objects that forward writes to, which can be compared."""

from __future__ import annotations

import dataclasses
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from flowrun.engine.capture.side_effects import Effect

_MAX_PARTS = 10_000  # of one object, that a snapshot looks at
_PLAIN = (type(None), bool, int, float, complex, str, bytes)

EffectState = Mapping[tuple[int, str], object]  # (number of the effect, attribute) -> snapshot


def take_snapshot(effects: Iterable[Effect]) -> EffectState:
    """Return the values that the effects write, in comparable form.

    A tensor is represented by a word, as numbers are compared elsewhere.
    """
    return {key: _ObjectWalk().freeze(value) for key, value in _written_values(effects)}


def copy_outside_tensors(
    effects: Iterable[Effect], outside: Iterable[Tensor]
) -> dict[tuple[int, str], Tensor]:
    """Return copies of those tensors in `outside` that an effect writes.

    outside: tensors whose numbers the captured graph holds.
    """
    held = {id(tensor) for tensor in outside}
    return {
        key: value.detach().clone()
        for key, value in _written_values(effects)
        if isinstance(value, Tensor) and id(value) in held
    }


def has_changed(effects: Sequence[Effect], key: tuple[int, str], before: Tensor) -> bool:
    """Return whether the value at `key` (number of one of `effects`, attribute) is not `before`."""
    now = _read(effects[key[0]].owner, key[1])
    if not isinstance(now, Tensor) or (now.shape, now.dtype) != (before.shape, before.dtype):
        return True
    return not torch.equal(now, before)


def _written_values(effects: Iterable[Effect]) -> Iterator[tuple[tuple[int, str], object]]:
    for k, effect in enumerate(effects):
        for attribute in effect.attributes or ("",):
            yield (k, attribute), _read(effect.owner, attribute)


def _read(owner: object, attribute: str) -> object:
    """Return an attribute, or the owner itself if the name is ""; None if it is not set."""
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


class _ObjectWalk:
    """A walk through an object that visits each part once."""

    def __init__(self) -> None:
        self.ids: set[int] = set()

    def freeze(self, x: object) -> object:
        """Return a value that is equal for equal contents."""
        if isinstance(x, _PLAIN):
            return x
        if isinstance(x, Tensor):
            return "tensor"
        if id(x) in self.ids or len(self.ids) > _MAX_PARTS:
            return "seen"
        self.ids.add(id(x))
        if isinstance(x, Mapping):
            return ("mapping", [(self.freeze(k), self.freeze(v)) for k, v in x.items()])
        if isinstance(x, (list, tuple, deque)):
            return ("sequence", [self.freeze(item) for item in x])
        if isinstance(x, (set, frozenset)):
            return ("set", sorted(repr(self.freeze(item)) for item in x))
        return self._freeze_object(x)

    def _freeze_object(self, x: object) -> object:
        """Return the fields of an object; of an iterator, what pickle would rebuild it from."""
        if isinstance(x, (type, types.ModuleType, types.FunctionType, nn.Module)):
            return ("named", id(x))
        if dataclasses.is_dataclass(x) or hasattr(x, "__dict__"):
            fields = dict(getattr(x, "__dict__", {}))
            if dataclasses.is_dataclass(x):
                fields |= {f.name: getattr(x, f.name, None) for f in dataclasses.fields(x)}
            return (type(x).__qualname__, self.freeze(fields))
        try:
            return (type(x).__qualname__, self.freeze(x.__reduce__()[1:]))
        except Exception:  # of any type: an object may refuse to be reduced
            return (type(x).__qualname__, repr(x))
