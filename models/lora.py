"""LoRA (Hu et al. 2021, section 4.1): y = W x + alpha / rank * B A x, where W is frozen.

A linear that gets an adapter keeps its parameters and their names (`q_proj.weight`), so that files
of weights, pins and groups find them as before; A and B are `q_proj.lora_A.weight` (rank, in) and
`q_proj.lora_B.weight` (out, rank).  The arithmetic is that of peft's LoRA.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

A, B = "lora_A.weight", "lora_B.weight"  # names inside of a linear that has an adapter


class Lora(nn.Module):
    """The term of the adapter, added to a class of linears as its first base."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_dropout: nn.Module
    lora_alpha: float

    def forward(self, x: Tensor) -> Tensor:
        """Return the linear's output plus the adapter's, in the dtype of the former."""
        y: Tensor = super().forward(x)
        low = self.lora_A(self.lora_dropout(x.to(self.lora_A.weight.dtype)))
        return (y + self.lora_B(low) * lora_scale(self)).to(y.dtype)


def lora_scale(linear: Lora) -> float:
    """Return the factor of B A, alpha / rank."""
    return linear.lora_alpha / linear.lora_A.out_features


def is_linear(module: nn.Module) -> bool:
    """Return True of nn.Linear and transformers' Conv1D, if their weight is a plain parameter.

    The output projection of nn.MultiheadAttention is none, as its forward is never called.
    """
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False
    linear = isinstance(module, nn.Linear) or is_conv1d(module)
    return linear and isinstance(module.weight, nn.Parameter)


def is_conv1d(module: nn.Module) -> bool:
    """Return True of transformers' Conv1D, a linear whose weight is (in, out)."""
    return any(
        cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"
        for cls in type(module).__mro__
    )


def add_lora(linear: nn.Module, rank: int, alpha: float, dropout: float) -> None:
    """Give a linear an adapter, which changes nothing at first: A is drawn as nn.Linear draws its
    weight, B is zeros.

    rank: rows of A.  alpha: B A counts alpha / rank.  dropout: share of the adapter's inputs that
    are zeroed in training.  A and B are of the weight's dtype, or fp32 where that is narrower.
    """
    adapted: Any = linear
    weight: Tensor = adapted.weight
    num_out, num_in = reversed(weight.shape) if is_conv1d(linear) else iter(weight.shape)
    like: dict[str, Any] = {
        "device": weight.device,
        "dtype": torch.promote_types(weight.dtype, torch.float32),
    }
    cls: Any = type(linear)
    adapted.__class__ = _with_lora(cls)
    adapted.lora_A = nn.Linear(num_in, rank, bias=False, **like)
    adapted.lora_B = nn.Linear(rank, num_out, bias=False, **like)
    adapted.lora_dropout = nn.Dropout(dropout) if dropout else nn.Identity()
    adapted.lora_alpha = alpha
    nn.init.zeros_(adapted.lora_B.weight)


@cache
def _with_lora(cls: Any) -> object:
    """Return a class of linears with the term of the adapter, the same for the same class."""
    return type(f"Lora{cls.__name__}", (Lora, cls), {"__module__": cls.__module__})


def find_loras(model: nn.Module) -> Iterator[tuple[str, Lora]]:
    """Yield the linears that have an adapter, each with its name."""
    return ((name, each) for name, each in model.named_modules() if isinstance(each, Lora))


@dataclass(frozen=True)
class LoraTensors:
    """Names of the tensors of an adapter in a state_dict, and how they are merged.

    scale: of B A.  transposed: the weight is (in, out), as a Conv1D's.
    """

    weight: str
    a: str
    b: str
    scale: float
    transposed: bool

    def merge(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the weight of a plain linear that computes the same."""
        delta = (b @ a) * self.scale
        return (weight + (delta.T if self.transposed else delta)).to(weight.dtype)


@dataclass(frozen=True)
class AdaptedWeights:
    """A description of the weights of a model with adapters, for someone who has only the weights.

    loras: its adapters.  others: parameters that were trained and are of no adapter.  unlike: a
    module with an adapter of another kind, which its own library merges; empty: there is none.
    """

    loras: tuple[LoraTensors, ...]
    others: tuple[str, ...] = ()
    unlike: str = ""

    @staticmethod
    def of_json(given: Mapping[str, Any]) -> AdaptedWeights:
        """Return what dataclasses.asdict made a mapping of."""
        loras = tuple(LoraTensors(**each) for each in given["loras"])
        return AdaptedWeights(loras, tuple(given["others"]), given["unlike"])


def tensors_of(name: str, linear: Lora) -> LoraTensors:
    """Describe the adapter of a linear, whose name in the model is `name`."""
    weight, a, b = (f"{name}.{part}" for part in ("weight", A, B))
    return LoraTensors(weight, a, b, lora_scale(linear), is_conv1d(linear))
