"""Modules of torch.nn and functions of torch, each in a net as small as can be: what a survey
trains under one rank and under two, beside plain torch.

A net scales and shifts every element of its samples by weights of its own, hands them to the op,
and takes the mean of the tangent hyperbolic of what comes; of an op that returns one number, that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrun.engine.ir.graph import UPDATE, LogicalGraph
from flowrun.engine.ir.sbp import Broadcast, Split
from flowrun.engine.ops import registry
from flowrun.engine.ops.flow.structure import BOX, PIN
from flowrun.engine.strategy import Optimizer
from support.layouts.grids import Layout, compiled, virtual_run
from support.layouts.plain_loop import (
    Batch,
    Training,
    largest,
    loss_difference,
    plain_loop,
    seeded,
)

SAMPLES, STEPS = 6, 2
SGD = Optimizer("sgd", (("lr", 0.1), ("momentum", 0.0), ("weight_decay", 0.0), ("nesterov", False)))
BY_HAND, FOUND, WHOLE, REFUSED = "by hand", "found", "whole", "refused"

Target = Callable[[torch.Generator, int], Tensor]


@dataclass(frozen=True, eq=False)
class Case:
    """One row of the survey.

    make: the op: a module, or a function, of the samples (and of the targets, where there are any).
    shape: of a sample.  target: generator, samples -> what the op reads beside.  positive: what the
    op gets is between 0 and 1.
    """

    name: str
    make: Callable[[], Callable[..., Any]]
    shape: tuple[int, ...]
    target: Target | None = None
    positive: bool = False


class Net(nn.Module):
    """See the head of the file."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.positive = case.positive
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(case.shape))
        self.shift = nn.Parameter(0.1 * torch.randn(case.shape))
        made = case.make()
        self.op = made if isinstance(made, nn.Module) else _Function(made)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = x * self.scale + self.shift
        h = h.sigmoid() if self.positive else h
        return _one_number(self.op(h) if y is None else self.op(h, y))


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Tensor) -> Any:
        return self.function(*values)


def _one_number(out: Any) -> Tensor:
    """A mean over the batch."""
    if isinstance(out, (tuple, list)):
        parts = [
            v for v in out if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex())
        ]
        return sum((_one_number(v) for v in parts), torch.zeros(()))
    out = torch.view_as_real(out.resolve_conj()) if out.is_complex() else out
    return out if not out.ndim else 1 + out.float().tanh().mean()


def _loss(output: Tensor, batch: Batch) -> Tensor:
    return output


@cache
def training(name: str) -> Training:
    """Of a case, by name."""
    case = CASES[name]
    random = torch.Generator().manual_seed(17)
    batches = []
    for _ in range(STEPS):
        batch = {"x": torch.randn((SAMPLES, *case.shape), generator=random)}
        if case.target is not None:
            batch["y"] = case.target(random, SAMPLES)
        batches.append(batch)
    inputs = {field: field for field in batches[0]}
    return Training(partial(seeded, partial(Net, case)), inputs, _loss, tuple(batches), SGD, 1)


# ---- verdicts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """kind: BY_HAND, FOUND, WHOLE or REFUSED.  found, whole: targets.  gathered: tensors of samples
    that are boxed to B before the update.  apart: of losses and weights from plain torch, under
    data 2.
    """

    kind: str
    found: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    apart: float = 0.0
    reason: str = ""


def verdict(name: str) -> Verdict:
    """Trains the case on one rank and on two, as data parallel."""
    given = training(name)
    plain = plain_loop(given, 0.0, STEPS)
    apart = 0.0
    for layout in (Layout(), Layout(data=2)):
        found = virtual_run(given, layout, STEPS)
        weights = (
            float((found.weights[name] - after).norm() / after.norm())
            for name, after in plain.after.items()
        )
        apart = largest((apart, loss_difference(found.losses, plain), *weights))
    graph = compiled(given, Layout(data=2)).plan.graph
    by_experiment, whole = origins(graph)
    kind = WHOLE if whole else FOUND if by_experiment else BY_HAND
    return Verdict(kind, by_experiment, whole, gathered(graph), apart)


def origins(graph: LogicalGraph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Targets whose rows were found, and those without rows that read samples."""
    ops = [op for op in graph.ops if op.target not in (BOX, PIN)]
    ops = [op for op in ops if registry.info(op.target).relabels is None]
    found = {op.target for op in ops if op.table is not None}
    whole = {
        op.target
        for op in ops
        if op.table is None
        and not registry.has_table(op.target)
        and reads_samples(graph, op.inputs)
    }
    return tuple(sorted(found)), tuple(sorted(whole))


