# ruff: noqa: E501, RUF059, F541 (rows of tables)
# fmt: off
"""More blocks of random models, of seeds from EXTRA_FROM on: the models of earlier seeds stay as they are."""

from __future__ import annotations

from collections.abc import Callable

from support.nets.random_blocks import Block, Shape, Skip, Writer
from support.nets.random_heads import Head

EXTRAS: dict[str, tuple[tuple[int, ...], Block]] = {}


def extra(*dims: int) -> Callable[[Block], Block]:
    def added(function: Block) -> Block:
        EXTRAS[function.__name__] = (dims, function)
        return function

    return added


STATEMENTS = (
    ("y = x * 1.0", "v = y[:, 0]", "v.add_(1.0)", "x = y * v.mean()"),
    ("y = x + 0.0", "v = y.view(-1)", "v.mul_(0.5)", "x = y + x"),
    ("y = x.clone()", "y.transpose(0, -1)[0].mul_(0.5)", "x = y"),
    ("y = torch.cat([x, x], -1)", "y[..., :{n}].mul_(y[..., {n}:])", "x = y[..., :{n}]"),
    ("y = x.clone()", "y.unsqueeze(0)[0, 0].zero_()", "x = x + y"),
    ("y = x.clone()", "for k in range({n}):", "    y.select(-1, k).mul_(0.9)", "x = y"),
    ("y = x.detach()", "y = y.clone()", "y[..., 0] = 1.0", "x = x * y"),
    ("y = x.sin()", "y.flatten(1)[:, :1].copy_(x.flatten(1)[:, -1:])", "x = y"),
    ("y = x.clone()", "y[..., 0][x[..., 0] > 0] = 0.25", "x = y"),
    ("y = x.clone()", "y[~(x > 0)] = -1.0", "x = y.where(y > -2, x)"),
    ("y = x.clone()", "y[torch.isnan(y)] = 0.0", "x = y"),
    ("x = torch.where(x > 0.0, x, torch.zeros((), dtype=x.dtype))",),
    ("x = torch.where((x > 0).any(-1, keepdim=True), x, -x)",),
    ("x = x.where(x.abs() < 1, x.sign())",),
    ("i = torch.where(torch.tensor([True, False, True]))[0]", "x = x + x.mean(-1, keepdim=True) * i.sum()"),
    ("x = x.roll((1, 2), (0, -1))",),
    ("x = x.roll(1)",),
    ("x = x.cumsum(-1).flip(-1).cumsum(-1) / {n}",),
    ("v, i = x.sort(dim=-1, stable=True)", "x = v.gather(-1, i) + x"),
    ("v, i = x.topk(min(2, {n}), -1, largest=False)", "x = x.scatter_add(-1, i, v)"),
    ("v, i = torch.topk(x, 1, -1)", "x = x.scatter(-1, i, v.tanh())"),
    ("i = x.detach().argsort(-1, descending=True)", "x = torch.zeros_like(x).scatter_(-1, i, x)"),
    ("x = x.gather(-1, torch.arange({n}).flip(0).expand_as(x))",),
    ("v, i = x.cummin(-1)", "x = v + 0.1 * i.to(x.dtype)"),
    ("v, i = x.mode(-1, keepdim=True)", "x = x + v"),
    ("x = x + torch.nanmean(x, -1, keepdim=True)",),
    ("x = torch.einsum('b...i,b...j->b...ij', x, x).sum(-1)",),
    ("x = torch.tensordot(x, torch.ones({n}, {n}, dtype=x.dtype) / {n}, dims=([-1], [0]))",),
    ("x = torch.linalg.multi_dot([x.reshape(-1, {n}), torch.eye({n}, dtype=x.dtype), torch.eye({n}, dtype=x.dtype)]).view(x.shape)",),
    ("x = x.logit(1e-3) if False else x.sigmoid().logit(1e-3)",),
    ("x = torch.func.vmap(torch.sin)(x)",),
    ("x = torch.func.grad(lambda v: (v.sin() * v).sum())(x)",),
    ("_, x = torch.func.jvp(lambda v: v.tanh() * v, (x,), (torch.ones_like(x),))",),
    ("y, pull = torch.func.vjp(torch.tanh, x)", "x = y + pull(torch.ones_like(y))[0]"),
    ("with torch.enable_grad():", "    v = x.detach().requires_grad_(True)", "    (g,) = torch.autograd.grad((v * v.tanh()).sum(), v)", "x = x + g"),
    ("(g,) = torch.autograd.grad((x.tanh() * x).sum(), x, create_graph=True)", "x = x + 0.1 * g"),
    ("with torch.autocast('cpu', dtype=torch.bfloat16, enabled=False):", "    x = x.tanh()"),
    ("with torch.inference_mode():", "    m = torch.ones({n}, dtype=x.dtype) * 0.5", "x = x * m.clone()"),
    ("match x.dim():", "    case 2:", "        x = x * 0.5", "    case _:", "        x = x.tanh()"),
    ("if (k := x.shape[-1]) > 2:", "    x = x / k"),
    ("x = x * len(f'{x.dtype}') / 10",),
    ("x = x.to(next(self.parameters(), x).dtype).tanh()",),
    ("x = x + 1e-3 * sum(p.square().sum() for p in self.parameters())",),
    ("x = x + 1e-3 * sum(p.abs().mean() for n, p in self.named_parameters() if n.endswith('weight'))",),
    ("x = x * (1 + 0.1 * len(list(self.children())))",),
    ("x = torch.stack([x, x]).view(torch.Size([2, *x.shape]))[0]",),
    ("x = x.unflatten(-1, (1, {n})).squeeze(-2)",),
    ("shape = list(x.shape)", "shape[-1] = 1", "x = x + torch.full(shape, 0.5, dtype=x.dtype)"),
    ("x = x.expand(2, *x.shape)[1].contiguous()",),
    ("x = torch.as_strided(x.contiguous(), x.shape, x.contiguous().stride())",),
    ("x = x.T.contiguous().T if x.dim() == 2 else x.mT.contiguous().mT",),
    ("y = torch.empty(0, dtype=x.dtype)", "x = torch.cat([y, x.flatten()]).view_as(x)"),
    ("y = x.new_empty(0)", "x = x + y.sum()"),
    ("x = x.narrow(-1, 0, {n}).narrow_copy(-1, 0, {n})",),
    ("x = x.to(torch.bfloat16).to(x.dtype) + x",),
    ("x = (x.int() * 2).to(x.dtype) + x",),
    ("x = x * torch.tensor([1.0] * {n}, dtype=x.dtype)",),
    ("x = x * torch.linspace(0.5, 1.5, {n}, dtype=x.dtype)",),
    ("x = x + torch.triu_indices(2, 3).sum() * 0.01",),
    ("a, b = torch.meshgrid(torch.arange(2), torch.arange({n}), indexing='ij')", "x = x + (a * b).sum(0).to(x.dtype) * 0.1"),
    ("x = x - x.amin((0, -1), keepdim=True)",),
    ("x = x / x.detach().abs().amax().clamp(min=1e-3)",),
    ("x = (x.unsqueeze(1) * x.unsqueeze(0)).mean(0)",),
    ("i = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(1))", "x = x[i]"),
    ("x = x.index_put((torch.tensor([0, 1]),), x[:2].tanh())",),
    ("x = x.flatten(1).index_put((torch.arange(len(x)), x.flatten(1).argmax(1)), torch.zeros((), dtype=x.dtype)).view_as(x)",),
    ("x = torch.stack(torch.meshgrid(x.flatten()[:2], x.flatten()[:2], indexing='xy')).mean() + x",),
    ("x = torch.clamp_min(x, -1.0).clamp_max(x.mean() + 1)",),
    ("x = torch.float_power(x.abs() + 0.1, 1.5).to(x.dtype)",),
    ("x = x.ldexp(torch.tensor(1)).to(x.dtype)",),
    ("x = torch.gradient(x, dim=-1)[0] if {n} > 1 else x",),
    ("x = F.hardtanh_(x + 0.0)",),
    ("x = F.gelu(x).mul_(0.5).add_(x)",),
    ("x = F.glu(torch.cat([x, x], -1), -1)",),
)


