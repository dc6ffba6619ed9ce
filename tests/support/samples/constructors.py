"""Modules whose constructors make values in one more way each."""

import copy
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from flowrun.models.convnet import ConvNet
from flowrun.models.gpt import GPT
from flowrun.models.llama import Llama
from flowrun.models.mlp import MLP, DeepMLP
from flowrun.models.moe import MixtureGPT

Draw = Callable[[Tensor], object]


class Weight(nn.Module):
    """One weight, changed by a function after it was drawn."""

    def __init__(self, change: Draw, *size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*size or (12, 20)))
        with torch.no_grad():
            change(self.weight)


class Values(nn.Module):
    """A weight of values that a function makes."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(make())


class Tied(nn.Module):
    """One weight under two names, one of transposed memory, and one that others share a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8, padding_idx=3), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.turned = nn.Parameter(torch.randn(5, 7).t())
        both = torch.randn(10)
        self.front, self.back = nn.Parameter(both[:4]), nn.Parameter(both[4:])


class Tables(nn.Module):
    """Buffers computed from ranges, one by parts of it; an attribute that is neither."""

    def __init__(self) -> None:
        super().__init__()
        steps = torch.arange(0, 8, 2) * -0.5
        places = torch.zeros(50, 8)
        places[:, 0::2] = torch.sin(torch.arange(50.0)[:, None] * steps.exp())
        places[:, 1::2] = torch.cos(torch.arange(50.0)[:, None] * steps.exp())
        self.register_buffer("places", places)
        self.register_buffer("unseen", torch.ones(9, 9).tril(-1).bool(), persistent=False)
        self.mask = torch.ones(30, 30).tril()
        self.rows = self.mask[3:5]
        self.loose = [nn.Parameter(torch.randn(6))]