def reads_samples(graph: LogicalGraph, names: tuple[str, ...]) -> bool:
    """True if one of the tensors depends on the batch."""
    return any(name in _of_samples(graph) for name in names)


@cache
def _samples(graph_id: int) -> set[str]:
    return set()


def _of_samples(graph: LogicalGraph) -> set[str]:
    found = {f.tensor for f in graph.feeds if not f.is_own}
    for op in graph.ops:
        if found.intersection(op.inputs):
            found.update(op.makes)
    return found


def gathered(graph: LogicalGraph) -> tuple[str, ...]:
    """Tensors of samples that travel from S to B before the update."""
    of_samples = _of_samples(graph)
    return tuple(
        op.inputs[0]
        for op in graph.ops
        if op.target == "flow.box"
        and op.phase != UPDATE
        and op.inputs[0] in of_samples
        and any(
            isinstance(a, Split) and isinstance(b, Broadcast)
            for a, b in zip(op.in_sbp[0], op.out_sbp[0], strict=True)
        )
    )


# ---- cases ---------------------------------------------------------------------------------------


def classes(count: int, *shape: int) -> Target:
    """Whole numbers below `count`."""
    return lambda g, n: torch.randint(0, count, (n, *shape), generator=g)


def numbers(*shape: int) -> Target:
    """Normal numbers."""
    return lambda g, n: torch.randn((n, *shape), generator=g)


def chances(*shape: int) -> Target:
    """Between 0 and 1."""
    return lambda g, n: torch.rand((n, *shape), generator=g)


def distribution(*shape: int) -> Target:
    """Along the last dim."""
    return lambda g, n: torch.randn((n, *shape), generator=g).softmax(-1)


def signs(*shape: int) -> Target:
    """-1 and 1."""
    return lambda g, n: torch.randint(0, 2, (n, *shape), generator=g) * 2.0 - 1


VECTOR, SEQUENCE, IMAGE, VOLUME, MATRIX = (8,), (4, 8), (4, 8, 8), (2, 4, 6, 6), (4, 4)


def _spd(x: Tensor) -> Tensor:
    return x @ x.mT + 4 * torch.eye(x.shape[-1])


def _ctc(x: Tensor, y: Tensor) -> Tensor:
    lengths = torch.full((x.shape[0],), x.shape[1], dtype=torch.long)
    targets = torch.full((x.shape[0],), y.shape[1], dtype=torch.long)
    return F.ctc_loss(x.log_softmax(-1).transpose(0, 1), y, lengths, targets)


class _Both(nn.Module):
    """A module of two inputs that reads the samples as both."""

    def __init__(self, module: nn.Module, *rest: Any, **named: Any) -> None:
        super().__init__()
        self.module, self.rest, self.named = module, rest, named

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        return self.module(x, *self.rest, *others, **self.named)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x)[0]
        return out


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x, x.flip(1))
        return out