@extra(1, 2, 3)
def more_statements(w: Writer, s: Shape) -> Shape:
    lines = w.rng.choice(STATEMENTS)
    w.used.append("; ".join(lines))
    w.do(*(line.replace("{n}", str(s[-1])) for line in lines))
    return s


@extra(1, 2, 3)
def more_statements_again(w: Writer, s: Shape) -> Shape:
    return more_statements(w, s)


def ids_of(x: str, v: int) -> str:
    return f"({x}.detach().tanh().abs() * {v - 1}).round().long()"


@extra(1)
def embedding_bag(w: Writer, s: Shape) -> Shape:
    c, v, mode = w.size(4, 6), 6, w.pick("sum", "mean", "max")
    sparse = ", sparse=True" * (mode != "max" and w.flip(0.3))
    more = w.pick("", "", ", padding_idx=0") if not sparse else ""
    a = w.made("bag", f"nn.EmbeddingBag({v}, {c}, mode={mode!r}{sparse}{more})")
    w.used.append(f"bag {mode}{sparse}{more}")
    rows = [f"x = self.{a}(ids)", f"x = self.{a}(ids.flatten(), torch.arange(0, ids.numel(), ids.shape[1]))"]
    if mode == "sum":
        rows.append(f"x = self.{a}(ids, per_sample_weights=x.softmax(-1).to(self.{a}.weight.dtype))")
    rows.append(f"x = F.embedding_bag(ids, self.{a}.weight, mode={mode!r})")
    w.do(f"ids = {ids_of('x', v)}", w.rng.choice(rows))
    return (c,)


