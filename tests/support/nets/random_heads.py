# ruff: noqa: E501 (rows of tables)
# fmt: off
"""Ends of random models: what forward returns, the loss of it, and the targets that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from support.nets.random_blocks import Shape, Writer

COUNTED = "counted"  # the loss is a mean over targets that micro-batches have unlike numbers of


@dataclass(frozen=True)
class Head:
    """target: expression of the data set's `y` of `n` samples, with generator `g`.  loss: lines of a
    function of (output, y); its parameters are in `o`.  counted: see COUNTED.  module: name and source of a loss that is one.
    """

    target: str
    loss: str
    counted: bool = False
    module: tuple[str, str] | None = None


def vector_heads(w: Writer, f: int) -> list[Head]:
    """Of an output (B, f)."""
    ids = f"torch.randint({f}, (n,), generator=g)"
    some = f"torch.where(torch.arange(n) % 3 == 0, torch.full((n,), -100), {ids})"
    like = f"torch.randn(n, {f}, generator=g, dtype=torch.float64).to(DTYPE)"
    share = f"torch.rand(n, {f}, generator=g, dtype=torch.float64).to(DTYPE)"
    bits = f"torch.randint(2, (n, {f}), generator=g).to(DTYPE)"
    number = "torch.randn(n, generator=g, dtype=torch.float64).to(DTYPE)"
    signs = f"(torch.randint(2, (n, {f}), generator=g) * 2 - 1).to(DTYPE)"
    rows = [
        Head(ids, "F.cross_entropy(o, y)"),
        Head(ids, "F.cross_entropy(o, y, label_smoothing=0.1)"),
        Head(ids, f"F.cross_entropy(o, y, weight=torch.linspace(0.5, 1.5, {f}, dtype=o.dtype))", True),
        Head(ids, "F.cross_entropy(o, y, reduction='none').mean()"),
        Head(ids, "F.cross_entropy(o, y, reduction='sum')"),
        Head(some, "F.cross_entropy(o, y)", True),
        Head(some, "F.cross_entropy(o, y, label_smoothing=0.2)", True),
        Head(some.replace("-100", "0"), "F.cross_entropy(o, y, ignore_index=0)", True),
        Head(ids, "nn.CrossEntropyLoss()(o, y)"),
        Head(ids, "F.nll_loss(F.log_softmax(o, -1), y)"),
        Head(ids, "-o.log_softmax(-1).gather(1, y[:, None]).mean()"),
        Head(ids, "-o.log_softmax(-1)[torch.arange(len(y)), y].mean()"),
        Head(ids, "(o.logsumexp(-1) - o.gather(-1, y.unsqueeze(-1)).squeeze(-1)).mean()"),
        Head(ids, f"F.mse_loss(o, F.one_hot(y, {f}).to(o.dtype))"),
        Head(ids, "F.multi_margin_loss(o, y)"),
        Head(ids, "(F.cross_entropy(o, y, reduction='none') * (1 - o.softmax(-1).gather(1, y[:, None])[:, 0]) ** 2).mean()"),
        Head(share, "F.cross_entropy(o, y.softmax(-1))"),
        Head(share, "F.kl_div(F.log_softmax(o, -1), y.softmax(-1), reduction='batchmean')"),
        Head(share, "F.kl_div(F.log_softmax(o, -1), y.log_softmax(-1), log_target=True)"),
        Head(share, "F.binary_cross_entropy(torch.sigmoid(o), y)"),
        Head(bits, "F.binary_cross_entropy_with_logits(o, y)"),
        Head(bits, f"F.binary_cross_entropy_with_logits(o, y, pos_weight=torch.full(({f},), 2.0, dtype=o.dtype))"),
        Head(bits, "F.multilabel_soft_margin_loss(o, y)"),
        Head(signs, "F.soft_margin_loss(o, y)"),
        Head(signs, "F.hinge_embedding_loss(o, y)"),
        Head(like, "F.mse_loss(o, y)"),
        Head(like, "F.l1_loss(o, y)"),
        Head(like, "F.smooth_l1_loss(o, y, beta=0.5)"),
        Head(like, "F.huber_loss(o, y, delta=0.7)"),
        Head(like, "(o - y).pow(2).mean()"),
        Head(like, "((o - y) ** 2).sum(-1).mean()"),
        Head(like, "torch.log(torch.cosh(o - y)).mean()"),
        Head(like, "F.gaussian_nll_loss(o, y, torch.ones_like(o) * 0.5)"),
        Head(like, "F.poisson_nll_loss(o.clamp(max=2), y.abs())"),
        Head(like, "(1 - F.cosine_similarity(o, y, dim=-1)).mean()"),
        Head(like, "F.cosine_embedding_loss(o, y, torch.ones(len(o), dtype=o.dtype))"),
        Head(like, "F.triplet_margin_loss(o, y, y.flip(-1) + 0.1)"),
        Head(like, "F.margin_ranking_loss(o, y, torch.ones_like(o))"),
        Head(like, "(o - y).norm()"),
        Head(like, "(o - y).abs().sum() / o.shape[0]"),
        Head(like, "F.mse_loss(o, y) + 0.1 * o.pow(2).mean()"),
        Head(like, "((o - y) ** 2 * (y > 0)).sum() / (y > 0).sum().clamp(min=1)", True),
        Head(like, "(o - y)[y > 0].abs().sum()"),
        Head(like, "torch.quantile((o - y).abs(), 0.5)"),
        Head(like, "F.cross_entropy(F.normalize(o, dim=-1) @ F.normalize(y, dim=-1).t() / 0.2, torch.arange(len(o)))"),
        Head(number, "F.mse_loss(o.mean(-1), y)"),
        Head(number, "(o[:, 0] - y).square().mean()"),
        Head(number, "(o.sum(-1) - y).abs().mean().sqrt()"),
        Head(number, "torch.where((o[..., 0] - y).abs() < 0.5, (o[..., 0] - y) ** 2, (o[..., 0] - y).abs()).mean()"),
        Head(ids, "Smoothed(o, y)"),
        Head(ids, "Scaled_(o, y)"),
    ]
    return rows


def sequence_heads(w: Writer, t: int, c: int) -> list[Head]:
    """Of an output (B, t, c)."""
    ids = f"torch.randint({c}, (n, {t}), generator=g)"
    some = f"{ids}.masked_fill(torch.rand(n, {t}, generator=g) < 0.3, -100)"
    like = f"torch.randn(n, {t}, {c}, generator=g, dtype=torch.float64).to(DTYPE)"
    return [
        Head(ids, "F.cross_entropy(o.flatten(0, 1), y.flatten())"),
        Head(ids, f"F.cross_entropy(o.view(-1, {c}), y.view(-1))" if False else f"F.cross_entropy(o.reshape(-1, {c}), y.reshape(-1))"),
        Head(ids, "F.cross_entropy(o.transpose(1, 2), y)"),
        Head(ids, "F.cross_entropy(o.mT, y, label_smoothing=0.1)"),
        Head(ids, "F.cross_entropy(o.permute(0, 2, 1), y, reduction='none').mean()"),
        Head(some, "F.cross_entropy(o.transpose(1, 2), y)", True),
        Head(some, "F.cross_entropy(o.flatten(0, 1), y.flatten())", True),
        Head(some, "(F.cross_entropy(o.flatten(0, 1), y.flatten(), reduction='none') ).sum() / (y != -100).sum()", True),
        Head(some, "(F.cross_entropy(o.mT, y, reduction='none') * (y != -100)).sum(1).mean()"),
        Head(ids, "F.cross_entropy(o[:, :-1].reshape(-1, o.shape[-1]), y[:, 1:].reshape(-1))" if t > 1 else "F.cross_entropy(o.mT, y)"),
        Head(ids, "F.nll_loss(o.log_softmax(-1).mT, y)"),
        Head(ids, "-o.log_softmax(-1).gather(-1, y.unsqueeze(-1)).mean()"),
        Head(like, "F.mse_loss(o, y)"),
        Head(like, "F.l1_loss(o, y)"),
        Head(like, "(o - y).pow(2).mean((1, 2)).sqrt().mean()"),
        Head(like, "((o - y) ** 2).flatten(1).sum(1).mean()"),
        Head(like, "F.smooth_l1_loss(o.cumsum(1), y)"),
        Head(like, "(1 - F.cosine_similarity(o, y, dim=1)).mean()"),
    ]


def image_heads(w: Writer, c: int, h: int, v: int) -> list[Head]:
    """Of an output (B, c, h, v)."""
    ids = f"torch.randint({c}, (n, {h}, {v}), generator=g)"
    some = f"{ids}.masked_fill(torch.rand(n, {h}, {v}, generator=g) < 0.3, 255)"
    like = f"torch.randn(n, {c}, {h}, {v}, generator=g, dtype=torch.float64).to(DTYPE)"
    return [
        Head(ids, "F.cross_entropy(o, y)"),
        Head(some, "F.cross_entropy(o, y, ignore_index=255)", True),
        Head(ids, "F.nll_loss(F.log_softmax(o, 1), y)"),
        Head(ids, "F.cross_entropy(o.permute(0, 2, 3, 1).flatten(0, 2), y.flatten())"),
        Head(like, "F.mse_loss(o, y)"),
        Head(like, "F.binary_cross_entropy_with_logits(o, y.sigmoid())"),
        Head(like, "F.l1_loss(o, y) + (o.diff(dim=-1).abs().mean() if o.shape[-1] > 1 else 0)"),
        Head(like, "1 - (2 * (o.sigmoid() * y.sigmoid()).sum((1, 2, 3)) / (o.sigmoid() + y.sigmoid()).sum((1, 2, 3))).mean()"),
        Head(like, "((o - y) ** 2).mean((1, 2, 3)).sum()"),
    ]


def head(w: Writer, s: Shape) -> Head:
    """One for an output of a shape."""
    kinds: dict[int, Callable[..., list[Head]]] = {1: vector_heads, 2: sequence_heads, 3: image_heads}
    found = w.rng.choice(kinds[len(s)](w, *s))
    w.used.append(found.loss)
    return found


SMOOTHED = '''
class Smoothed_(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=DTYPE))

    def forward(self, output, batch):
        return F.cross_entropy(logits_of(output) / self.temperature, batch["y"]) + aux_of(output)
'''
SCALED = '''
class Scaled_(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.7, dtype=DTYPE))

    def forward(self, output, batch):
        return F.cross_entropy(logits_of(output) * self.scale, batch["y"]) + aux_of(output)
'''
LOSS_MODULES = {"Smoothed(o, y)": ("Smoothed_", SMOOTHED), "Scaled_(o, y)": ("Scaled_", SCALED)}

# how forward returns `x`: lines, how the loss gets at the logits and at what is added to the loss
OUTPUTS = {
    "tensor": ("return x", "output", "0.0"),
    "tuple": ("return x, x.detach().mean()", "output[0]", "0.0"),
    "dict": ("return {'logits': x, 'aux': x.pow(2).mean() * 0.1}", "output['logits']", "output['aux']"),
    "nested": ("return [{'out': (x, None)}, 3]", "output[0]['out'][0]", "0.0"),
    "dataclass": ("return Output(logits=x, aux=(x * x).mean())", "output.logits", "0.1 * output.aux"),
    "namedtuple": ("return Pair(x, x.abs().mean())", "output.logits", "output.aux * 0.05"),
}
OUTPUT_TOPS = {
    "dataclass": "@dataclass\nclass Output:\n    logits: torch.Tensor\n    aux: torch.Tensor = None\n",
    "namedtuple": "class Pair(NamedTuple):\n    logits: torch.Tensor\n    aux: torch.Tensor\n",
}

# lines of forward that a user should not write, or that flowrun may refuse; {n}: the last dim
MISTAKES = {
    "counter": ("self.calls = 0", "self.calls += 1", "x = x * (1 + 0.1 * self.calls)"),
    "counter unread": ("self.calls = 0", "self.calls += 1"),
    "list": ("self.seen = []", "self.seen.append(x.detach().mean())", "x = x + sum(self.seen)"),
    "dict": ("self.memory = {}", "x = x + self.memory.get('last', 0.0)", "self.memory['last'] = x.detach().mean()"),
    "temperature": ("self.temperature = 1.0", "self.temperature *= 0.9", "x = x / self.temperature"),
    "global": ("pass", "global CALLS", "CALLS += 1", "x = x * CALLS"),
    "attribute tensor": ("self.last = None", "x = x + (self.last if self.last is not None else 0)", "self.last = x.detach().mean(0)"),
    "unregistered tensor": ("self.table = torch.ones({n}).to(DTYPE)", "self.table = self.table * 0.9", "x = x * self.table"),
    "data in control flow": ("pass", "if x.sum() > 0:", "    x = x * 2"),
    "item": ("pass", "x = x * (1 + abs(x.mean().item()))"),
    "tolist": ("pass", "x = x + len(x.detach().flatten().tolist()) * 0.01"),
    "numpy": ("pass", "x = x + torch.from_numpy(x.detach().numpy().copy()).to(x.dtype)"),
    "nonzero": ("pass", "x = x * (x > 0).nonzero().shape[0] * 0.1"),
    "parameter written": ("self.p = nn.Parameter(torch.ones({n}))", "with torch.no_grad():", "    self.p.mul_(0.9)", "x = x * self.p"),
    "parameter data written": ("self.p = nn.Parameter(torch.ones({n}))", "self.p.data = self.p.data * 0.9", "x = x * self.p"),
    "eval in forward": ("self.d = nn.Dropout(0.0)", "self.d.eval()", "x = self.d(x)"),
    "mode flips": ("self.b = nn.LayerNorm({n})", "self.b.train(not self.b.training)", "x = self.b(x) * (2 if self.b.training else 1)"),
    "print": ("pass", "print('x')", "x = x * 1.5"),
    "random python": ("pass", "import random", "x = x * (1 if random.random() < 2 else 2)"),
    "time": ("pass", "import time", "x = x * (1 if time.time() > 0 else 2)"),
    "autograd.grad": ("pass", "with torch.enable_grad():", "    (g,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)", "x = x + g"),
    "wrong shape": ("self.w = nn.Parameter(torch.ones({n} + 1))", "x = x * self.w"),
    "wrong name": ("pass", "x = x * self.nowhere"),
    "wrong dtype": ("pass", "x = x @ torch.ones({n}, {n}, dtype=torch.int64)"),
    "raises": ("pass", "if x.shape[-1] != 1000:", "    raise ValueError('the last dim must be 1000')"),
    "environment": ("pass", "import os", "x = x * float(os.environ.get('NOWHERE_SET', '1.0'))"),
    "shares memory": ("self.p = nn.Parameter(torch.ones({n})); self.q = nn.Parameter(self.p.data)", "x = x * self.p + self.q"),
    "view of a parameter": ("self.p = nn.Parameter(torch.ones(2, {n})); self.q = nn.Parameter(self.p.data[0])", "x = x * self.p[1] + self.q"),
    "lazily made": ("self.cache = None", "if self.cache is None:", "    self.cache = torch.arange({n}, dtype=x.dtype)", "x = x + self.cache"),
    "lazy dict": ("self.cache = {}", "if {n} not in self.cache:", "    self.cache[{n}] = torch.ones({n}, dtype=x.dtype)", "x = x * self.cache[{n}]"),
    "lru_cache": ("pass", "x = x + table({n}).to(x.dtype)"),
    "requires_grad flips": ("self.l = nn.Linear({n}, {n})", "self.l.requires_grad_(False)", "x = self.l(x)"),
    "zero_grad": ("pass", "self.zero_grad()", "x = x * 1.5"),
    "set_num": ("self.step_ = torch.zeros(())", "self.step_ = self.step_ + 1", "x = x * self.step_.to(x.dtype)"),
    "cond": ("pass", "x = torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,))"),
    "sparse": ("self.e = nn.Embedding(5, {n}, sparse=True)", "x = x + self.e((x.detach()[..., 0].tanh() * 2 + 2).long())"),
    "complex parameter": ("self.c = nn.Parameter(torch.ones({n}, dtype=torch.complex64))", "x = x * self.c.abs().to(x.dtype)"),
    "unique": ("pass", "x = x * len(torch.unique(x.detach())) * 0.01"),
    "generator": ("self.g = torch.Generator().manual_seed(3)", "x = x + 0 * torch.rand(x.shape, generator=self.g).to(x.dtype)"),
    "deepcopy": ("self.l = nn.Linear({n}, {n})", "import copy", "x = copy.deepcopy(self.l)(x)"),
}