class _Bag(nn.Module):
    """Rows of a table for the targets, beside the samples."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 8, mode=mode)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.bag(y) * x
        return out


class _Table(nn.Module):
    def __init__(self, **named: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8, **named)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.table(y) * x
        return out


_ACTIVATIONS = (
    *("ELU", "CELU", "SELU", "GELU", "SiLU", "Mish", "ReLU", "ReLU6", "LeakyReLU", "Hardtanh"),
    *("Hardswish", "Hardsigmoid", "Softplus", "Softsign", "Softshrink", "Hardshrink", "Tanhshrink"),
    *("Tanh", "Sigmoid", "LogSigmoid", "PReLU", "RReLU", "GLU", "Softmin"),
)


def _plain_modules() -> dict[str, tuple[Callable[[], Callable[..., Any]], tuple[int, ...]]]:
    m: dict[str, tuple[Callable[[], Callable[..., Any]], tuple[int, ...]]] = {}
    for name in _ACTIVATIONS:
        kwargs = {"dim": -1} if name == "Softmin" else {}
        m[f"nn.{name}"] = (partial(getattr(nn, name), **kwargs), VECTOR)
    m |= {
        "nn.Threshold": (lambda: nn.Threshold(0.1, 0.5), VECTOR),
        "nn.Softmax": (lambda: nn.Softmax(-1), VECTOR),
        "nn.LogSoftmax": (lambda: nn.LogSoftmax(-1), VECTOR),
        "nn.Softmax2d": (nn.Softmax2d, IMAGE),
        "nn.Identity": (nn.Identity, VECTOR),
        "nn.Linear": (lambda: nn.Linear(8, 3), VECTOR),
        "nn.Flatten": (nn.Flatten, IMAGE),
        "nn.Unflatten": (lambda: nn.Unflatten(1, (2, 4)), VECTOR),
        "nn.Dropout (p=0)": (lambda: nn.Dropout(0.0), VECTOR),
        "nn.ChannelShuffle": (lambda: nn.ChannelShuffle(2), IMAGE),
        "nn.PixelShuffle": (lambda: nn.PixelShuffle(2), IMAGE),
        "nn.PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), IMAGE),
        "nn.Fold": (lambda: nn.Fold((4, 4), 2, stride=2), (8, 4)),
        "nn.Unfold": (lambda: nn.Unfold(3), IMAGE),
        "nn.Upsample (nearest)": (lambda: nn.Upsample(scale_factor=2), IMAGE),
        "nn.Upsample (nearest, 1d)": (lambda: nn.Upsample(scale_factor=2), SEQUENCE),
        "nn.Upsample (nearest, 3d)": (lambda: nn.Upsample(scale_factor=2), VOLUME),
        "nn.Upsample (linear)": (lambda: nn.Upsample(scale_factor=2, mode="linear"), SEQUENCE),
        "nn.Upsample (bilinear)": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
        "nn.Upsample (trilinear)": (lambda: nn.Upsample(scale_factor=2, mode="trilinear"), VOLUME),
        "nn.LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), IMAGE),
        "nn.LayerNorm": (lambda: nn.LayerNorm(8), SEQUENCE),
        "nn.RMSNorm": (lambda: nn.RMSNorm(8), SEQUENCE),
        "nn.GroupNorm": (lambda: nn.GroupNorm(2, 4), IMAGE),
        "nn.BatchNorm1d": (lambda: nn.BatchNorm1d(8), VECTOR),
        "nn.BatchNorm2d": (lambda: nn.BatchNorm2d(4), IMAGE),
        "nn.BatchNorm3d": (lambda: nn.BatchNorm3d(2), VOLUME),
        "nn.InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), SEQUENCE),
        "nn.InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), IMAGE),
        "nn.InstanceNorm3d": (lambda: nn.InstanceNorm3d(2), VOLUME),
        "nn.Conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), SEQUENCE),
        "nn.Conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2), IMAGE),
        "nn.Conv2d (groups)": (lambda: nn.Conv2d(4, 8, 3, groups=4), IMAGE),
        "nn.Conv2d (dilation)": (lambda: nn.Conv2d(4, 6, 3, dilation=2), IMAGE),
        "nn.Conv2d (circular)": (
            lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
            IMAGE,
        ),
        "nn.Conv3d": (lambda: nn.Conv3d(2, 3, 3), VOLUME),
        "nn.ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3), SEQUENCE),
        "nn.ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), IMAGE),
        "nn.ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), VOLUME),
        "nn.MaxPool1d": (lambda: nn.MaxPool1d(2), SEQUENCE),
        "nn.MaxPool2d": (lambda: nn.MaxPool2d(2), IMAGE),
        "nn.MaxPool3d": (lambda: nn.MaxPool3d(2), VOLUME),
        "nn.AvgPool1d": (lambda: nn.AvgPool1d(2), SEQUENCE),
        "nn.AvgPool2d": (lambda: nn.AvgPool2d(3, stride=1, padding=1), IMAGE),
        "nn.AvgPool3d": (lambda: nn.AvgPool3d(2), VOLUME),
        "nn.LPPool2d": (lambda: nn.LPPool2d(2, 2), IMAGE),
        "nn.AdaptiveAvgPool1d": (lambda: nn.AdaptiveAvgPool1d(3), SEQUENCE),
        "nn.AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(3), IMAGE),
        "nn.AdaptiveAvgPool3d": (lambda: nn.AdaptiveAvgPool3d(2), VOLUME),
        "nn.AdaptiveMaxPool1d": (lambda: nn.AdaptiveMaxPool1d(3), SEQUENCE),
        "nn.AdaptiveMaxPool2d": (lambda: nn.AdaptiveMaxPool2d(3), IMAGE),
        "nn.AdaptiveMaxPool3d": (lambda: nn.AdaptiveMaxPool3d(2), VOLUME),
        "nn.MaxUnpool2d": (_unpooled, IMAGE),
        "nn.ReflectionPad1d": (lambda: nn.ReflectionPad1d(2), SEQUENCE),
        "nn.ReflectionPad2d": (lambda: nn.ReflectionPad2d(1), IMAGE),
        "nn.ReflectionPad3d": (lambda: nn.ReflectionPad3d(1), VOLUME),
        "nn.ReplicationPad1d": (lambda: nn.ReplicationPad1d(2), SEQUENCE),
        "nn.ReplicationPad2d": (lambda: nn.ReplicationPad2d(1), IMAGE),
        "nn.ReplicationPad3d": (lambda: nn.ReplicationPad3d(1), VOLUME),
        "nn.CircularPad2d": (lambda: nn.CircularPad2d(1), IMAGE),
        "nn.ConstantPad2d": (lambda: nn.ConstantPad2d(1, 0.5), IMAGE),
        "nn.ZeroPad2d": (lambda: nn.ZeroPad2d(1), IMAGE),
        "nn.RNN": (lambda: nn.RNN(8, 4, batch_first=True), SEQUENCE),
        "nn.GRU": (lambda: nn.GRU(8, 4, batch_first=True), SEQUENCE),
        "nn.LSTM": (lambda: nn.LSTM(8, 4, batch_first=True), SEQUENCE),
        "nn.LSTM (2 layers, both ways)": (
            lambda: nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True),
            SEQUENCE,
        ),
        "nn.RNNCell": (lambda: nn.RNNCell(8, 4), VECTOR),
        "nn.GRUCell": (lambda: nn.GRUCell(8, 4), VECTOR),
        "nn.LSTMCell": (lambda: nn.LSTMCell(8, 4), VECTOR),
        "nn.MultiheadAttention": (_Attention, SEQUENCE),
        "nn.TransformerEncoderLayer": (
            lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
            SEQUENCE,
        ),
        "nn.TransformerDecoderLayer": (_Decoder, SEQUENCE),
        "weight_norm": (
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)),
            VECTOR,
        ),
        "spectral_norm": (
            lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3)),
            VECTOR,
        ),
        "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 3)), VECTOR),
        "nn.AdaptiveLogSoftmaxWithLoss (log_prob)": (
            lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 9, [3, 6]).log_prob,
            VECTOR,
        ),
    }
    return m


def _unpooled() -> Callable[..., Any]:
    pool, unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
    return lambda x: unpool(*pool(x))


_FUNCTIONS: Mapping[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "F.normalize": (lambda x: F.normalize(x, dim=-1), VECTOR),
    "F.interpolate (bicubic)": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), IMAGE),
    "F.interpolate (area)": (lambda x: F.interpolate(x, size=(4, 4), mode="area"), IMAGE),
    "F.interpolate (antialias)": (
        lambda x: F.interpolate(x, size=(4, 4), mode="bilinear", antialias=True),
        IMAGE,
    ),
    "F.grid_sample": (
        lambda x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False),
        IMAGE,
    ),
    "F.affine_grid": (lambda x: F.affine_grid(x, [x.shape[0], 2, 3, 3], False), (2, 3)),
    "F.scaled_dot_product_attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        (2, 4, 8),
    ),
    "F.gumbel_softmax (eval of softmax)": (lambda x: F.softmax(x / 0.5, -1), VECTOR),
    "F.pad (reflect)": (lambda x: F.pad(x, (1, 2), mode="reflect"), SEQUENCE),
    "F.one_hot": (lambda x: x * F.one_hot(x.argmax(-1), x.shape[-1]), VECTOR),
    "torch.cumsum": (lambda x: x.cumsum(-1), SEQUENCE),
    "torch.cumprod": (lambda x: x.cumprod(-1), SEQUENCE),
    "torch.logcumsumexp": (lambda x: x.logcumsumexp(-1), SEQUENCE),
    "torch.cummax": (lambda x: x.cummax(-1)[0], SEQUENCE),
    "torch.prod": (lambda x: x.prod(-1), SEQUENCE),
    "torch.var": (lambda x: x.var(-1), SEQUENCE),
    "torch.std": (lambda x: x.std((1, 2)), SEQUENCE),
    "torch.amax": (lambda x: x.amax(-1), SEQUENCE),
    "torch.max (dim)": (lambda x: x.max(-1)[0], SEQUENCE),
    "torch.median": (lambda x: x.median(-1)[0], SEQUENCE),
    "torch.nanmedian": (lambda x: x.nanmedian(-1)[0], SEQUENCE),
    "torch.quantile": (lambda x: x.quantile(0.3, dim=-1), SEQUENCE),
    "torch.mode": (lambda x: x.mode(-1)[0], SEQUENCE),
    "torch.kthvalue": (lambda x: x.kthvalue(2, -1)[0], SEQUENCE),
    "torch.sort": (lambda x: x.sort(-1)[0], SEQUENCE),
    "torch.argsort": (lambda x: x.gather(-1, x.argsort(-1)), SEQUENCE),
    "torch.topk": (lambda x: x.topk(2, -1)[0], SEQUENCE),
    "torch.logsumexp": (lambda x: x.logsumexp(-1), SEQUENCE),
    "torch.norm": (lambda x: x.norm(dim=-1), SEQUENCE),
    "torch.renorm": (lambda x: x.renorm(2, 0, 1.0), SEQUENCE),
    "torch.nansum": (lambda x: x.nansum(-1), SEQUENCE),
    "torch.diagonal": (lambda x: x.diagonal(0, -2, -1), MATRIX),
    "torch.diag_embed": (lambda x: x.diag_embed(), VECTOR),
    "torch.tril": (lambda x: x.tril(), MATRIX),
    "torch.triu": (lambda x: x.triu(1), MATRIX),
    "torch.roll": (lambda x: x.roll(1, -1), SEQUENCE),
    "torch.flip": (lambda x: x.flip(-1), SEQUENCE),
    "torch.rot90": (lambda x: x.rot90(1, (1, 2)), MATRIX),
    "torch.unfold": (lambda x: x.unfold(-1, 3, 2), SEQUENCE),
    "torch.einsum": (lambda x: torch.einsum("bij,bkj->bik", x, x), SEQUENCE),
    "torch.cdist": (lambda x: torch.cdist(x, x.flip(1) + 0.5), SEQUENCE),
    "torch.gather": (lambda x: x.gather(-1, x.argsort(-1)[..., :3]), SEQUENCE),
    "torch.scatter": (
        lambda x: torch.zeros_like(x).scatter(-1, x.argsort(-1), x.sin()),
        SEQUENCE,
    ),
    "torch.scatter_add": (
        lambda x: torch.zeros_like(x).scatter_add(-1, x.argmax(-1, True), x[..., :1]),
        SEQUENCE,
    ),
    "torch.scatter_reduce": (
        lambda x: torch.zeros_like(x).scatter_reduce(-1, x.argsort(-1) // 2, x, "amax"),
        SEQUENCE,
    ),
    "torch.index_add": (
        lambda x: torch.zeros_like(x).index_add(1, torch.tensor([0, 2, 2, 1]), x),
        SEQUENCE,
    ),
    "torch.index_select": (lambda x: x.index_select(1, torch.tensor([3, 0])), SEQUENCE),
    "torch.index_copy": (
        lambda x: torch.zeros_like(x).index_copy(1, torch.tensor([1, 0]), x[:, :2]),
        SEQUENCE,
    ),
    "torch.index_fill": (lambda x: x.index_fill(1, torch.tensor([1, 3]), 0.5), SEQUENCE),
    "torch.masked_fill": (lambda x: x.masked_fill(x > 0, 0.5), SEQUENCE),
    "torch.where": (lambda x: torch.where(x > 0, x, x.exp()), SEQUENCE),
    "torch.take_along_dim": (lambda x: x.take_along_dim(x.argsort(1), 1), SEQUENCE),
    "torch.searchsorted": (
        lambda x: x * torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]), x.detach()),
        SEQUENCE,
    ),
    "torch.bucketize": (
        lambda x: x * torch.bucketize(x.detach(), torch.tensor([-1.0, 0.0, 1.0])),
        SEQUENCE,
    ),
    "torch.fft.fft": (lambda x: torch.fft.fft(x), SEQUENCE),
    "torch.fft.ifft": (lambda x: torch.fft.ifft(x), SEQUENCE),
    "torch.fft.rfft": (lambda x: torch.fft.rfft(x), SEQUENCE),
    "torch.fft.irfft": (lambda x: torch.fft.irfft(torch.fft.rfft(x)), SEQUENCE),
    "torch.fft.fft2": (lambda x: torch.fft.fft2(x).abs(), IMAGE),
    "torch.fft.fftshift": (lambda x: torch.fft.fftshift(x, -1), SEQUENCE),
    "torch.stft": (
        lambda x: torch.stft(x, 8, return_complex=True, window=torch.ones(8)).abs(),
        (32,),
    ),
    "torch.complex": (lambda x: torch.complex(x, x.sin()) * torch.complex(x.cos(), x), SEQUENCE),
    "torch.view_as_complex": (lambda x: torch.view_as_complex(x.view(-1, 4, 4, 2)).exp(), SEQUENCE),
    "torch.polar": (lambda x: torch.polar(x.exp(), x), SEQUENCE),
    "torch.linalg.inv": (lambda x: torch.linalg.inv(_spd(x)), MATRIX),
    "torch.linalg.solve": (lambda x: torch.linalg.solve(_spd(x), x), MATRIX),
    "torch.linalg.cholesky": (lambda x: torch.linalg.cholesky(_spd(x)), MATRIX),
    "torch.linalg.det": (lambda x: torch.linalg.det(x), MATRIX),
    "torch.linalg.slogdet": (lambda x: torch.linalg.slogdet(x)[1], MATRIX),
    "torch.linalg.eigh": (lambda x: torch.linalg.eigh(_spd(x))[0], MATRIX),
    "torch.linalg.svd": (lambda x: torch.linalg.svd(x)[1], MATRIX),
    "torch.linalg.qr": (lambda x: torch.linalg.qr(x)[1].abs(), MATRIX),
    "torch.linalg.pinv": (lambda x: torch.linalg.pinv(_spd(x)), MATRIX),
    "torch.linalg.matrix_exp": (lambda x: torch.linalg.matrix_exp(x), MATRIX),
    "torch.linalg.matrix_power": (lambda x: torch.linalg.matrix_power(x, 3), MATRIX),
    "torch.linalg.matrix_norm": (lambda x: torch.linalg.matrix_norm(x), MATRIX),
    "torch.linalg.vector_norm": (lambda x: torch.linalg.vector_norm(x, 3, dim=-1), MATRIX),
    "torch.linalg.cross": (lambda x: torch.linalg.cross(x, x.flip(-1)), (4, 3)),
    "torch.linalg.solve_triangular": (
        lambda x: torch.linalg.solve_triangular(_spd(x).tril(), x, upper=False),
        MATRIX,
    ),
    "torch.linalg.multi_dot": (lambda x: torch.vmap(lambda m: m @ m.T @ m)(x), MATRIX),
    "torch.trace of a sample": (lambda x: torch.vmap(torch.trace)(x), MATRIX),
    "torch.kron of a sample": (lambda x: torch.vmap(torch.kron)(x, x), MATRIX),
    "torch.trapezoid": (lambda x: torch.trapezoid(x), SEQUENCE),
    "torch.diff": (lambda x: x.diff(dim=-1), SEQUENCE),
    "torch.lerp": (lambda x: torch.lerp(x, x.sin(), 0.3), SEQUENCE),
    "torch.erfinv": (lambda x: torch.erfinv(x.tanh() * 0.9), SEQUENCE),
    "torch.lgamma": (lambda x: torch.lgamma(x.exp() + 1), SEQUENCE),
    "torch.digamma": (lambda x: torch.digamma(x.exp() + 1), SEQUENCE),
    "torch.special.i0": (lambda x: torch.special.i0(x), SEQUENCE),
    "torch.xlogy": (lambda x: torch.xlogy(x, x.exp()), SEQUENCE),
    "torch.hypot": (lambda x: torch.hypot(x, x + 1), SEQUENCE),
    "torch.logit": (lambda x: torch.logit(x.sigmoid(), 1e-6), SEQUENCE),
    "torch.sinc": (lambda x: torch.sinc(x), SEQUENCE),
    "torch.cat": (lambda x: torch.cat([x, x.sin()], 1), SEQUENCE),
    "torch.stack": (lambda x: torch.stack([x, x.sin()], 1), SEQUENCE),
    "torch.repeat_interleave": (lambda x: x.repeat_interleave(2, 1), SEQUENCE),
    "torch.tensordot": (lambda x: torch.tensordot(x, torch.ones(8, 3), 1), SEQUENCE),
    "torch.meshgrid of a sample": (
        lambda x: torch.vmap(lambda v: torch.meshgrid(v, v, indexing="ij")[0] * v)(x),
        VECTOR,
    ),
    "torch.combinations of a sample": (
        lambda x: torch.vmap(lambda v: torch.outer(v, v).triu(1))(x),
        VECTOR,
    ),
    "torch.count_nonzero": (lambda x: x * torch.count_nonzero(x > 0, -1)[..., None], SEQUENCE),
    "torch.histc of all": (lambda x: x * torch.histc(x.detach(), 4, -1, 1).mean(), SEQUENCE),
    "torch.multinomial": (
        lambda x: x.gather(-1, torch.multinomial(x.detach().exp(), 1)) * 0 + x[:, :1],
        VECTOR,
    ),
}

_WITH_TARGETS: Mapping[str, tuple[Callable[[], Callable[..., Any]], tuple[int, ...], Target]] = {
    "nn.L1Loss": (nn.L1Loss, VECTOR, numbers(8)),
    "nn.MSELoss": (nn.MSELoss, VECTOR, numbers(8)),
    "nn.SmoothL1Loss": (nn.SmoothL1Loss, VECTOR, numbers(8)),
    "nn.HuberLoss": (lambda: nn.HuberLoss(delta=0.5), VECTOR, numbers(8)),
    "nn.BCEWithLogitsLoss": (nn.BCEWithLogitsLoss, VECTOR, chances(8)),
    "nn.KLDivLoss": (
        lambda: lambda x, y: F.kl_div(x.log_softmax(-1), y, reduction="batchmean"),
        VECTOR,
        distribution(8),
    ),
    "nn.KLDivLoss (mean)": (
        lambda: lambda x, y: nn.KLDivLoss()(x.log_softmax(-1), y),
        VECTOR,
        distribution(8),
    ),
    "nn.CrossEntropyLoss": (nn.CrossEntropyLoss, VECTOR, classes(8)),
    "nn.CrossEntropyLoss (smoothed)": (
        lambda: nn.CrossEntropyLoss(label_smoothing=0.1),
        VECTOR,
        classes(8),
    ),
    "nn.CrossEntropyLoss (chances)": (nn.CrossEntropyLoss, VECTOR, distribution(8)),
    "nn.CrossEntropyLoss (pixels)": (nn.CrossEntropyLoss, IMAGE, classes(4, 8, 8)),
    "nn.CrossEntropyLoss (time)": (nn.CrossEntropyLoss, SEQUENCE, classes(4, 8)),
    "nn.NLLLoss": (lambda: lambda x, y: F.nll_loss(x.log_softmax(1), y), VECTOR, classes(8)),
    "nn.NLLLoss (time)": (
        lambda: lambda x, y: F.nll_loss(x.log_softmax(1), y),
        SEQUENCE,
        classes(4, 8),
    ),
    "nn.NLLLoss (pixels)": (
        lambda: lambda x, y: F.nll_loss(x.log_softmax(1), y),
        IMAGE,
        classes(4, 8, 8),
    ),
    "nn.PoissonNLLLoss": (nn.PoissonNLLLoss, VECTOR, chances(8)),
    "nn.GaussianNLLLoss": (
        lambda: lambda x, y: F.gaussian_nll_loss(x, y, x.exp()),
        VECTOR,
        numbers(8),
    ),
    "nn.SoftMarginLoss": (nn.SoftMarginLoss, VECTOR, signs(8)),
    "nn.MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss, VECTOR, chances(8)),
    "nn.MultiLabelMarginLoss": (nn.MultiLabelMarginLoss, VECTOR, classes(8, 8)),
    "nn.MultiMarginLoss": (nn.MultiMarginLoss, VECTOR, classes(8)),
    "nn.HingeEmbeddingLoss": (nn.HingeEmbeddingLoss, VECTOR, signs(8)),
    "nn.MarginRankingLoss": (
        lambda: lambda x, y: F.margin_ranking_loss(x[:, 0], x[:, 1], y, 0.1),
        VECTOR,
        signs(),
    ),
    "nn.CosineEmbeddingLoss": (
        lambda: lambda x, y: F.cosine_embedding_loss(x, x.flip(-1), y, 0.1),
        VECTOR,
        signs(),
    ),
    "nn.TripletMarginLoss": (
        lambda: lambda x, y: F.triplet_margin_loss(x, y, x.flip(-1)),
        VECTOR,
        numbers(8),
    ),
    "nn.CosineSimilarity": (lambda: nn.CosineSimilarity(-1), SEQUENCE, numbers(4, 8)),
    "nn.PairwiseDistance": (nn.PairwiseDistance, VECTOR, numbers(8)),
    "nn.CTCLoss": (lambda: _ctc, (6, 5), lambda g, n: torch.randint(1, 5, (n, 2), generator=g)),
    "nn.Bilinear": (lambda: nn.Bilinear(8, 8, 3), VECTOR, numbers(8)),
    "nn.Embedding": (_Table, (4, 8), classes(7, 4)),
    "nn.Embedding (max_norm)": (lambda: _Table(max_norm=1.0), (4, 8), classes(7, 4)),
    "nn.EmbeddingBag (mean)": (lambda: _Bag("mean"), VECTOR, classes(7, 3)),
    "nn.EmbeddingBag (sum)": (lambda: _Bag("sum"), VECTOR, classes(7, 3)),
    "nn.EmbeddingBag (max)": (lambda: _Bag("max"), VECTOR, classes(7, 3)),
    "nn.AdaptiveLogSoftmaxWithLoss": (
        lambda: _Both(nn.AdaptiveLogSoftmaxWithLoss(8, 9, [3, 6])),
        VECTOR,
        classes(9),
    ),
}


def _all_cases() -> dict[str, Case]:
    made = [Case(name, make, shape) for name, (make, shape) in _plain_modules().items()]
    made += [Case(name, partial(_same, f), shape) for name, (f, shape) in _FUNCTIONS.items()]
    made += [Case(name, *given) for name, given in _WITH_TARGETS.items()]
    made += [Case("nn.BCELoss", nn.BCELoss, VECTOR, chances(8), positive=True)]
    return {case.name: case for case in made}


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


CASES: Mapping[str, Case] = _all_cases()
