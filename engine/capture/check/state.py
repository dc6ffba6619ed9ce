"""state: snapshots of the Python objects that forward writes to, which can be compared."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from flowrun.engine.capture.in_python.frozen import freeze
from flowrun.engine.capture.side_effects import Effect

EffectState = Mapping[tuple[int, str], object]  # (number of the effect, attribute) -> snapshot


def take_snapshot(effects: Iterable[Effect]) -> EffectState:
    """Return the values that the effects write, in comparable form.

    A tensor is represented by a word, as numbers are compared elsewhere.
    """
    return {key: freeze(value) for key, value in _written_values(effects)}


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
