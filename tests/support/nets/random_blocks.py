# ruff: noqa: E501, RUF059, UP031, F541, SIM905 (rows of tables)
# fmt: off
"""Blocks that random models are made of: tables of expressions, statements and layers.

A running value `x` has a shape without its batch: (F,) features, (T, C) a sequence, (C, H, W) an
image.  A block writes lines that turn it into the next `x`, and gives its shape.  Rows of the tables
keep the shape; `{n}` in them is the size of the last dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

Shape = tuple[int, ...]


class Skip(Exception):
    """The block does not fit here."""


@dataclass
class Writer:
    """Lines of one module's class; draws come from `rng`.

    tops: definitions in front of all classes, by name.  used: rows and blocks, for the statistics.
    """

    rng: Random
    tops: dict[str, str]
    used: list[str]
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def do(self, *lines: str) -> None:
        """Lines of forward."""
        self.body += lines

    def made(self, base: str, expression: str) -> str:
        """`self.NAME = expression` in the constructor; the name."""
        name = self._name(base)
        self.init.append(f"self.{name} = {expression}")
        return name

    def layer(self, base: str, expression: str, call: str = "x = self.{0}(x)") -> str:
        name = self.made(base, expression)
        self.do(call.format(name))
        return name

    def parameter(self, base: str, expression: str, more: str = "") -> str:
        """Sometimes called as an op is."""
        if self.rng.random() < 0.25:
            base = self.rng.choice(OP_NAMES)
        return self.made(base, f"nn.Parameter({expression}{more})")

    def buffer(self, base: str, expression: str) -> str:
        if self.rng.random() < 0.25:
            base = self.rng.choice(OP_NAMES)
        name, rest = self._name(base), ", persistent=False" * (self.rng.random() < 0.15)
        self.init.append(f'self.register_buffer("{name}", {expression}{rest})')
        return name

    def _name(self, base: str) -> str:
        k, name = 0, base
        while name in self.names:
            k, name = k + 1, f"{base}{k}"
        self.names.add(name)
        return name

    def top(self, name: str, source: str) -> str:
        self.tops[name] = source
        return name

    def flip(self, p: float = 0.5) -> bool:
        return self.rng.random() < p

    def pick(self, *values: object) -> object:
        return self.rng.choice(values)

    def size(self, *sizes: int) -> int:
        return self.rng.choice(sizes or (3, 4, 5, 6, 8))

    def divisor(self, n: int) -> int:
        """Of n; over 1 where there is one that is modest."""
        return self.rng.choice([d for d in range(1, n + 1) if n % d == 0 and d <= 8])


Block = Callable[[Writer, Shape], Shape]
OP_NAMES = (
    "mean std add mul sum sub relu exp scale_ norm_ x_ view alias clone div var softmax full arange "
    "loss tangent output batch addmm getitem convolution weight_ input self_ model step lr grad"
).split()  # names of ops and of flowrun's own tensors
BLOCKS: dict[str, tuple[tuple[int, ...], Block]] = {}


def block(*dims: int) -> Callable[[Block], Block]:
    """For values of so many dims beside the batch."""

    def added(function: Block) -> Block:
        BLOCKS[function.__name__] = (dims, function)
        return function

    return added


def candidates(dims: int) -> list[str]:
    return [name for name, (fits, _) in BLOCKS.items() if dims in fits]


# ---- expressions and statements that keep the shape ----------------------------------------------

ELEMENTWISE = """
F.relu(x)
F.gelu(x)
F.gelu(x, approximate="tanh")
F.silu(x)
F.elu(x)
F.selu(x)
F.celu(x, 0.7)
F.leaky_relu(x, 0.2)
F.softplus(x)
F.softsign(x)
F.mish(x)
F.hardtanh(x)
F.hardswish(x)
F.hardsigmoid(x)
F.relu6(x)
F.logsigmoid(x)
F.tanhshrink(x)
F.softshrink(x, 0.1)
F.hardshrink(x, 0.1)
F.threshold(x, 0.1, 0.0)
torch.tanh(x)
torch.sigmoid(x) * x
torch.sin(x) + torch.cos(x)
torch.atan(x)
torch.erf(x)
torch.exp(-x * x)
torch.expm1(x.clamp(max=1.0))
torch.log1p(x.abs())
(x * x + 1).sqrt()
(x * x + 1).rsqrt() * x
(x.abs() + 1).reciprocal()
x.clamp(-1, 1)
x.abs()
-x
x.sign() * x
x.pow(2) * 0.5
x.pow(3) * 0.1
(x.abs() + 0.5) ** 1.5
x.square().neg()
torch.sinh(x.clamp(-1, 1))
torch.where(x > 0, x, 0.1 * x)
x.masked_fill(x < -0.5, 0.1)
torch.addcmul(x, x, x.tanh(), value=0.1)
torch.addcdiv(x, x, x * x + 1, value=0.5)
torch.lerp(x, x.tanh(), 0.3)
torch.maximum(x, x.sin())
torch.minimum(x, x.cos())
torch.fmod(x, 2.0)
torch.remainder(x, 2.0) + x
torch.nan_to_num(x)
torch.hypot(x, x + 1.0)
torch.atan2(x, x * x + 1)
torch.logaddexp(x, x * 0.5)
torch.frac(x) + x
x + x.round().detach()
x.to(torch.float64).tanh().to(x.dtype)
x.float().sigmoid().to(x.dtype) + x
x.detach() * 0.5 + x
x + torch.ones_like(x)
x + torch.zeros_like(x).fill_(0.5)
x + x.new_full((1,), 0.25)
x * torch.tensor(0.5, dtype=x.dtype)
x * 3 / 2
2 - x
1.0 / (x * x + 1)
x // 1 * 0.1 + x
(x > 0).to(x.dtype) * x
x * (x > 0) + x * (x < -1)
x.logical_not().to(x.dtype) + x
torch.complex(x, x.cos()).abs()
torch.polar(x.abs() + 1, x).real
torch.heaviside(x.detach(), x.new_tensor(0.5)) + x
torch.special.expit(x) + x
torch.special.i0e(x)
torch.digamma(x.abs() + 2) * 0.1 + x
torch.lgamma(x.abs() + 2) * 0.1
torch.xlogy(x, x * x + 1)
torch.sinc(x * 0.3)
torch.copysign(x, x.flip(-1))
torch.clamp(x, min=x.detach() - 0.5, max=x.new_tensor(1.0))
torch.clip(x, -2, 2)
torch.sub(x, x.tanh(), alpha=0.5)
torch.rsub(x, 1.0)
torch.true_divide(x, 3)
torch.deg2rad(x * 20)
F.dropout(x, 0.0, self.training)
F.dropout(x, 0.5, False)
F.alpha_dropout(x, 0.0, self.training)
torch.square(x).add(1).log()
x if self.training else x * 100
"""
ALONG = """
x.softmax(-1)
F.log_softmax(x, -1) * 0.2
F.softmin(x, dim=-1)
F.normalize(x, dim=-1)
F.normalize(x, p=1.0, dim=-1)
x.roll(1, -1)
x.flip(-1)
x.cumsum(-1) / {n}
torch.cumprod(torch.tanh(x) + 1, -1)
x.cummax(-1).values
torch.logcumsumexp(x, -1) * 0.3
x.sort(-1).values
x.sort(-1, descending=True)[0]
x.msort().neg()
x.gather(-1, x.argsort(-1))
x - x.mean(-1, keepdim=True)
x + x.amax(-1, keepdim=True)
x + x.max(-1, keepdim=True).values
x - x.min(-1, keepdim=True)[0]
x + x.median(-1, keepdim=True).values
x + x.logsumexp(-1, keepdim=True)
x * x.norm(dim=-1, keepdim=True)
x * torch.linalg.vector_norm(x + 1, ord=3, dim=-1, keepdim=True) * 0.3
x / (x.abs().sum(-1, keepdim=True) + 1)
x * x.var(-1, keepdim=True, correction=0)
x * torch.std(x, -1, keepdim=True)
x + torch.var_mean(x, -1, keepdim=True)[1]
x + x.prod(-1, keepdim=True).tanh()
x + x.quantile(0.5, -1, keepdim=True)
x + F.one_hot(x.argmax(-1), {n}).to(x.dtype)
torch.stack([x, x.tanh()]).mean(0)
torch.stack([x, x.sin()], -1).sum(-1)
torch.stack([x, x.sin()], -1).flatten(-2)[..., ::2]
torch.cat([x[..., 1:], x[..., :1]], -1)
torch.cat([x, x.tanh()], -1)[..., :{n}]
torch.cat(torch.tensor_split(x, 2, -1)[::-1], -1)
torch.cat(x.unbind(-1), 0).view({n}, *x.shape[:-1]).movedim(0, -1)
x.chunk(2, -1)[0].sum(-1, keepdim=True) + x
F.pad(x, (1, 0))[..., :-1]
F.pad(x, (1, 1), value=0.5)[..., 1:-1]
x[..., torch.arange({n} - 1, -1, -1)]
x.index_select(-1, torch.arange({n}).flip(0))
torch.take_along_dim(x, x.argsort(-1), -1)
x.repeat_interleave(2, -1)[..., ::2]
x.unsqueeze(-1).expand(*x.shape, 2).mean(-1)
x.tile((2,))[..., :{n}]
x.unfold(-1, 1, 1).squeeze(-1)
x.diff(dim=-1, prepend=x[..., :1])
x.topk(1, -1).values + x
x @ torch.eye({n}, dtype=x.dtype)
torch.einsum("...i,ij->...j", x, torch.ones({n}, {n}, dtype=x.dtype).triu() / {n})
torch.fft.irfft(torch.fft.rfft(x), {n})
torch.fft.fft(x).real * 0.3
F.cosine_similarity(x, x.flip(-1), -1).unsqueeze(-1) + x
F.pairwise_distance(x, x.sin(), keepdim=True) + x
torch.searchsorted(torch.linspace(-1, 1, 5, dtype=x.dtype), x.detach()).to(x.dtype) * 0.1 + x
torch.bucketize(x.detach(), torch.linspace(-1, 1, 4, dtype=x.dtype)).to(x.dtype) + x
torch.scatter(torch.zeros_like(x), -1, x.argsort(-1), x)
torch.zeros_like(x).scatter_add(-1, x.argmax(-1, keepdim=True), x[..., :1]) + x
x.index_add(-1, torch.tensor([0]), x[..., -1:])
x.index_copy(-1, torch.tensor([0]), x[..., -1:].tanh())
x.index_fill(-1, torch.tensor([0]), 0.5)
x.select_scatter(x[..., 0].tanh(), -1, 0)
x.slice_scatter(x[..., :1] * 2, -1, 0, 1)
torch.trapezoid(x, dim=-1).unsqueeze(-1) + x
x.renorm(2, 0, 1.0)
torch.aminmax(x, dim=-1, keepdim=True)[1] - x
torch.kthvalue(x, 1, -1, keepdim=True)[0] + x
torch.count_nonzero(x > 0, -1).unsqueeze(-1).to(x.dtype) * 0.1 + x
(x.argmin(-1, keepdim=True) == torch.arange({n})).to(x.dtype) + x
torch.isfinite(x).all(-1, keepdim=True).to(x.dtype) * x
F.layer_norm(x, ({n},))
F.rms_norm(x, ({n},))
torch.swapaxes(x.unsqueeze(1), 0, 1)[0]
x.reshape(-1, {n}).view(x.shape)
x.view(*x.shape).contiguous()
x.transpose(0, -1).contiguous().transpose(0, -1)
x.clone(memory_format=torch.contiguous_format)
x.as_strided(x.size(), x.stride()) if False else x
x.new_zeros(x.shape[0], *[1] * (x.dim() - 1)) + x
torch.broadcast_to(x[..., :1], x.shape) + x
torch.outer(x.new_ones(1), x.flatten()).view(x.shape)
"""
BATCHWISE = """
x - x.mean(0, keepdim=True)
x - x.mean()
x / (x.std() + 1)
x / (x.std(0, keepdim=True) + 1)
(x - x.mean(0)) * torch.rsqrt(x.var(0, unbiased=False) + 0.1)
x + x.flip(0)
x + x.roll(1, 0)
x + x[:1]
x + x[-1]
x + x.amax(0)
x + x.detach().max() * 0.1
x.cumsum(0) / x.shape[0]
x.sort(0)[0]
x * x.softmax(0)
x * x.norm() * 0.1
torch.cat([x[1:], x[:1]])
torch.cat([x[::2], x[1::2]])
x[torch.arange(x.shape[0] - 1, -1, -1)]
x.index_select(0, x.flatten(1).sum(1).argsort())
x[x.flatten(1).sum(1).argsort(descending=True)]
x + (x.flatten(1) @ x.flatten(1).t()).mean(1).view(-1, *[1] * (x.dim() - 1)) * 0.1
x + torch.cdist(x.flatten(1), x.flatten(1) + 1).mean(1).view(-1, *[1] * (x.dim() - 1)) * 0.1
x + torch.arange(x.shape[0], dtype=x.dtype).view(-1, *[1] * (x.dim() - 1)) * 0.1
x * x.shape[0] / 4
x + x.sum(0) / len(x)
torch.stack([s * 2 for s in x])
torch.stack(x.unbind(0)[::-1])
x * torch.sigmoid(x.mean((0, -1), keepdim=True))
x - torch.logsumexp(x.flatten(), 0) * 0.1
torch.vmap(lambda s: s * s.mean())(x)
x + F.batch_norm(x.flatten(1), None, None, training=True).view(x.shape)
"""
STATEMENTS = (
    ("y = x.clone()", "y[..., 0] = 0.5", "x = y"),
    ("y = x.clone()", "y[:, 0] = x[:, -1].tanh()", "x = y"),
    ("y = x.clone()", "y[y < 0] = 0.1", "x = y"),
    ("y = x * 1.0", "y[y > 0.5] *= 0.5", "x = y"),
    ("y = x.clone()", "y[x[..., 0] > 0] = 0.2", "x = y"),
    ("y = torch.zeros_like(x)", "y[..., :1] = x[..., :1]", "x = x + y"),
    ("y = x.new_zeros(x.shape)", "y[:, ...] = x.sin()", "x = y"),
    ("y = torch.empty_like(x)", "y.copy_(x)", "x = y * 2"),
    ("y = x.clone()", "y[0] = 0.3", "x = y"),
    ("y = x.clone()", "y[::2] = y[::2] * 0.5", "x = y"),
    ("y = x.clone()", "y[:, 0].add_(1.0)", "x = y"),
    ("y = x.clone()", "y[..., :1].mul_(2.0).tanh_()", "x = y"),
    ("x = x * 1.0", "x += 0.1", "x.mul_(0.9)"),
    ("x = x + 0.0", "x.relu_()"),
    ("x = F.relu(x + 0.1, inplace=True)",),
    ("x = x + 0.0", "x.clamp_(-1, 1).add_(x)"),
    ("y = x.clone()", "y.masked_fill_(x > 1, 0.0)", "x = y"),
    ("y = x + 0", "y.masked_scatter_(x > 0, x.flip(-1))", "x = y"),
    ("y = x.clone()", "y.index_put_((torch.tensor([0]),), x.new_tensor(0.3))", "x = y"),
    ("y = x.clone()", "y.index_put_((torch.tensor([0, 0]),), x[:1] * 0.1, accumulate=True)", "x = y"),
    ("y = x.clone()", "y.scatter_(-1, x.argmax(-1, keepdim=True), 0.0)", "x = y"),
    ("y = x.clone()", "y.index_add_(-1, torch.tensor([0]), x[..., -1:])", "x = y"),
    ("y = x.clone()", "y.fill_(0.5)", "x = x + y"),
    ("y = x.clone()", "y.zero_()", "y += x", "x = y"),
    ("y = x.clone()", "y.diagonal(dim1=0, dim2=-1).mul_(0.5)", "x = y"),
    ("y = x.clone()", "y.view(-1)[:2] = 0.5", "x = y"),
    ("y = x.detach().clone()", "y.requires_grad_(False)", "x = x + y * 0.1"),
    ("a, b = x[..., :1], x[..., 1:]", "x = torch.cat([b, a], -1)"),
    ("a, b = x.split([1, {n} - 1], -1)", "x = torch.cat([b.tanh(), a], -1)"),
    ("h = x", "for k in range(3):", "    h = h + 0.1 * torch.sin(h * (k + 1))", "x = h"),
    ("parts = []", "for k in range({n}):", "    parts.append(x[..., k] * (k + 1))", "x = torch.stack(parts, -1)"),
    ("h = {{'a': x, 'b': x.tanh()}}", "x = sum(v for _, v in sorted(h.items()))"),
    ("f = lambda v, s=0.5: v * s + 1", "x = f(f(x), s=0.2)"),
    ("if x.shape[-1] > 4:", "    x = x * 0.5", "else:", "    x = x.tanh()"),
    ("if self.training and x.dim() > 1:", "    x = x * 1.5"),
    ("with torch.no_grad():", "    m = x.mean(-1, keepdim=True)", "x = x - m"),
    ("with torch.no_grad():", "    k = (x > 0).to(x.dtype)", "x = x * k + 0.1 * x"),
    ("with torch.autograd.set_grad_enabled(True):", "    x = x.tanh()"),
    ("x = torch.utils.checkpoint.checkpoint(lambda v: v.tanh() * v, x, use_reentrant=False)",),
    ("try:", "    x = x.sin()", "finally:", "    pass"),
    ("n, *rest = x.shape", "x = x.reshape(n, -1).tanh().reshape(n, *rest)"),
    ("assert x.shape[0] > 0, 'empty'", "x = x * 2"),
    ("torch._assert(x.dim() > 1, 'dims')", "x = x + 1"),
    ("x, y = x.tanh(), x.sin()", "x = x * y"),
    ("y: torch.Tensor = x", "y = y.mul(0.5)", "x = x.sub(y)"),
    ("x = x.type(torch.float64).exp().clamp(max=3.0).type_as(x)",),
    ("from functools import reduce", "x = reduce(torch.add, [x, x.sin(), x.cos()])"),
    ("import math", "x = x * math.sqrt(2.0) / math.pi"),
    ("g = torch.full((1,), 0.3, dtype=x.dtype)", "g[0] = 0.7", "x = x * g"),
    ("i = torch.arange(x.shape[0])", "x = x[i] + x[i.flip(0)] * 0.1"),
    ("mask = torch.ones_like(x, dtype=torch.bool)", "mask[..., 0] = False", "x = torch.where(mask, x, x.new_zeros(()))"),
    ("keep = x.detach() > 0", "x = x * keep / keep.to(x.dtype).mean().clamp(min=0.1)"),
    ("import random as r", "x = x * 1.0"),
    ("y = x.sum(dtype=torch.float64).to(x.dtype)", "x = x + 0.01 * y"),
    ("x = torch.special.log_softmax(x, -1).exp()",),
)
TABLES = {"elementwise": ELEMENTWISE, "along": ALONG, "batchwise": BATCHWISE}


def _row(w: Writer, s: Shape, table: str) -> Shape:
    row = w.rng.choice(TABLES[table].strip().splitlines())
    w.used.append(row)
    w.do(f"x = {row.replace('{n}', str(s[-1]))}")
    return s


@block(1, 2, 3)
def elementwise(w: Writer, s: Shape) -> Shape:
    return _row(w, s, "elementwise")


@block(1, 2, 3)
def along(w: Writer, s: Shape) -> Shape:
    return _row(w, s, "along")


@block(1, 2, 3)
def along_another_dim(w: Writer, s: Shape) -> Shape:
    if len(s) < 2 or s[0] < 2:
        raise Skip
    w.do("x = x.transpose(1, -1)")
    _row(w, (s[-1], *s[1:-1], s[0]), "along")
    w.do("x = x.transpose(1, -1)")
    return s


@block(1, 2, 3)
def batchwise(w: Writer, s: Shape) -> Shape:
    return _row(w, s, "batchwise")


@block(1, 2, 3)
def statements(w: Writer, s: Shape) -> Shape:
    lines = w.rng.choice(STATEMENTS)
    w.used.append("; ".join(lines))
    w.do(*(line.replace("{n}", str(s[-1])).replace("{{", "{").replace("}}", "}") for line in lines))
    return s


# ---- layers --------------------------------------------------------------------------------------


@block(1, 2, 3)
def linear(w: Writer, s: Shape) -> Shape:
    out = w.size()
    w.layer("linear", f"nn.Linear({s[-1]}, {out}, bias={w.flip(0.7)})")
    return (*s[:-1], out)


@block(1, 2)
def mlp(w: Writer, s: Shape) -> Shape:
    h, act = w.size(6, 8, 12), w.pick("GELU", "ReLU", "SiLU", "Tanh", "Softplus", "PReLU", "Mish")
    w.layer("mlp", f"nn.Sequential(nn.Linear({s[-1]}, {h}), nn.{act}(), nn.Linear({h}, {s[-1]}))", w.pick("x = x + self.{0}(x)", "x = self.{0}(x)"))
    return s


@block(1, 2)
def gated(w: Writer, s: Shape) -> Shape:
    out = w.size()
    act = w.pick("torch.sigmoid", "F.gelu", "F.silu", "F.relu")
    a = w.made("up", f"nn.Linear({s[-1]}, {2 * out})")
    w.do(f"a, b = self.{a}(x).chunk(2, -1)", f"x = a * {act}(b)")
    return (*s[:-1], out)


@block(1, 2)
def glu(w: Writer, s: Shape) -> Shape:
    out = w.size()
    w.layer("glu", f"nn.Sequential(nn.Linear({s[-1]}, {2 * out}), nn.GLU())")
    return (*s[:-1], out)


@block(1, 2)
def own_weight(w: Writer, s: Shape) -> Shape:
    out = w.size()
    p = w.parameter("w", f"torch.randn({s[-1]}, {out}) * 0.3")
    w.do(str(w.pick(f"x = x @ self.{p}", f"x = F.linear(x, self.{p}.t())", f'x = torch.einsum("...i,ij->...j", x, self.{p})', f"x = torch.matmul(x, self.{p}.tanh())")))
    return (*s[:-1], out)


@block(1)
def addmm_of_its_own(w: Writer, s: Shape) -> Shape:
    out = w.size()
    p, b = w.parameter("w", f"torch.randn({s[-1]}, {out}) * 0.3"), w.parameter("b", f"torch.randn({out})")
    w.do(f"x = torch.addmm(self.{b}, x, self.{p}, beta=0.5, alpha=2)")
    return (out,)


@block(1)
def bilinear(w: Writer, s: Shape) -> Shape:
    out = w.size()
    w.layer("bilinear", f"nn.Bilinear({s[0]}, {s[0]}, {out})", "x = self.{0}(x, x.tanh())")
    return (out,)


@block(1, 2, 3)
def scale_and_shift(w: Writer, s: Shape) -> Shape:
    shape = w.pick(str(s[-1]), ", ".join(map(str, s)), "1")
    a = w.parameter("scale", f"torch.ones({shape}) + 0.1 * torch.randn({shape})")
    b = w.parameter("shift", f"torch.zeros({shape})", w.pick("", ", requires_grad=True"))
    w.do(f"x = x * self.{a} + self.{b}")
    return s


@block(1, 2, 3)
def scalar_parameter(w: Writer, s: Shape) -> Shape:
    p = w.parameter("logit_scale", str(w.pick("torch.tensor(0.7)", "torch.ones([])", "torch.zeros(()) + 0.2")))
    w.do(str(w.pick(f"x = x * self.{p}.exp()", f"x = x * self.{p}", f"x = x + self.{p} * x.tanh()", f"x = x / (1 + self.{p}.abs())", f"x = torch.where(x > self.{p}, x, self.{p} * x)")))
    return s


@block(1, 2, 3)
def parameter_list(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    a = w.made("ps", f"nn.ParameterList([nn.Parameter(torch.randn({n}) * 0.3) for _ in range(3)])")
    w.do(f"for p in self.{a}:", "    x = x + p * x.tanh()")
    return s


@block(1, 2, 3)
def parameter_dict(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    a = w.made("pd", f'nn.ParameterDict({{"mean": nn.Parameter(torch.randn({n})), "std": nn.Parameter(torch.ones({n}))}})')
    w.do(f'x = (x - self.{a}["mean"]) * self.{a}["std"]')
    return s


@block(1, 2, 3)
def frozen_parameter(w: Writer, s: Shape) -> Shape:
    out = w.size()
    a = w.made("frozen", f"nn.Linear({s[-1]}, {out})")
    w.init.append(str(w.pick(f"self.{a}.requires_grad_(False)", f"self.{a}.weight.requires_grad = False")))
    w.do(f"x = self.{a}(x)")
    return (*s[:-1], out)


@block(1, 2, 3)
def frozen_in_forward(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    a = w.made("teacher", f"nn.Linear({n}, {n})")
    w.do("with torch.no_grad():", f"    t = self.{a}(x)", "x = x + t")
    return s


@block(1, 2, 3)
def detached_weight(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    a = w.made("lin", f"nn.Linear({n}, {n})")
    w.do(f"x = F.linear(x, self.{a}.weight.detach(), self.{a}.bias) + F.linear(x.detach(), self.{a}.weight)")
    return s


@block(1, 2)
def unused_parameter(w: Writer, s: Shape) -> Shape:
    w.made("unused", f"nn.Linear({s[-1]}, 3)")
    w.do("x = x * 1.0")
    return s


@block(1, 2)
def tied(w: Writer, s: Shape) -> Shape:
    h = w.size()
    a, b = w.made("enc", f"nn.Linear({s[-1]}, {h}, bias=False)"), w.made("dec", f"nn.Linear({h}, {s[-1]}, bias=False)")
    how = w.pick("plain", "same")
    if how == "plain":
        w.do(f"x = self.{a}(x).tanh() @ self.{a}.weight + self.{b}(self.{a}(x))")
    else:
        c = w.made("other", f"nn.Linear({s[-1]}, {h}, bias=False)")
        w.init.append(f"self.{c}.weight = self.{a}.weight")
        w.do(f"x = self.{b}(self.{a}(x).relu() + self.{c}(x.tanh()))")
    return s


@block(1, 2)
def shared_module(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    a = w.made("shared", f"nn.Linear({n}, {n})")
    b = w.made("again", f"self.{a}")
    w.do(f"x = self.{b}(torch.relu(self.{a}(x)))")
    return s


@block(1, 2)
def module_list(w: Writer, s: Shape) -> Shape:
    n, k = s[-1], w.size(2, 3, 5)
    a = w.made("layers", f"nn.ModuleList([nn.Linear({n}, {n}) for _ in range({k})])")
    w.do(*w.rng.choice([
        (f"for layer in self.{a}:", "    x = x + layer(x).tanh()"),
        (f"for k, layer in enumerate(self.{a}):", "    x = layer(x) if k % 2 else x + layer(x).relu()"),
        (f"for layer in reversed(self.{a}):", "    x = torch.relu(layer(x))"),
        (f"x = sum(layer(x) for layer in self.{a}) / len(self.{a})",),
        (f"x = torch.stack([layer(x) for layer in self.{a}]).amax(0)",),
        (f"x = self.{a}[-1](self.{a}[0](x).tanh())",),
        (f"hidden = [x]", f"for layer in self.{a}:", "    hidden.append(layer(hidden[-1]).sigmoid())", "x = torch.stack(hidden[1:], -1).mean(-1)"),
    ]))
    return s


@block(1, 2)
def module_dict(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    a = w.made("heads", f'nn.ModuleDict({{"left": nn.Linear({n}, {n}), "mean": nn.Linear({n}, {n})}})')
    w.do(*w.rng.choice([
        (f'x = self.{a}["left"](x) + self.{a}["mean"](x).tanh()',),
        (f"x = sum(head(x) for head in self.{a}.values())",),
        (f"for name, head in self.{a}.items():", "    if name == 'mean':", "        x = x + head(x)"),
    ]))
    return s


@block(1, 2, 3)
def branch_on_attribute(w: Writer, s: Shape) -> Shape:
    flag = w.made("flag", str(w.pick("True", "False", "None", "'gelu'", "3")))
    w.do(f"if self.{flag} == 'gelu':", "    x = F.gelu(x)", f"elif self.{flag}:", "    x = x.tanh()", "else:", "    x = x * 0.5")
    return s


@block(1, 2, 3)
def function_attribute(w: Writer, s: Shape) -> Shape:
    a = w.made("act", str(w.pick("F.relu", "torch.tanh", "nn.GELU()", "functools.partial(F.leaky_relu, negative_slope=0.3)", "lambda v: v * v.sigmoid()", "math.sqrt(2.0)")))
    w.do(f"x = self.{a} * x if isinstance(self.{a}, float) else self.{a}(x)")
    return s


@block(1, 2, 3)
def optional_module(w: Writer, s: Shape) -> Shape:
    a = w.made("maybe", str(w.pick("None", "nn.Identity()", f"nn.Linear({s[-1]}, {s[-1]})")))
    w.do(f"if self.{a} is not None:", f"    x = x + self.{a}(x)")
    return s


# ---- buffers, hooks, functions of one's own ------------------------------------------------------


@block(1, 2, 3)
def constant_buffer(w: Writer, s: Shape) -> Shape:
    shape = w.pick(str(s[-1]), "1", ", ".join(map(str, s)))
    b = w.buffer("offset", f"torch.randn({shape})")
    w.do(str(w.pick(f"x = x + self.{b}", f"x = x * self.{b}", f"x = x - self.{b}.detach().tanh()")))
    return s


@block(1, 2, 3)
def running_buffer(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    b = w.buffer("running", f"torch.zeros({n})")
    red = "x.detach().flatten(0, -2).mean(0)"
    use = w.pick(f"x = x - self.{b}", f"x = x + self.{b}.clone()", "x = x * 1.1")
    lines = w.rng.choice([
        [f"self.{b}.mul_(0.9).add_({red}, alpha=0.1)", use],
        [f"self.{b}.copy_(0.9 * self.{b} + 0.1 * {red})", use],
        [f"self.{b} = 0.9 * self.{b} + 0.1 * {red}", use],
        [f"self.{b}.lerp_({red}, 0.1)", use],
        [f"with torch.no_grad():", f"    self.{b} += {red}", use],
        [f"self.{b}[0] = {red}[0]", use],
        [f"if self.training:", f"    self.{b}.add_(1)", use],
        [use.replace("x =", "y ="), f"self.{b}.data.add_({red})", "x = y"],
        [f"m = self.{b}.mul(0.5) + {red}", f"self.{b}.copy_(m)", f"x = x + m"],
    ])
    w.do(*lines)
    return s


@block(1, 2, 3)
def counting_buffer(w: Writer, s: Shape) -> Shape:
    b = w.buffer("count", str(w.pick("torch.zeros(())", "torch.tensor(0)", "torch.zeros(1)")))
    w.do(str(w.pick(f"self.{b} += 1", f"self.{b}.add_(1)", f"self.{b} = self.{b} + 1")), f"x = x / (1 + 0.1 * self.{b})")
    return s


@block(1, 2, 3)
def queue_buffer(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    b = w.buffer("queue", f"torch.zeros(4, {n})")
    new = "x.detach().flatten(0, -2)[:1]"
    w.do(*w.rng.choice([
        (f"x = x + self.{b}.mean(0)", f"self.{b} = torch.cat([self.{b}[1:], {new}])"),
        (f"self.{b}[:-1] = self.{b}[1:].clone()", f"self.{b}[-1:] = {new}", f"x = x + self.{b}.sum(0) * 0.1"),
        (f"self.{b}.copy_(self.{b}.roll(1, 0))", f"x = x * (1 + self.{b}[0])"),
    ]))
    return s


@block(1, 2)
def parameter_hook(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    a = w.made("hooked", f"nn.Linear({n}, {n})")
    hook = w.pick("lambda g: g * 0.5", "lambda g: g.clamp(-0.01, 0.01)", "lambda g: None", "lambda g: g / (g.norm() + 1e-3)", "lambda g: torch.zeros_like(g)", "halved", "lambda g: g - g.mean(0, keepdim=True)")
    if hook == "halved":
        w.top("halved", "def halved(grad):\n    return grad / 2\n")
    w.init.append(f"self.{a}.{w.pick('weight', 'bias')}.register_hook({hook})")
    w.do(f"x = self.{a}(x)")
    return s


@block(1, 2)
def module_hook(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    a = w.made("hooked", f"nn.Linear({n}, {n})")
    w.init.append(f"self.{a}." + str(w.pick(
        "register_forward_hook(lambda m, i, o: o * 2)",
        "register_forward_hook(lambda m, i, o: None)",
        "register_forward_pre_hook(lambda m, i: (i[0].tanh(),))",
        "register_forward_hook(lambda m, args, kwargs, o: o + args[0], with_kwargs=True)",
        "register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))",
        "register_full_backward_hook(lambda m, gi, go: None)",
        "register_full_backward_pre_hook(lambda m, go: (go[0] * 2,))",
    )))
    w.do(f"x = self.{a}(x)")
    return s


@block(1, 2, 3)
def tensor_hook(w: Writer, s: Shape) -> Shape:
    w.do("x = x.tanh()", str(w.pick("if x.requires_grad:\n            x.register_hook(lambda g: g * 0.5)", "if x.requires_grad:\n            x.register_hook(lambda g: g.clamp(-1e-3, 1e-3))")), "x = x * 2")
    return s


FUNCTIONS = {
    "Scaled": '''
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (1 - x.tanh() ** 2) * 0.5
''',
    "Reversed": '''
class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor=0.5):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad, None
''',
    "Straight": '''
class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1, 1)
''',
    "Normed": '''
class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        norm = x.norm(dim=-1, keepdim=True) + 1e-3
        y = x / norm
        ctx.save_for_backward(y, norm)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, norm = ctx.saved_tensors
        return (grad - y * (y * grad).sum(-1, keepdim=True)) / norm
''',
    "Twice": '''
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x > 0)
        ctx.n = x.shape[-1]
        return x.relu(), x.mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx, a, b):
        (seen,) = ctx.saved_tensors
        return a * seen + b / ctx.n
''',
    "Setup": '''
class Setup(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos()
''',
}


@block(1, 2, 3)
def autograd_function(w: Writer, s: Shape) -> Shape:
    name = w.rng.choice(list(FUNCTIONS))
    w.used.append(name)
    w.top(name, FUNCTIONS[name].strip() + "\n")
    w.do("y, z = Twice.apply(x)" if name == "Twice" else f"y = {name}.apply(x)", "x = y + z" if name == "Twice" else str(w.pick("x = y", "x = x + y")))
    return s


@block(1, 2)
def weighted_function(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    w.top("Product", '''class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)
''')
    p = w.parameter("w", f"torch.randn({n}, {n}) * 0.4")
    w.do(f"x = Product.apply(x, self.{p})")
    return s


# ---- norms ---------------------------------------------------------------------------------------


@block(1, 2, 3)
def layer_norm(w: Writer, s: Shape) -> Shape:
    k = w.size(*range(1, len(s) + 1))
    w.layer("ln", f"nn.LayerNorm({list(s[-k:])}, elementwise_affine={w.flip(0.8)})")
    return s


@block(1, 2, 3)
def rms_norm(w: Writer, s: Shape) -> Shape:
    w.layer("rms", f"nn.RMSNorm({s[-1]})")
    return s


@block(1, 3)
def group_norm(w: Writer, s: Shape) -> Shape:
    w.layer("gn", f"nn.GroupNorm({w.divisor(s[0])}, {s[0]}, affine={w.flip(0.8)})")
    return s


@block(1, 2, 3)
def batch_norm(w: Writer, s: Shape) -> Shape:
    kind = {1: "BatchNorm1d", 2: "BatchNorm1d", 3: "BatchNorm2d"}[len(s)]
    more = w.pick("", "", ", momentum=0.3", ", affine=False", ", track_running_stats=False")
    w.layer("bn", f"nn.{kind}({s[0]}{more})")
    return s


@block(2, 3)
def instance_norm(w: Writer, s: Shape) -> Shape:
    kind = {2: "InstanceNorm1d", 3: "InstanceNorm2d"}[len(s)]
    if s[1:].count(1) == len(s) - 1:
        raise Skip
    w.layer("inorm", f"nn.{kind}({s[0]}{w.pick('', ', affine=True', ', affine=True, track_running_stats=True')})")
    return s


@block(1, 2)
def parametrized(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    how = w.pick("parametrizations.weight_norm", "parametrizations.spectral_norm", "weight_norm", "parametrizations.orthogonal")
    w.layer("pn", f"nn.utils.{how}(nn.Linear({n}, {n}))")
    return s


# ---- features ------------------------------------------------------------------------------------


@block(1)
def outer_product(w: Writer, s: Shape) -> Shape:
    if s[0] > 8:
        raise Skip
    w.do(str(w.pick('x = torch.einsum("bi,bj->bij", x, x.tanh())', "x = x.unsqueeze(2) * x.sin().unsqueeze(1)", "x = torch.bmm(x[:, :, None], x[:, None])")))
    return (s[0], s[0])


@block(1)
def to_sequence(w: Writer, s: Shape) -> Shape:
    d = w.divisor(s[0])
    w.do(f"x = x.{w.pick('view', 'reshape')}(x.shape[0], {d}, {s[0] // d})")
    return (d, s[0] // d)


@block(1)
def to_sequence_by_linear(w: Writer, s: Shape) -> Shape:
    t, c = w.size(2, 3, 4, 6), w.size(4, 6, 8)
    a = w.made("expand", f"nn.Linear({s[0]}, {t * c})")
    w.do(str(w.pick(f"x = self.{a}(x).view(-1, {t}, {c})", f"x = self.{a}(x).unflatten(1, ({t}, {c}))", f"x = self.{a}(x).reshape(len(x), {c}, {t}).permute(0, 2, 1)")))
    return (t, c)


@block(1)
def to_image(w: Writer, s: Shape) -> Shape:
    c, h = w.size(2, 3, 4), w.size(4, 5, 6)
    a = w.made("expand", f"nn.Linear({s[0]}, {c * h * h})")
    w.do(f"x = self.{a}(x).view(-1, {c}, {h}, {h})")
    return (c, h, h)


@block(1)
def quantised_embedding(w: Writer, s: Shape) -> Shape:
    c = w.size(4, 6)
    more = w.pick("", ", padding_idx=0", ", max_norm=None", ", scale_grad_by_freq=False")
    a = w.made("codes", f"nn.Embedding(5, {c}{more})")
    w.do(f"ids = ((x.detach().tanh() + 1) * 2).long()", f"x = self.{a}(ids) + x.unsqueeze(-1)")
    return (s[0], c)


@block(1)
def prototypes(w: Writer, s: Shape) -> Shape:
    k = w.size(3, 4, 6)
    p = w.parameter("protos", f"torch.randn({k}, {s[0]})")
    w.do(str(w.pick(
        f"x = -torch.cdist(x, self.{p})",
        f"x = F.cosine_similarity(x[:, None], self.{p}[None], dim=-1)",
        f"x = F.normalize(x, dim=-1) @ F.normalize(self.{p}, dim=-1).t()",
        f"x = -(x.unsqueeze(1) - self.{p}).pow(2).sum(-1)",
        f"x = F.linear(x, self.{p}).softmax(-1)",
    )))
    return (k,)


@block(1)
def experts(w: Writer, s: Shape) -> Shape:
    n, k = s[0], w.size(2, 3)
    g = w.made("gate", f"nn.Linear({n}, {k})")
    p = w.parameter("experts", f"torch.randn({k}, {n}, {n}) * 0.3")
    w.do(*w.rng.choice([
        (f"g = self.{g}(x).softmax(-1)", f'x = torch.einsum("bk,bi,kij->bj", g, x, self.{p})'),
        (f"v, i = self.{g}(x).softmax(-1).topk(1)", f"x = v * torch.bmm(x.unsqueeze(1), self.{p}[i[:, 0]]).squeeze(1)"),
        (f"g = self.{g}(x).softmax(-1)", f"x = sum(g[:, k : k + 1] * (x @ self.{p}[k]) for k in range({k}))"),
    ]))
    return s


@block(1)
def select(w: Writer, s: Shape) -> Shape:
    n, k = s[0], max(1, s[0] // 2)
    row = w.rng.choice([
        f"x = x[:, :{k}]", f"x = x[:, -{k}:]", f"x = x.narrow(1, {n - k}, {k})", f"x = x.topk({k}, 1).values",
        f"x = x[:, torch.tensor({list(range(k))[::-1]})]", f"x = x.gather(1, x.argsort(1)[:, :{k}])", f"x = x.chunk(2, 1)[0][:, :{k}]",
    ])
    w.do(row)
    return (k,)


@block(1)
def linear_algebra(w: Writer, s: Shape) -> Shape:
    n = s[0]
    if n > 6:
        raise Skip
    p = w.parameter("m", f"torch.randn({n}, {n}) * 0.2")
    eye = f"torch.eye({n}, dtype=x.dtype)"
    w.do(str(w.pick(
        f"x = x @ torch.linalg.inv(self.{p} + 2 * {eye})",
        f"x = torch.linalg.solve(self.{p} @ self.{p}.t() + {eye}, x.t()).t()",
        f"x = x @ torch.linalg.cholesky(self.{p} @ self.{p}.t() + {eye})",
        f"x = x @ torch.matrix_exp(self.{p} - self.{p}.t())",
        f"x = x * torch.linalg.det(self.{p} + 2 * {eye})",
        f"x = x @ torch.linalg.matrix_power(self.{p}, 2)",
        f"x = x + torch.linalg.svdvals(self.{p} + 2 * {eye})",
        f"x = x @ torch.block_diag(self.{p}[:1, :1], self.{p}[1:, 1:])" if n > 1 else f"x = x @ self.{p}",
    )))
    return s


@block(1)
def recurrent_cell(w: Writer, s: Shape) -> Shape:
    h = w.size(4, 6)
    kind = w.pick("GRUCell", "LSTMCell", "RNNCell")
    a = w.made("cell", f"nn.{kind}({s[0]}, {h})")
    if kind == "LSTMCell":
        w.do(f"h = (x.new_zeros(len(x), {h}), x.new_zeros(len(x), {h}))", "for _ in range(2):", f"    h = self.{a}(x, h)", "x = h[0]")
    else:
        w.do(f"h = torch.zeros(x.size(0), {h}, dtype=x.dtype)", "for _ in range(3):", f"    h = self.{a}(x, h)", "x = h")
    return (h,)


# ---- sequences -----------------------------------------------------------------------------------


@block(2)
def attention_module(w: Writer, s: Shape) -> Shape:
    t, c = s
    heads = w.divisor(c)
    more = w.pick("", ", bias=False", ", add_zero_attn=True", ", add_bias_kv=True")
    a = w.made("attn", f"nn.MultiheadAttention({c}, {heads}, batch_first=True{more})")
    call = w.pick("need_weights=False", "", "average_attn_weights=False", f"attn_mask=torch.ones({t}, {t}, dtype=torch.bool).triu(1), need_weights=False", "key_padding_mask=(x.detach().mean(-1) < -5)")
    w.do(f"y, _ = self.{a}(x, x, x, {call})", str(w.pick("x = x + y", "x = y")))
    return s


@block(2)
def attention(w: Writer, s: Shape) -> Shape:
    t, c = s
    heads = w.divisor(c)
    d = c // heads
    a = w.made("qkv", f"nn.Linear({c}, {3 * c})")
    o = w.made("proj", f"nn.Linear({c}, {c})")
    w.do(*w.rng.choice([
        (f"q, k, v = self.{a}(x).view(-1, {t}, 3, {heads}, {d}).permute(2, 0, 3, 1, 4)",),
        (f"q, k, v = (p.view(-1, {t}, {heads}, {d}).transpose(1, 2) for p in self.{a}(x).chunk(3, -1))",),
        (f"q, k, v = [p.unflatten(-1, ({heads}, {d})).transpose(1, 2) for p in self.{a}(x).split({c}, -1)]",),
    ]))
    w.do(*w.rng.choice([
        ("y = F.scaled_dot_product_attention(q, k, v)",),
        ("y = F.scaled_dot_product_attention(q, k, v, is_causal=True)",),
        (f"m = torch.ones({t}, {t}, dtype=torch.bool).tril()", "y = F.scaled_dot_product_attention(q, k, v, attn_mask=m)"),
        (f"y = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros({t}, {t}, dtype=x.dtype), scale=0.5)",),
        (f"p = q @ k.transpose(-2, -1) / {d} ** 0.5", f"p = p.masked_fill(torch.ones({t}, {t}, dtype=torch.bool).triu(1), float('-inf'))", "y = p.softmax(-1) @ v"),
        ('p = torch.einsum("bhtd,bhsd->bhts", q, k).softmax(-1)', 'y = torch.einsum("bhts,bhsd->bhtd", p, v)'),
        ("q, k = q.softmax(-1), k.softmax(-2)", "y = q @ (k.transpose(-2, -1) @ v)"),
        ("p = torch.baddbmm(x.new_zeros(1, 1, 1), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0).softmax(-1)", "y = torch.bmm(p, v.flatten(0, 1)).view_as(v)"),
    ]))
    w.do(f"x = x + self.{o}(y.transpose(1, 2).{w.pick('reshape', 'contiguous().view')}(-1, {t}, {c}))")
    return s


@block(2)
def grouped_query_attention(w: Writer, s: Shape) -> Shape:
    t, c = s
    if c % 4:
        raise Skip
    d = c // 4
    q, kv = w.made("q", f"nn.Linear({c}, {c})"), w.made("kv", f"nn.Linear({c}, {4 * d})")
    w.do(f"q = self.{q}(x).view(-1, {t}, 4, {d}).transpose(1, 2)", f"k, v = self.{kv}(x).view(-1, {t}, 2, 2, {d}).permute(2, 0, 3, 1, 4)")
    w.do(str(w.pick("y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)", "y = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))", "y = (q @ k.repeat(1, 2, 1, 1).mT).softmax(-1) @ v.repeat(1, 2, 1, 1)")))
    w.do(f"x = x + y.transpose(1, 2).flatten(2)")
    return s


@block(2)
def rotary(w: Writer, s: Shape) -> Shape:
    t, c = s
    if c % 2:
        raise Skip
    b = w.buffer("angles", f"torch.outer(torch.arange({t}.0), 1.0 / 10 ** torch.arange({c // 2}.0))")
    w.do(*w.rng.choice([
        (f"cos, sin = self.{b}.cos(), self.{b}.sin()", "a, b = x[..., ::2], x[..., 1::2]", "x = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)"),
        (f"cos = torch.cat([self.{b}, self.{b}], -1).cos()", f"sin = torch.cat([self.{b}, self.{b}], -1).sin()", f"a, b = x.chunk(2, -1)", "x = x * cos + torch.cat([-b, a], -1) * sin"),
        (f"z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))", f"x = torch.view_as_real(z * torch.polar(torch.ones_like(self.{b}.float()), self.{b}.float())).flatten(-2).to(x.dtype)"),
    ]))
    return s


@block(2)
def encoder_layer(w: Writer, s: Shape) -> Shape:
    t, c = s
    heads = w.divisor(c)
    w.layer("enc", f"nn.TransformerEncoderLayer({c}, {heads}, {2 * c}, dropout=0.0, batch_first=True, norm_first={w.flip()}, activation={w.pick(repr('relu'), repr('gelu'))})")
    return s


@block(2)
def decoder_layer(w: Writer, s: Shape) -> Shape:
    t, c = s
    heads = w.divisor(c)
    w.layer("dec", f"nn.TransformerDecoderLayer({c}, {heads}, {2 * c}, dropout=0.0, batch_first=True)", "x = self.{0}(x, x.tanh())")
    return s


@block(2)
def recurrent(w: Writer, s: Shape) -> Shape:
    t, c = s
    h, kind, two = w.size(4, 6), w.pick("LSTM", "GRU", "RNN"), w.flip(0.3)
    more = ", bidirectional=True" * two + ", num_layers=2" * w.flip(0.2)
    a = w.made("rnn", f"nn.{kind}({c}, {h}, batch_first=True{more})")
    width = 2 * h if two else h
    if w.flip(0.7):
        w.do(f"x, _ = self.{a}(x)")
        return (t, width)
    w.do(f"_, h = self.{a}(x)", "x = h[0][-1]" if kind == "LSTM" else "x = h[-1]")
    return (h,)


@block(2)
def scan(w: Writer, s: Shape) -> Shape:
    t, c = s
    p = w.parameter("decay", f"torch.rand({c})")
    w.do(f"h, out = x.new_zeros(x.shape[0], {c}), []", f"for k in range({t}):", f"    h = torch.sigmoid(self.{p}) * h + x[:, k]", "    out.append(h)", "x = torch.stack(out, 1)")
    return s


@block(2)
def positions(w: Writer, s: Shape) -> Shape:
    t, c = s
    w.do(*w.rng.choice([
        lambda: (f"x = x + self.{w.parameter('pos', f'torch.randn(1, {t}, {c}) * 0.1')}",),
        lambda: (f"x = x + self.{w.parameter('pos', f'torch.randn({t + 2}, {c}) * 0.1')}[:x.size(1)]",),
        lambda: (f"x = x + self.{w.made('pos', f'nn.Embedding({t}, {c})')}(torch.arange({t}))",),
        lambda: (f"x = x + self.{w.made('pos', f'nn.Embedding({t + 3}, {c})')}(torch.arange(x.shape[1], device=x.device)).unsqueeze(0)",),
        lambda: (f"x = x + self.{w.buffer('pe', f'torch.randn(1, {t}, {c})')}",),
        lambda: (f"x = x + torch.sin(torch.arange({t}, dtype=x.dtype))[:, None]",),
    ])())
    return s


@block(2)
def class_token(w: Writer, s: Shape) -> Shape:
    t, c = s
    p = w.parameter("cls", f"torch.randn(1, 1, {c}) * 0.1")
    w.do(str(w.pick(f"x = torch.cat([self.{p}.expand(x.shape[0], -1, -1), x], 1)", f"x = torch.cat((self.{p}.repeat(len(x), 1, 1), x), dim=1)", f"x = torch.hstack([self.{p}.expand(len(x), 1, {c}), x])")))
    return (t + 1, c)


@block(2)
def pooled(w: Writer, s: Shape) -> Shape:
    t, c = s
    w.do(str(w.pick("x = x.mean(1)", "x = x.amax(1)", "x = x.max(1)[0]", "x = x[:, -1]", "x = x[:, 0]", "x = x.sum(1) / 3", "x = (x * x.softmax(1)).sum(1)", "x = x.logsumexp(1)", "x = x.median(1).values", "x = x.select(1, 0)", "x = x.unbind(1)[0]", "x = x.norm(dim=1)", "x = x.std(1, correction=0) + x.mean(1)", "x = x.prod(1)", "x = torch.einsum('btc->bc', x)", "x = x.cumsum(1)[:, -1]", "x = x.gather(1, x.argmax(1, keepdim=True)).squeeze(1)", "x = x[torch.arange(len(x)), x.detach().sum(-1).argmax(1)]")))
    return (c,)


@block(2, 3)
def flattened(w: Writer, s: Shape) -> Shape:
    n = 1
    for d in s:
        n *= d
    if n > 300:
        raise Skip
    w.do(str(w.pick("x = x.flatten(1)", "x = x.reshape(x.shape[0], -1)", "x = torch.flatten(x, start_dim=1)", "x = x.contiguous().view(len(x), -1)", "x = x.transpose(1, 2).flatten(1)", "x = x.movedim(-1, 1).reshape(x.size(0), -1)")))
    return (n,)


@block(2)
def swapped(w: Writer, s: Shape) -> Shape:
    w.do(str(w.pick("x = x.transpose(1, 2)", "x = x.permute(0, 2, 1)", "x = x.mT", "x = x.swapaxes(1, 2).contiguous()", 'x = torch.einsum("btc->bct", x)', "x = torch.movedim(x, 1, 2)")))
    return s[::-1]


@block(2)
def mixing(w: Writer, s: Shape) -> Shape:
    t, c = s
    a = w.made("mix", f"nn.Linear({t}, {t})")
    w.do(str(w.pick(f"x = x + self.{a}(x.transpose(1, 2)).transpose(1, 2)", f'x = torch.einsum("btc,st->bsc", x, self.{a}.weight)', f"x = (self.{a}.weight @ x) + x", f"x = torch.matmul(self.{a}.weight.tril(), x)")))
    return s


@block(2)
def own_scores(w: Writer, s: Shape) -> Shape:
    w.do(str(w.pick('x = x + torch.einsum("btc,bsc->bts", x, x).softmax(-1) @ x', "x = torch.bmm(torch.bmm(x, x.transpose(1, 2)).softmax(-1), x)", "x = torch.cdist(x, x.tanh()).neg().softmax(-1) @ x", "x = (x @ x.mT).tril() @ x * 0.1", "x = x + torch.matmul(x.mT @ x, x.mT).mT * 0.05")))
    return s


@block(2)
def convolution_1d(w: Writer, s: Shape) -> Shape:
    t, c = s
    out, g = w.size(2, 4, 6), 1
    if w.flip(0.3):
        out, g = c, c
    a = w.made("conv", f"nn.Conv1d({c}, {out}, 3, padding={w.pick(1, repr('same'))}, groups={g}, bias={w.flip()}{w.pick('', ', padding_mode=' + repr('circular'), ', padding_mode=' + repr('replicate'))})")
    if w.flip():
        w.do(f"x = self.{a}(x.transpose(1, 2)).transpose(1, 2)")
        return (t, out)
    k = w.made("causal", f"nn.Conv1d({c}, {out}, 2, groups={g})")
    w.do(f"x = self.{k}(F.pad(x.mT, (1, 0))).mT")
    return (t, out)


@block(2)
def pooling_1d(w: Writer, s: Shape) -> Shape:
    t, c = s
    if c < 4:
        raise Skip
    row = w.rng.choice([("F.avg_pool1d(x, 2)", c // 2), ("F.max_pool1d(x, 2)", c // 2), ("F.adaptive_avg_pool1d(x, 3)", 3), ("F.adaptive_max_pool1d(x, 2)", 2), ("F.interpolate(x, scale_factor=2)", 2 * c), ("F.interpolate(x, size=5, mode='linear')", 5), ("F.lp_pool1d(x.abs() + 0.1, 2, 2)", c // 2), ("x.unfold(-1, 2, 2).mean(-1)", c // 2)])
    w.used.append(row[0])
    w.do(f"x = {row[0]}")
    return (t, int(row[1]))


@block(2)
def shortened(w: Writer, s: Shape) -> Shape:
    t, c = s
    if t < 2:
        raise Skip
    rows = [(f"x[:, 1:]", t - 1), (f"x[:, ::2]", (t + 1) // 2), (f"x[:, :-1] + x[:, 1:]", t - 1), (f"x.narrow(1, 0, {t - 1})", t - 1), ("x[:, [1, 0]]", 2), ("x.index_select(1, torch.tensor([1, 0, 1]))", 3), ("torch.cat([x, x.flip(1)], 1)", 2 * t), ("x.repeat(1, 2, 1)", 2 * t), ("F.pad(x, (0, 0, 1, 1))", t + 2), ("F.pad(x.mT, (1, 1), mode='replicate').mT", t + 2), ("x.topk(2, 1)[0]", 2), ("x.diff(dim=1)", t - 1), ("torch.cat(x.split([1, %d], 1)[::-1], 1)" % (t - 1), t), ("x[:, torch.tensor([True] + [False] * %d)]" % (t - 1), 1)]
    row, n = w.rng.choice(rows)
    w.used.append(row)
    w.do(f"x = {row}")
    return (n, c)


@block(2)
def masked_mean(w: Writer, s: Shape) -> Shape:
    w.do("m = (x.detach().mean(-1) > 0.1).to(x.dtype)", str(w.pick("x = (x * m.unsqueeze(-1)).sum(1) / m.sum(1, keepdim=True).clamp(min=1)", "x = torch.einsum('btc,bt->bc', x, m) / (m.sum(1)[:, None] + 1)")))
    return (s[1],)


@block(2)
def segments(w: Writer, s: Shape) -> Shape:
    t, c = s
    w.do(f"i = (torch.arange({t}) % 2).expand(x.shape[0], -1)", str(w.pick(
        f"x = x.new_zeros(x.shape[0], 2, {c}).scatter_add(1, i.unsqueeze(-1).expand(-1, -1, {c}), x)",
        f"x = x.new_zeros(x.shape[0], 2, {c}).index_add(1, i[0], x)",
        f"x = x.new_zeros(x.shape[0], 2, {c}).scatter_reduce(1, i.unsqueeze(-1).expand_as(x), x, 'mean', include_self=False)",
        f"x = F.one_hot(i, 2).to(x.dtype).mT @ x",
    )))
    return (2, c)


@block(2)
def sequence_to_image(w: Writer, s: Shape) -> Shape:
    t, c = s
    w.do("x = x.unsqueeze(1)")
    return (1, t, c)


# ---- images --------------------------------------------------------------------------------------


@block(3)
def convolution(w: Writer, s: Shape) -> Shape:
    c, h, v = s
    out = w.size(2, 3, 4, 6)
    rows = [("3, padding=1", 0), ("1", 0), ("3, padding=1, padding_mode='reflect'", 2), ("3, padding=1, padding_mode='circular'", 1), ("3, padding='same'", 0), ("3, padding=2, dilation=2", 0), ("(1, 3), padding=(0, 1)", 0), ("5, padding=2", 0), ("3, padding=1, padding_mode='replicate'", 0), ("3, padding=1, bias=False", 0)]
    row, least = w.rng.choice(rows)
    if min(h, v) <= least:
        raise Skip
    w.used.append("conv " + row)
    groups = c if w.flip(0.2) else 1
    w.layer("conv", f"nn.Conv2d({c}, {c * 2 if groups > 1 else out}, {row}, groups={groups})")
    return (c * 2 if groups > 1 else out, h, v)


@block(3)
def strided_convolution(w: Writer, s: Shape) -> Shape:
    c, h, v = s
    if min(h, v) < 3:
        raise Skip
    out = w.size(2, 4)
    w.layer("conv", f"nn.Conv2d({c}, {out}, 3, stride=2, padding=1)")
    return (out, (h + 1) // 2, (v + 1) // 2)


@block(3)
def transposed_convolution(w: Writer, s: Shape) -> Shape:
    c, h, v = s
    if max(h, v) > 6:
        raise Skip
    out = w.size(2, 3)
    w.layer("deconv", f"nn.ConvTranspose2d({c}, {out}, 2, stride=2)")
    return (out, 2 * h, 2 * v)


@block(3)
def functional_convolution(w: Writer, s: Shape) -> Shape:
    c, h, v = s
    p = w.parameter("kernel", f"torch.randn(4, {c}, 3, 3) * 0.2")
    w.do(f"k = self.{p}", str(w.pick("k = k - k.mean((1, 2, 3), keepdim=True)", "k = k / (k.flatten(1).norm(dim=1).view(-1, 1, 1, 1) + 0.1)", "k = k.flip(-1)")), "x = F.conv2d(x, k, padding=1)")
    return (4, h, v)


@block(3)
def pooling(w: Writer, s: Shape) -> Shape:
    c, h, v = s
    if min(h, v) < 4:
        raise Skip
    rows = [("F.max_pool2d(x, 2)", h // 2, v // 2), ("F.avg_pool2d(x, 2)", h // 2, v // 2), ("F.max_pool2d(x, 3, stride=1, padding=1)", h, v), ("F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)", h, v), ("F.adaptive_avg_pool2d(x, (2, 3))", 2, 3), ("F.adaptive_max_pool2d(x, 2)", 2, 2), ("F.lp_pool2d(x.abs() + 0.1, 2.0, 2)", h // 2, v // 2), ("F.max_pool2d(x, 2, ceil_mode=True)", -(-h // 2), -(-v // 2)), ("F.adaptive_avg_pool2d(x, 1)", 1, 1), ("F.max_pool2d(x, 2, return_indices=True)[0]", h // 2, v // 2)]
    row, a, b = w.rng.choice(rows)
    w.used.append(row)
    w.do(f"x = {row}")
    return (c, a, b)


@block(3)
def resized(w: Writer, s: Shape) -> Shape:
    c, h, v = s
    if max(h, v) > 8 or min(h, v) < 2:
        raise Skip
    rows = [("F.interpolate(x, scale_factor=2)", 2 * h, 2 * v), ("F.interpolate(x, scale_factor=2, mode='bilinear', align_corners=False)", 2 * h, 2 * v), ("F.interpolate(x, size=(5, 4), mode='bilinear', align_corners=True)", 5, 4), ("F.interpolate(x, size=5, mode='bicubic')", 5, 5), ("F.interpolate(x, size=3, mode='area')", 3, 3), ("F.interpolate(x, size=(4, 5), mode='nearest-exact')", 4, 5), ("F.interpolate(x, size=3, mode='bilinear', antialias=True)", 3, 3)]
    row, a, b = w.rng.choice(rows)
    w.used.append(row)
    w.do(f"x = {row}")
    return (c, a, b)


@block(3)
def padded(w: Writer, s: Shape) -> Shape:
    c, h, v = s
    if min(h, v) < 2 or max(h, v) > 10:
        raise Skip
    mode = w.pick("'constant', 0.5", "'reflect'", "'replicate'", "'circular'", "'constant'")
    w.used.append(f"pad {mode}")
    w.do(f"x = F.pad(x, (1, 1, 1, 0), {mode})")
    return (c, h + 1, v + 2)


@block(3)
def image_rows(w: Writer, s: Shape) -> Shape:
    """Keep the shape, or turn it."""
    c, h, v = s
    rows = ["x.flip((2, 3))", "x.roll((1, 1), (2, 3))", "F.local_response_norm(x, 2)", "F.dropout2d(x, 0.0, self.training)", "x.contiguous(memory_format=torch.channels_last)", "x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)", "x * x.mean((2, 3), keepdim=True).sigmoid()", "F.normalize(x, dim=1)", "x.softmax(1)", "F.fold(F.unfold(x, 3, padding=1), (%d, %d), 3, padding=1) / 9" % (h, v), "F.unfold(x, 1).view(x.shape)", "F.grid_sample(x, F.affine_grid(torch.eye(2, 3, dtype=x.dtype).expand(x.shape[0], 2, 3), x.shape, align_corners=False), align_corners=False)", "x.flatten(2).softmax(-1).view_as(x)", "F.instance_norm(x) if x.shape[-1] * x.shape[-2] > 1 else x", "F.group_norm(x, 1)", "x.view(x.shape[0], x.shape[1], -1).cumsum(-1).view(x.shape) * 0.1", "F.channel_shuffle(x, 1)", "x - F.avg_pool2d(x, 3, 1, 1)", "x.tril()", "x.triu(1) + x", "torch.stack([x[:, k] * (k + 1) for k in range(x.shape[1])], 1)", "F.layer_norm(x.movedim(1, -1), (x.shape[1],)).movedim(-1, 1)", "F.feature_alpha_dropout(x, 0.0, self.training)"]
    row = w.rng.choice(rows)
    w.used.append(row)
    w.do(f"x = {row}")
    return s


@block(3)
def turned(w: Writer, s: Shape) -> Shape:
    c, h, v = s
    rows = ["x.transpose(2, 3)", "torch.rot90(x, 1, (2, 3))", "x.permute(0, 1, 3, 2)", "x.mT.contiguous()"]
    w.do(f"x = {w.rng.choice(rows)}")
    return (c, v, h)


@block(3)
def shuffled(w: Writer, s: Shape) -> Shape:
    c, h, v = s
    rows = []
    if c % 4 == 0 and max(h, v) <= 6:
        rows.append(("F.pixel_shuffle(x, 2)", (c // 4, 2 * h, 2 * v)))
    if h % 2 == 0 and v % 2 == 0 and c <= 4:
        rows.append(("F.pixel_unshuffle(x, 2)", (c * 4, h // 2, v // 2)))
        rows.append((f"x.reshape(-1, {c}, {h // 2}, 2, {v // 2}, 2).permute(0, 3, 5, 1, 2, 4).reshape(-1, {4 * c}, {h // 2}, {v // 2})", (4 * c, h // 2, v // 2)))
    if c % 2 == 0:
        rows.append((f"x.view(-1, 2, {c // 2}, {h}, {v}).transpose(1, 2).reshape(-1, {c}, {h}, {v})", s))
    if not rows:
        raise Skip
    row, shape = w.rng.choice(rows)
    w.do(f"x = {row}")
    return tuple(shape)


@block(3)
def squeeze_and_excite(w: Writer, s: Shape) -> Shape:
    a = w.made("se", f"nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d({s[0]}, 2, 1), nn.ReLU(), nn.Conv2d(2, {s[0]}, 1), nn.Sigmoid())")
    w.do(f"x = x * self.{a}(x)")
    return s


@block(3)
def prelu(w: Writer, s: Shape) -> Shape:
    w.layer("prelu", f"nn.PReLU({w.pick(1, s[0])})")
    return s


@block(3)
def to_tokens(w: Writer, s: Shape) -> Shape:
    c, h, v = s
    w.do(str(w.pick("x = x.flatten(2).transpose(1, 2)", "x = x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, x.shape[1])", 'x = torch.einsum("bchw->bhwc", x).flatten(1, 2)')))
    return (h * v, c)


@block(3)
def image_pooled(w: Writer, s: Shape) -> Shape:
    w.do(str(w.pick("x = x.mean((2, 3))", "x = x.amax((2, 3))", "x = F.adaptive_avg_pool2d(x, 1).flatten(1)", "x = x.flatten(2).max(-1).values", "x = x.sum((-1, -2)) * 0.1", "x = x.mean(-1).mean(-1)", "x = x.flatten(2).logsumexp(-1)", "x = F.adaptive_max_pool2d(x, 1)[:, :, 0, 0]", "x = x[:, :, 0, 0]")))
    return (s[0],)


@block(3)
def volume(w: Writer, s: Shape) -> Shape:
    c, h, v = s
    if max(h, v) > 6:
        raise Skip
    a = w.made("conv3", "nn.Conv3d(1, 2, 3, padding=1)")
    w.do(f"y = self.{a}(x.unsqueeze(1))", str(w.pick("x = y.mean(1)", "x = y.amax(1)", "x = F.max_pool3d(y, (1, 1, 1)).sum(1)", "x = F.adaptive_avg_pool3d(y, y.shape[2:])[:, 0]", "x = y[:, 1] - y[:, 0]")))
    return s