class Asking(nn.Module):
    """Python reads values, small and large, and goes by them."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = torch.linspace(0, 1, 5).tolist()
        self.first = nn.Linear(9, 9)
        self.text = f"{self.first.weight[0, 0]}"
        if self.first.weight.sum() > self.first.bias.sum():
            nn.init.zeros_(self.first.bias)
        self.second = nn.Linear(int(torch.randint(3, 6, ()).item()), 4)
        self.chosen = nn.Parameter(self.first.weight[self.first.weight > 0].clone())
        self.first.weight.data.clamp_(max=float(self.chosen.detach().mean()))


class Replaced(nn.Module):
    """Weights whose data are exchanged, converted, copied, swapped or drawn from other streams."""

    def __init__(self) -> None:
        super().__init__()
        self.data = nn.Parameter(torch.randn(4, 4))
        self.data.data = torch.rand(7)
        self.narrow = nn.Linear(6, 6).bfloat16()
        self.wide = nn.Linear(6, 6).to(torch.float64)
        torch.set_default_dtype(torch.float64)
        self.by_default = nn.Linear(3, 3)
        torch.set_default_dtype(torch.float32)
        norm = nn.BatchNorm1d(5)
        norm.running_mean.uniform_()  # type: ignore[union-attr]
        self.norms = nn.ModuleList(copy.deepcopy(norm) for _ in range(2))
        own = torch.Generator().manual_seed(3)
        self.own = nn.Parameter(torch.empty(3, 4).exponential_(generator=own))
        self.order = nn.Parameter(torch.randperm(30, generator=own).float())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            self.aside = nn.Parameter(torch.randn(20))
        before = torch.get_rng_state()
        self.one = nn.Parameter(torch.randn(3))
        torch.set_rng_state(before)
        self.same = nn.Parameter(torch.randn(3))
        self.after = nn.Linear(4, 4)
        with torch.no_grad():
            self.after.weight.set_(self.after.weight * 2)  # type: ignore[call-overload]


class FromArrays(nn.Module):
    """Values that no op makes; the array is used again for something else."""

    def __init__(self, rows: int = 6) -> None:
        super().__init__()
        array = np.linspace(0, 1, rows * 5, dtype=np.float32).reshape(rows, 5)
        self.copied = nn.Linear(5, rows, bias=False)
        with torch.no_grad():
            self.copied.weight.copy_(torch.from_numpy(array))
            array[:] = -1
            self.spread = nn.Parameter(torch.randn(3, rows, 5) + torch.from_numpy(array[:1]))
        self.taken = nn.Parameter(torch.from_numpy(array))


def _residual(model: nn.Module) -> nn.Module:
    """Scales some of its weights, as GPT-2 does, when it is there."""
    for name, parameter in model.named_parameters():
        if name.endswith("linear2.weight"):
            parameter.data.mul_(0.125)
        elif parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return model


_INIT: Mapping[str, Draw] = {
    "orthogonal": lambda w: nn.init.orthogonal_(w, gain=2.0),
    "wide orthogonal": lambda w: nn.init.orthogonal_(w.t()),
    "truncated": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "tail": lambda w: nn.init.trunc_normal_(w, a=1.0, b=2.0),
    "sparse": lambda w: nn.init.sparse_(w, 0.3),
    "eye": lambda w: nn.init.eye_(w),
    "columns": lambda w: w[:, ::3].uniform_(),
    "rows": lambda w: [w[k].mul_(k) for k in range(len(w))],
    "onto itself": lambda w: w[1:].copy_(w[:-1].clone()).add_(w[:1]),
    "over itself": lambda w: w.copy_(w.flip(0)),
    "into": lambda w: torch.mul(w, 3.0, out=w),
    "of each": lambda w: torch._foreach_mul_([w, w[:2]], 0.5),
    "masked": lambda w: w.masked_fill_(w.abs() > 1, 0.0),
    "indexed": lambda w: w.index_put_((torch.tensor([1, 3]),), torch.tensor(9.0)),
    "normed": lambda w: w.div_(w.norm(dim=0, keepdim=True)),
    "product": lambda w: w.copy_(w @ w.t() @ w),
    "sorted": lambda w: w.copy_(w.sort(dim=1).values),
    "dropped": lambda w: nn.functional.dropout(w, 0.5, inplace=True),
    "from a mean": lambda w: w.copy_(torch.normal(w, w.abs())),
    "few": lambda w: w.view(-1)[:7].normal_(),
    "randomly": lambda w: w.random_(5).bernoulli_(0.4),
}

_VALUES: Mapping[str, Callable[[], Tensor]] = {
    "kaiming": lambda: nn.init.kaiming_normal_(torch.empty(8, 3, 3, 3), mode="fan_out"),
    "half a tensor": lambda: torch.randn(6, 10)[:, ::2],
    "spread": lambda: torch.randn(6, 1).expand(6, 4).clone(),
    "joined": lambda: torch.cat([torch.randn(3, 4), torch.zeros(1, 4)]),
    "parts": lambda: torch.stack(torch.randn(6, 4).chunk(2)).unbind()[1],
    "eigen": lambda: torch.linalg.svd(torch.randn(9, 5), full_matrices=False)[0],
    "chosen": lambda: torch.multinomial(torch.rand(20), 9).float(),
    "poisson": lambda: torch.poisson(torch.rand(40) * 9),
    "complex": lambda: torch.view_as_real(torch.polar(torch.ones(9), torch.rand(9))).clone(),
    "empty": lambda: torch.empty(0, 4),
    "scalar": lambda: torch.tensor(0.5),
    "legacy": lambda: torch.FloatTensor(3, 4).normal_(),
}

MODULES: Mapping[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(17, 40),
    "transformer": lambda: _residual(nn.Transformer(16, 2, 2, 2, 32, batch_first=True)),
    "vision": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8)),
    "recurrent": lambda: nn.LSTM(8, 8, 2, bidirectional=True),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(5, 6)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(5, 6)),
    "orthogonal map": lambda: parametrizations.orthogonal(nn.Linear(5, 6)),
    "tied": Tied,
    "tables": Tables,
    "asking": Asking,
    "replaced": Replaced,
    "from arrays": FromArrays,
    **{f"init {name}": lambda change=change: Weight(change) for name, change in _INIT.items()},
    **{f"values {name}": lambda make=make: Values(make) for name, make in _VALUES.items()},
    "models.gpt": lambda: GPT(30, 12, 2, 2, 16, tied=True, dropout=0.1),
    "models.llama": lambda: Llama(30, 2, 4, 2, 16, 24),
    "models.moe": lambda: MixtureGPT(30, 12, 2, 2, 16, 4),
    "models.mlp": lambda: nn.Sequential(MLP(8, 16, 4), DeepMLP([8, 16, 4])),
    "models.convnet": lambda: ConvNet(8, 4, 10),
}
