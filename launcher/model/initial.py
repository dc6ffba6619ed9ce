"""Initial values of a model's parameters and buffers, each made when somebody asks for it.

The invariant: a value has, bit for bit, what plain torch has there after `torch.manual_seed(seed);
Model()`, in every process, and whatever else was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from flowrun.launcher.model.replay import View, replay

InitialSource = View | tuple[Tensor, torch.dtype]


class Initial(Mapping[str, Tensor]):
    """Initial value of every parameter and buffer, each made anew when it is asked for.

    sources: by name, what it is made from: the ops that made it, or a tensor, and the dtype that it
    is converted to.
    """

    def __init__(self, sources: Mapping[str, InitialSource]) -> None:
        self.sources = dict(sources)

    def __getitem__(self, name: str) -> Tensor:
        source = self.sources[name]
        if isinstance(source, View):
            return replay([source])[0]
        value, dtype = source
        return value.detach().to(dtype, copy=True)

    def __contains__(self, name: object) -> bool:
        return name in self.sources  # Mapping's own would make the value

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)

    def but(self, values: Mapping[str, Tensor]) -> Initial:
        """Replace values, converted to the dtypes that they have here."""
        changed = {name: (value, self.dtype(name)) for name, value in values.items()}
        return Initial({**self.sources, **changed})

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value, which need not be made for it."""
        source = self.sources[name]
        return source.geometry.size if isinstance(source, View) else tuple(source[0].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a value, which need not be made for it."""
        source = self.sources[name]
        return source.geometry.dtype if isinstance(source, View) else source[1]

    def held_bytes(self, name: str) -> int:
        """Memory that is taken for it before it is made."""
        source = self.sources[name]
        if not isinstance(source, View):
            return source[0].nbytes
        calls, todo, held = set(), [source.value], 0
        while todo:
            call = todo.pop().call
            if call is not None and call not in calls:
                calls.add(call)
                todo += call.reads
                held += sum(x.nbytes for x in call.leaves if isinstance(x, Tensor))
        return held


def initial_of(model: nn.Module) -> Initial:
    """Return the initial values of a model whose tensors have memory."""
    return Initial({name: (tensor, tensor.dtype) for name, tensor in named_tensors(model).items()})


def with_values(initial: Initial, tensors: Mapping[str, Tensor]) -> Initial:
    """Add the values of other tensors that have memory, such as those of a loss."""
    others = {name: tensor for name, tensor in tensors.items() if name not in initial}
    return Initial({**initial.sources, **{n: (t, t.dtype) for n, t in others.items()}})


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, a tied one by its first."""
    return dict((*model.named_parameters(), *model.named_buffers()))
