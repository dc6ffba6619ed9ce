"""How the layers of a model of ours stand in the class of transformers that computes the same.

A table of names, read in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class WeightLayout:
    """One layer, or the three of q, k and v, in a weight (out, in), or its bias (out,).

    split: (tensor, heads) -> layers, each (out, in).  join: (layers, heads) -> tensor.
    """

    layers: int
    split: Callable[[Tensor, int], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor], int], Tensor]


def _transpose(x: Tensor) -> Tensor:
    """Conv1D of GPT-2 has its weights as (in, out)."""
    return x.mT if x.dim() == 2 else x


def _join_heads(qkv: Sequence[Tensor], heads: int) -> Tensor:
    return torch.stack([x.unflatten(0, (heads, -1)) for x in qkv], dim=1).flatten(0, 2)


def _split_heads(x: Tensor, heads: int) -> Sequence[Tensor]:
    return [each.flatten(0, 1) for each in x.unflatten(0, (heads, 3, -1)).unbind(1)]


PLAIN = WeightLayout(1, lambda x, _: [x], lambda layers, _: layers[0])
TRANSPOSED = WeightLayout(1, lambda x, _: [_transpose(x)], lambda layers, _: _transpose(layers[0]))
QKV_BY_HEAD = WeightLayout(3, _split_heads, _join_heads)  # rows (heads, 3, head width)
QKV_IN_COLUMNS = WeightLayout(  # (in, q k v)
    3, lambda x, _: _transpose(x).chunk(3), lambda layers, _: _transpose(torch.cat([*layers]))
)
AFTER_TWO_ROWS = WeightLayout(  # OPT pads position embeddings by two rows
    1, lambda x, _: [x[2:]], lambda layers, _: nn.functional.pad(layers[0], (0, 0, 2, 0))
)


@dataclass(frozen=True)
class LayerNames:
    """The same layers under our names and theirs; {} is the number of a block."""

    ours: str
    theirs: str
    layout: WeightLayout = PLAIN
    their_layout: WeightLayout = PLAIN


@dataclass(frozen=True, kw_only=True)
class Counterpart:
    """The class of transformers that computes what one of ours does.

    name: of the class.  config: the arguments of its config.  compared: those that change what it
    computes, and that shapes do not show.  heads: of attention.
    """

    name: str
    kind: str
    config: Mapping[str, Any]
    compared: tuple[str, ...]
    rows: tuple[LayerNames, ...]
    depth: int
    heads: int = 1
    also: Mapping[str, object] = field(default_factory=dict)  # arguments for training alone

    def to_theirs(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return our tensors by their names."""
        return self._convert(state, back=False)[0]

    def to_ours(self, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """Return their tensors by our names, and the names of those that have none here."""
        return self._convert(state, back=True)

    def _convert(
        self, state: Mapping[str, Tensor], back: bool
    ) -> tuple[dict[str, Tensor], list[str]]:
        made: dict[str, Tensor] = {}
        read: set[str] = set()
        for ours, theirs, row in self._layers():
            sides = ((ours, row.layout), (theirs, row.their_layout))
            (names, layout), (new, new_layout) = reversed(sides) if back else sides
            if not all(name in state for name in names):
                continue
            read |= {*names}
            layers = [x for name in names for x in layout.split(state[name], self.heads)]
            size = new_layout.layers
            for k, name in enumerate(new):
                made[name] = new_layout.join(layers[k * size : (k + 1) * size], self.heads)
        return made, [name for name in state if name not in read]

    def _layers(self) -> Iterator[tuple[list[str], list[str], LayerNames]]:
        """Yield our names, theirs and the row, of each block's weights and biases."""
        for row in self.rows:
            for block in range(self.depth if "{}" in row.ours else 1):
                for kind in ("",) if row.ours.endswith(".bias") else (".weight", ".bias"):
                    yield (
                        [name.format(block) + kind for name in row.ours.split()],
                        [name.format(block) + kind for name in row.theirs.split()],
                        row,
                    )