@extra(1, 2)
def looked_up(w: Writer, s: Shape) -> Shape:
    c, v = w.size(4, 6), 7
    more = w.pick(", max_norm=1.0", ", padding_idx=0", ", sparse=True", ", scale_grad_by_freq=True", ", padding_idx=-1", ", max_norm=0.5, norm_type=1.0", ", padding_idx=0, sparse=True")
    w.used.append(f"embedding{more}")
    a = w.made("codes", f"nn.Embedding({v}, {c}{more})")
    w.do(f"x = self.{a}({ids_of('x', v)}).mean(-2) + x.mean(-1, keepdim=True)")
    return (*s[:-1], c)


@extra(1, 2)
def checkpointed(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    a = w.made("part", f"nn.Sequential(nn.Linear({n}, {n}), nn.Tanh(), nn.Linear({n}, {n}))")
    w.do("from torch.utils.checkpoint import checkpoint, checkpoint_sequential", str(w.pick(
        f"x = checkpoint(self.{a}, x, use_reentrant=False)",
        f"x = x + checkpoint(lambda v: self.{a}(v).sin(), x, use_reentrant=False)",
        f"x = checkpoint_sequential(self.{a}, 2, x, use_reentrant=False)",
        f"x = checkpoint(self.{a}, x, use_reentrant=True)",
        f"x = checkpoint(self.{a}, x, use_reentrant=False, preserve_rng_state=False)",
    )))
    return s


@extra(2)
def recurrent_with_states(w: Writer, s: Shape) -> Shape:
    t, c = s
    h, kind, layers = w.size(4, 6), w.pick("LSTM", "GRU", "RNN"), w.size(1, 2)
    more = w.pick("", ", dropout=0.0", ", bias=False", ", nonlinearity='relu'" if kind == "RNN" else "", ", proj_size=3" if kind == "LSTM" else "")
    out = 3 if "proj" in str(more) else h
    a = w.made("rnn", f"nn.{kind}({c}, {h}, num_layers={layers}, batch_first=True{more})")
    how = w.pick("zeros", "parameter", "mean", "buffer")
    if how == "parameter":
        first = f"self.{w.parameter('first', f'torch.randn({layers}, 1, {out}) * 0.3')}.expand(-1, len(x), -1).contiguous()"
    elif how == "buffer":
        first = f"self.{w.buffer('first', f'torch.randn({layers}, 1, {out}) * 0.3')}.repeat(1, x.shape[0], 1)"
    else:
        first = f"x.new_zeros({layers}, len(x), {out})" if how == "zeros" else f"x.mean((1, 2)).view(1, -1, 1).expand({layers}, -1, {out}).contiguous()"
    state = f"(h, x.new_zeros({layers}, len(x), {h}))" if kind == "LSTM" else "h"
    w.used.append(f"{kind}{more} {how}")
    w.do(f"h = {first}", f"x, last = self.{a}(x, {state})")
    if w.flip(0.3):
        w.do("x = x + (last[0] if isinstance(last, tuple) else last)[-1].unsqueeze(1)")
    return (t, out)


@extra(2)
def time_first(w: Writer, s: Shape) -> Shape:
    t, c = s
    h, kind = w.size(4, 6), w.pick("LSTM", "GRU", "RNN")
    a = w.made("rnn", f"nn.{kind}({c}, {h})")
    w.do(f"x, _ = self.{a}(x.transpose(0, 1))", "x = x.transpose(0, 1)")
    return (t, h)


@extra(2)
def cells_over_time(w: Writer, s: Shape) -> Shape:
    t, c = s
    a, h = w.made("cell", f"nn.GRUCell({c}, 4)"), w.made("start", "nn.Parameter(torch.zeros(4))")
    w.do(f"h, out = self.{h}.expand(len(x), -1), []", f"for k in range({t}):", f"    h = self.{a}(x[:, k], h)", "    out.append(h)", "x = torch.stack(out, 1)")
    return (t, 4)


@extra(1, 2, 3)
def batch_norm_modes(w: Writer, s: Shape) -> Shape:
    kind = "BatchNorm2d" if len(s) == 3 else "BatchNorm1d"
    how = w.pick("momentum=None", "momentum=None, affine=False", "eps=0.1, momentum=1.0", "momentum=0.0", "frozen")
    if how == "frozen":
        w.top("Frozen", "class Frozen(nn.Module):\n    def __init__(self, bn):\n        super().__init__()\n        self.bn = bn.eval()\n\n    def train(self, mode=True):\n        return super().train(False)\n\n    def forward(self, x):\n        return self.bn(x)\n")
        w.layer("bn", f"Frozen(nn.{kind}({s[0]}))")
    else:
        w.layer("bn", f"nn.{kind}({s[0]}, {how})")
    w.used.append(f"bn {how}")
    return s


@extra(2)
def masked_attention(w: Writer, s: Shape) -> Shape:
    t, c = s
    heads, first = w.divisor(c), w.flip(0.7)
    a = w.made("attn", f"nn.MultiheadAttention({c}, {heads}, batch_first={first}, dropout=0.0{w.pick('', ', bias=False', f', kdim={c}, vdim={c}')})")
    keys = "(torch.arange({0}) >= {0} - 1).expand(len({1}), -1)" if t > 1 else "torch.zeros({0}, dtype=torch.bool).expand(len({1}), -1)"
    call = w.pick(
        f"attn_mask=torch.full(({t}, {t}), float('-inf'), dtype=x.dtype).triu(1)",
        f"attn_mask=nn.Transformer.generate_square_subsequent_mask({t}).to(x.dtype), is_causal=True, need_weights=False",
        f"key_padding_mask={keys.format(t, 'z')}",
        f"attn_mask=torch.zeros(len(z) * {heads}, {t}, {t}, dtype=x.dtype)",
        f"attn_mask=torch.ones({t}, {t}, dtype=torch.bool).triu(1), key_padding_mask={keys.format(t, 'z')}" if t > 2 else "need_weights=False",
    )
    w.used.append(f"mha {call}")
    w.do("z = x", *([] if first else ["x = x.transpose(0, 1)"]), f"y, p = self.{a}(x, x, x.tanh(), {call})", *([] if first else ["y = y.transpose(0, 1)"]), "x = z + y")
    return s


@extra(2)
def product_attention(w: Writer, s: Shape) -> Shape:
    t, c = s
    heads = w.divisor(c)
    call = w.pick("", "is_causal=True", f"attn_mask=torch.ones({t}, {t}, dtype=torch.bool).tril()", f"attn_mask=torch.randn({t}, {t}, generator=torch.Generator().manual_seed(0)).to(x.dtype)", "attn_mask=(z.detach().mean(-1) > -9)[:, None, None, :]", "scale=0.3, dropout_p=0.0", f"attn_mask=self.{w.parameter('bias', f'torch.zeros(1, {heads}, {t}, {t})')}")
    w.used.append(f"sdpa {call}")
    w.do("z = x", f"q = z.unflatten(-1, ({heads}, -1)).transpose(1, 2)", f"y = F.scaled_dot_product_attention(q, q.tanh(), q, {call})", "x = z + y.transpose(1, 2).flatten(2)")
    return s


@extra(2)
def whole_transformer(w: Writer, s: Shape) -> Shape:
    t, c = s
    heads = w.divisor(c)
    a = w.made("former", f"nn.Transformer({c}, {heads}, 1, 1, {c}, dropout=0.0, batch_first=True)" if w.flip(0.5) else f"nn.TransformerEncoder(nn.TransformerEncoderLayer({c}, {heads}, {c}, 0.0, batch_first=True), 2, enable_nested_tensor=False)")
    mask = f"nn.Transformer.generate_square_subsequent_mask({t}).to(x.dtype)"
    if "nn.Transformer(" in w.init[-1]:
        w.do(str(w.pick(f"x = self.{a}(x, x.tanh())", f"x = self.{a}(x, x, tgt_mask={mask})")))
    else:
        w.do(str(w.pick(f"x = self.{a}(x)", f"x = self.{a}(x, mask={mask})", f"x = self.{a}(x, src_key_padding_mask=torch.zeros(len(x), {t}, dtype=torch.bool))")))
    return s


@extra(1, 2)
def parametrizations(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    w.top("Symmetric", "class Symmetric(nn.Module):\n    def forward(self, w):\n        return w.triu() + w.triu(1).transpose(-1, -2)\n")
    a = w.made("pn", f"nn.Linear({n}, {n})")
    row = w.pick("nn.utils.parametrize.register_parametrization(self.{0}, 'weight', Symmetric())", "nn.utils.parametrizations.weight_norm(self.{0}, dim=1)", "nn.utils.parametrizations.spectral_norm(self.{0}, n_power_iterations=2)", "nn.utils.spectral_norm(self.{0})", "nn.utils.weight_norm(self.{0}, dim=None)", "nn.utils.parametrizations.orthogonal(self.{0}, orthogonal_map='cayley')", "nn.utils.prune.l1_unstructured(self.{0}, 'weight', 0.3)")
    w.used.append(str(row))
    if "prune" in str(row):
        w.init.append("import torch.nn.utils.prune")
    w.init.append(str(row).format(a))
    w.do(*([f"with nn.utils.parametrize.cached():", f"    x = self.{a}(x) + self.{a}(x.tanh())"] if "parametriz" in str(row) and w.flip(0.2) else [f"x = self.{a}(x)"]))
    return s


@extra(3)
def parametrized_convolution(w: Writer, s: Shape) -> Shape:
    row = w.pick("nn.utils.parametrizations.weight_norm({0})", "nn.utils.parametrizations.spectral_norm({0})", "nn.utils.weight_norm({0})", "nn.utils.spectral_norm({0})")
    w.layer("conv", str(row).format(f"nn.Conv2d({s[0]}, 3, 3, padding=1)"))
    return (3, *s[1:])


@extra(1, 2)
def module_layers(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    rows = [f"nn.Sequential(nn.Linear({n}, {n}), nn.ReLU(inplace=True), nn.Dropout(0.0))", f"nn.Sequential(nn.Linear({n}, {2 * n}), nn.SiLU(inplace=True), nn.Unflatten(-1, (2, {n})), nn.Flatten(-2), nn.Linear({2 * n}, {n}))", "nn.Softmax(dim=-1)", "nn.Hardtanh(inplace=False)", "nn.RReLU(0.2, 0.2)", "nn.Threshold(0.1, 0.0)", f"nn.Sequential(nn.Linear({n}, {n}, dtype=torch.float64), nn.LogSoftmax(-1))", f"nn.LocalResponseNorm(2)" if len(s) > 1 else "nn.Tanhshrink()", "nn.AlphaDropout(0.0)"]
    row = w.rng.choice(rows)
    w.used.append(row)
    w.layer("own", row, "x = self.{0}(x + 0.0)")
    return s


@extra(1, 2)
def mixed_precision_part(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    a = w.made("low", f"nn.Linear({n}, {n})")
    w.do(*w.rng.choice([
        (f"y = F.linear(x.float(), self.{a}.weight.float()).to(x.dtype)", "x = x + y"),
        (f"y = F.linear(x.double(), self.{a}.weight.double(), self.{a}.bias.double())", "x = x + y.to(x.dtype)"),
    ]))
    return s


@extra(1, 2, 3)
def plain_tensors(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    a = w.made("consts", f"[torch.ones({n}, dtype=DTYPE), torch.arange({n}).to(DTYPE)]")
    b = w.made("limits", "{'low': -1.0, 'high': torch.tensor(1.5, dtype=DTYPE)}")
    w.do(f"x = x * self.{a}[0] + self.{a}[1] * 0.1", f"x = torch.clamp(x, min=self.{b}['low']) * self.{b}['high']")
    return s


@extra(1, 2, 3)
def structured_values(w: Writer, s: Shape) -> Shape:
    w.top("State", "@dataclass\nclass State:\n    x: torch.Tensor\n    scale: float = 0.5\n    past: tuple = ()\n")
    w.top("Both", "class Both(NamedTuple):\n    a: torch.Tensor\n    b: torch.Tensor\n")
    w.do(*w.rng.choice([
        ("s = State(x, past=(x.tanh(),))", "x = s.x * s.scale + s.past[0]"),
        ("b = Both(x.sin(), b=x.cos())", "x = b.a + b._replace(a=x).a * b[1]"),
        ("d = dict(a=x, b=x * 2)", "d.update(c=d.pop('b').tanh())", "x = sum(d.values())"),
        ("def inner(*args, scale=1.0, **more):", "    return args[0] * scale + more.get('bias', 0.0)", "x = inner(x, scale=0.5, bias=0.1)"),
        ("xs = [x] * 3", "xs[1] = xs[1].tanh()", "x = torch.stack(tuple(reversed(xs))).mean(0)"),
        ("x = sum((k + 1) * v for k, v in enumerate(x.split(1, 0))) if False else x * 2",),
        ("x = functools.reduce(lambda a, b: a + b, (x, x.sin(), x.cos()))",),
        ("it = iter([x, x.tanh()])", "x = next(it) * next(it)"),
        ("x = [v for v in map(torch.tanh, (x, x + 1)) if v is not None][-1]",),
    ]))
    return s


@extra(1, 2)
def class_features(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    w.top("Base", "class Base(nn.Module):\n    factor = 0.5\n\n    def __init__(self, n):\n        super().__init__()\n        self.lin = nn.Linear(n, n)\n        self._n = n\n\n    @property\n    def n(self):\n        return self._n\n\n    @staticmethod\n    def act(x):\n        return x.tanh()\n\n    @classmethod\n    def scaled(cls, x):\n        return x * cls.factor\n\n    def forward(self, x, *, residual=True):\n        y = self.scaled(self.act(self.lin(x))) / self.n\n        return x + y if residual else y\n")
    w.top("Derived", "class Derived(Base):\n    factor = 2.0\n\n    def forward(self, x, **kwargs):\n        return super().forward(x, **kwargs) * 0.5\n\n    def __call__(self, *args, **kwargs):\n        return super().__call__(*args, **kwargs)\n")
    w.layer("own", f"{w.pick('Base', 'Derived')}({n})", str(w.pick("x = self.{0}(x)", "x = self.{0}(x, residual=False)", "x = getattr(self, '{0}')(x)", "x = self.{0}.forward(x)", "x = type(self.{0}).forward(self.{0}, x)")))
    return s


@extra(1, 2)
def functional_call(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    a = w.made("inner", f"nn.Linear({n}, {n})")
    w.do(f"x = torch.func.functional_call(self.{a}, {{k: v * 0.5 for k, v in self.{a}.named_parameters()}}, (x,))")
    return s


@extra(1)
def more_linear_algebra(w: Writer, s: Shape) -> Shape:
    n = s[0]
    if n > 6 or n < 2:
        raise Skip
    p = w.parameter("m", f"torch.randn({n}, {n}) * 0.2")
    eye = f"torch.eye({n}, dtype=x.dtype)"
    w.do(str(w.pick(
        f"x = x + torch.linalg.eigvalsh(self.{p} @ self.{p}.mT + torch.diag(torch.arange({n}, dtype=x.dtype)))",
        f"x = x * torch.linalg.slogdet(self.{p} + 2 * {eye})[1]",
        f"x = x @ torch.linalg.pinv(self.{p} + 2 * {eye})",
        f"x = x @ torch.linalg.lstsq(self.{p} + 2 * {eye}, {eye}).solution",
        f"x = x @ torch.linalg.solve_triangular(self.{p}.tril(-1) + {eye}, {eye}, upper=False)",
        f"x = x * torch.linalg.matrix_norm(self.{p})",
        f"x = x @ torch.kron(self.{p}, torch.ones(1, 1, dtype=x.dtype))",
        f"x = x @ (torch.cov(self.{p}) + {eye})",
        f"x = x @ torch.cholesky_inverse(torch.linalg.cholesky(self.{p} @ self.{p}.mT + {eye}))",
        f"x = x + torch.linalg.cross(x[:, :1].expand(-1, 3), x.new_tensor([[1.0, 2.0, 3.0]])).mean(1, keepdim=True)",
        f"x = torch.linalg.solve(torch.bmm(x[:, :, None], x[:, None]) + 2 * {eye}, x)",
    )))
    return s


@extra(3)
def image_modules(w: Writer, s: Shape) -> Shape:
    c, h, v = s
    if min(h, v) < 4 or max(h, v) > 8 or h % 2 or v % 2:
        raise Skip
    row, shape = w.rng.choice([
        ("nn.Sequential(nn.ZeroPad2d(1), nn.MaxPool2d(2, 2, 1))", (c, h // 2 + 2, v // 2 + 2) if False else None),
        ("nn.Upsample(scale_factor=0.5, mode='nearest')", (c, h // 2, v // 2)),
        ("nn.Softmax2d()", s),
        ("nn.Sequential(nn.ReflectionPad2d(1), nn.AvgPool2d(3, 1))", s),
        (f"nn.Sequential(nn.Unfold(2, stride=2), nn.Fold(({h}, {v}), 2, stride=2))", s),
        ("nn.Dropout2d(0.0)", s),
        (f"nn.LayerNorm([{c}, {h}, {v}])", s),
        (f"nn.Sequential(nn.Conv2d({c}, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(inplace=True), nn.Conv2d(4, {c}, 1))", s),
        (f"nn.Sequential(nn.Conv2d({c}, 4, 2, stride=2), nn.ConvTranspose2d(4, {c}, 3, stride=2, padding=1, output_padding=1))", s),
    ])
    if shape is None:
        raise Skip
    w.used.append(row)
    w.layer("own", row)
    return tuple(shape)


@extra(3)
def unpooled(w: Writer, s: Shape) -> Shape:
    c, h, v = s
    if h % 2 or v % 2:
        raise Skip
    w.do("y, i = F.max_pool2d(x, 2, return_indices=True)", "x = F.max_unpool2d(y, i, 2) + x")
    return s


@extra(3)
def spectrum(w: Writer, s: Shape) -> Shape:
    c, h, v = s
    w.do(str(w.pick(f"x = torch.fft.irfft2(torch.fft.rfft2(x) * 0.5, s=({h}, {v}))", "x = torch.fft.fft2(x, norm='ortho').real", "x = torch.fft.fftshift(x, (-1,))")))
    return s


@extra(1, 2, 3)
def assigned_buffers(w: Writer, s: Shape) -> Shape:
    n = s[-1]
    a = w.made("kept", f"nn.Buffer(torch.zeros({n}))")
    w.do(*w.rng.choice([
        (f"self.{a} = x.detach().flatten(0, -2).mean(0)", f"x = x + self.{a}"),
        (f"if self.training:", f"    self.{a} = torch.lerp(self.{a}, x.detach().flatten(0, -2).amax(0), 0.1)", f"x = x - self.{a}.detach()"),
        (f"b = self.get_buffer('{a}')", "b.add_(0.1)", "x = x * (1 + b)"),
        (f"setattr(self, '{a}', self.{a} * 0.5 + 0.1)", f"x = x + self.{a}"),
    ]))
    return s


@extra(1, 2)
def decorated(w: Writer, s: Shape) -> Shape:
    w.top("targets", "@torch.no_grad()\ndef targets(x):\n    return x.sign()\n")
    w.top("traced", "def traced(function):\n    @functools.wraps(function)\n    def inner(*args, **kwargs):\n        return function(*args, **kwargs) * 1.5\n    return inner\n\n\n@traced\ndef squashed(x):\n    return x.tanh()\n")
    w.top("scripted", "@torch.jit.script\ndef scripted(x):\n    return x * torch.sigmoid(x)\n") if w.flip(0.15) else None
    name = "scripted" if "scripted" in w.tops else "squashed"
    w.do(f"x = x + targets(x) * 0.1", f"x = {name}(x)")
    return s


# ---- ends ----------------------------------------------------------------------------------------

PROJECTED = '''
class Projected_(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.LazyLinear(3) if False else nn.Linear({n}, 3)
        self.norm = nn.LayerNorm(3)
        self.to(DTYPE)

    def forward(self, output, batch):
        z = self.norm(self.project(logits_of(output)))
        return (z - batch["y"]).square().mean() + aux_of(output)
'''
CENTRES = '''
class Centres_(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.linspace(-1, 1, {n} * {n}).view({n}, {n}).to(DTYPE))

    def forward(self, output, batch):
        o = logits_of(output)
        return F.cross_entropy(o, batch["y"]) + 0.1 * (o - self.centres[batch["y"]]).pow(2).sum(-1).mean() + aux_of(output)
'''


def extra_heads(w: Writer, s: Shape) -> list[Head]:
    n = s[-1]
    if len(s) == 1:
        ids = f"torch.randint({n}, (n,), generator=g)"
        like = "torch.randn(n, 3, generator=g, dtype=torch.float64).to(DTYPE)"
        rows = [
            Head(like, "Projected_(o, y)", module=("Projected_", PROJECTED.replace("{n}", str(n)))),
            Head(ids, "Centres_(o, y)", module=("Centres_", CENTRES.replace("{n}", str(n)))),
            Head(ids, "nn.CrossEntropyLoss(label_smoothing=0.1, reduction='sum')(o, y) / len(y)"),
            Head(ids, "F.cross_entropy(o.double(), y)"),
            Head(ids, "F.cross_entropy(o.float(), y).to(o.dtype)"),
            Head(ids, "sum(F.cross_entropy(a[None], b[None]) for a, b in zip(o, y)) / len(y)"),
            Head(ids, "F.cross_entropy(o, y) * 1.0 + 0.0 * o.sum()"),
            Head(ids, "F.nll_loss(o.softmax(-1).clamp(min=1e-6).log(), y, reduction='mean')"),
            Head(ids, "(-F.log_softmax(o, 1) * F.one_hot(y, o.shape[1])).sum(1).topk(len(y) // 2 + 1).values.mean()"),
            Head(ids, f"own: {w.made('adaptive', f'nn.AdaptiveLogSoftmaxWithLoss({n}, {n}, cutoffs=[1], div_value=1.0)')}") if n > 2 and w.flip(0.3) else Head(ids, "F.cross_entropy(o, y)"),
        ]
    elif len(s) == 2:
        t = s[0]
        ids = f"torch.randint({n}, (n, {t}), generator=g)"
        rows = [
            Head(ids, "F.cross_entropy(o.transpose(1, 2).contiguous(), y, reduction='sum') / y.numel()"),
            Head(ids, "F.cross_entropy(o.mT.unsqueeze(-1), y.unsqueeze(-1))"),
            Head(ids, "torch.stack([F.cross_entropy(o[:, k], y[:, k]) for k in range(o.shape[1])]).mean()"),
        ]
        if t >= 3 and n >= 2:
            k = (t - 1) // 2
            rows += 3 * [Head(f"torch.randint(1, {n}, (n, {k}), generator=g)", f"F.ctc_loss(o.log_softmax(-1).transpose(0, 1), y, torch.full((len(y),), {t}), torch.full((len(y),), {k}))")]
    else:
        ids = f"torch.randint({n and s[0]}, (n, {s[1]}, {s[2]}), generator=g)"
        rows = [Head(ids, "F.cross_entropy(o.flatten(2), y.flatten(1), label_smoothing=0.1)"), Head(ids, "F.nll_loss(o.log_softmax(1), y, reduction='sum') / y.numel()")]
    return rows


MORE_MISTAKES = {
    "nested tensor": ("pass", "z = torch.nested.nested_tensor([v for v in x])", "x = x + z.to_padded_tensor(0.0).reshape(x.shape) * 0.1"),
    "masked values": ("pass", "m = x > 0", "y = x.clone()", "y[m] = y[m] * 0.5", "x = y"),
    "masked sum": ("pass", "y = x.clone()", "y[(x > 0) & (x < 1)] += 0.5", "x = y"),
    "packed": ("self.r = nn.GRU({n}, {n}, batch_first=True)", "p = nn.utils.rnn.pack_padded_sequence(x.flatten(1)[:, None, :{n}], torch.ones(len(x)), batch_first=True)", "x = x + self.r(p)[1].sum()"),
    "masked_select": ("pass", "x = x + x[x > 0].mean()"),
    "masked select of rows": ("pass", "x = x + x[x.flatten(1).sum(1) > 0].sum() * 0.1"),
    "nonzero values": ("pass", "i = torch.nonzero(x.detach() > 0)", "x = x + i.shape[0]"),
    "bincount": ("pass", "x = x + torch.bincount((x.detach().flatten() > 0).long(), minlength=2).sum() * 0.01"),
    "compiled part": ("self.l = torch.compile(nn.Linear({n}, {n}), backend='eager')", "x = self.l(x)"),
    "scripted part": ("self.l = torch.jit.script(nn.Linear({n}, {n}))", "x = self.l(x)"),
    "lazy layer": ("self.l = nn.LazyLinear({n})", "x = self.l(x)"),
    "data assigned": ("pass", "x = x * 1.0", "x.data = x.data * 0.5"),
    "seeded": ("pass", "torch.manual_seed(0)", "x = x * 1.5"),
    "backward in forward": ("self.p = nn.Parameter(torch.ones({n}))", "(self.p * 2).sum().backward()", "x = x * self.p"),
    "hook in forward": ("self.p = nn.Parameter(torch.ones({n}))", "self.p.register_hook(lambda g: g * 2)", "x = x * self.p"),
    "warns": ("pass", "import warnings", "warnings.warn('slow')", "x = x * 1.5"),
    "logs": ("pass", "import logging", "logging.getLogger('m').info('x %s', x.shape)", "x = x * 1.5"),
    "registers in forward": ("pass", "self.register_buffer('late', torch.ones({n}, dtype=x.dtype))", "x = x * self.late"),
    "adds a module": ("pass", "self.more = nn.Identity()", "x = self.more(x)"),
    "deletes": ("self.temp = 1.0", "self.temp2 = 2.0", "del self.temp2", "x = x * self.temp"),
    "recursion": ("pass", "def down(v, k):\n            return v if k == 0 else down(v.tanh(), k - 1)", "x = down(x, 2)"),
    "generator function": ("pass", "def parts(v):\n            yield v\n            yield v.tanh()", "x = sum(parts(x))"),
    "numpy random": ("pass", "import numpy as np", "x = x * (1 if np.random.rand() < 2 else 0)"),
    "default dtype": ("pass", "torch.set_default_dtype(torch.float32)", "x = x * 1.5"),
    "detaches": ("pass", "y = x.tanh()", "y.detach_()", "x = x + y"),
    "out of range": ("self.e = nn.Embedding(2, {n})", "x = x + self.e(torch.full(x.shape[:-1], 2))"),
    "none": ("self.l = None", "x = self.l(x)"),
    "set in forward": ("self.p = nn.Parameter(torch.ones({n}))", "self.p = nn.Parameter(self.p.detach() * 0.9)", "x = x * self.p"),
    "unpickled": ("self.lock = __import__('threading').Lock()", "with self.lock:\n            x = x * 1.5"),
    "weight data": ("self.l = nn.Linear({n}, {n})", "self.l.weight.data.clamp_(-0.1, 0.1)", "x = self.l(x)"),
    "weight normed": ("self.l = nn.Linear({n}, {n})", "with torch.no_grad():\n            self.l.weight.copy_(F.normalize(self.l.weight, dim=1))", "x = self.l(x)"),
    "exec": ("pass", "exec('y = 1')", "x = x * 1.5"),
    "closure counter": ("self.count = iter(range(10**9))", "x = x * (1 + next(self.count))"),
    "shape of values": ("pass", "n = int(x.detach().abs().max()) + 1", "x = x + torch.ones(n, dtype=x.dtype).sum()"),
    "open file": ("pass", "open('/dev/null').read()", "x = x * 1.5"),
    "two devices": ("pass", "x = x + torch.ones({n}, device='meta')"),
    "integer parameter": ("self.k = nn.Parameter(torch.arange({n}), requires_grad=False)", "x = x * self.k.to(x.dtype)"),
    "moved": ("pass", "x = x.to('cpu', non_blocking=True).cpu()"),
}
