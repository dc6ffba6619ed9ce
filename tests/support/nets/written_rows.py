# ruff: noqa: E501 (a row a line)
"""What people write in `forward`: a row of a table each, which turns x of (B, 4, 6) into the next x.

What stands before `::` is of the constructor, whose names are self.a to self.e; `|` ends a line.
Functions of torch alone and modules alone are in survey.py.
"""

IN_PLACE = """
y = x.clone() | y[..., 0] = 0.5 | x = y
y = x.clone() | y[:, 0] = x[:, -1].tanh() | x = y
y = x.clone() | y[y < 0] = 0.1 | x = y
y = x.clone() | y[x[..., 0] > 0] = 0.2 | x = y
y = x.clone() | y[..., 0][x[..., 0] > 0] = 0.25 | x = y
y = x.clone() | y[~(x > 0)] = -1.0 | x = y.where(y > -2, x)
y = x.clone() | y[:, torch.arange(4) % 2 == 0] = x.mean(1, keepdim=True).detach() | x = y
y = x.clone() | y[y.flatten(1).sum(1) > 0] = y.mean(0).detach() | x = y
x = x.index_put((x > 0,), torch.tensor(0.25, dtype=x.dtype), accumulate=True)
y = x * 1.0 | y[y < -0.5] = -0.5 | y += 1 | y[y > 1.5] = 1.5 | y[:, 2:] = 0 | y.mul_(2).clamp_(max=2.5) | y[:, 0] = y[:, 1] | x = y
y = x.masked_fill(x < 0, 0.1) | y = y.masked_scatter(y > 0.4, torch.ones_like(x)) | x = torch.where(x > 0.2, x, y)
y = torch.zeros_like(x) | y[..., :1] = x[..., :1] | x = x + y
y = x.new_zeros(x.shape) | y[:, ...] = x.sin() | x = y
y = torch.empty_like(x) | y.copy_(x) | x = y * 2
y = x.clone() | y[::2] = y[::2] * 0.5 | x = y
y = x.clone() | y[:, 0].add_(1.0) | x = y
y = x.clone() | y[..., :1].mul_(2.0).tanh_() | x = y
x = x * 1.0 | x += 0.1 | x.mul_(0.9)
x = x + 0.0 | x.clamp_(-1, 1).add_(x)
x = F.relu(x + 0.1, inplace=True)
y = x + 0 | y.masked_scatter_(x > 0, x.flip(-1)) | x = y
y = x.clone() | y.index_put_((torch.tensor([0, 0]),), x[:1] * 0.1, accumulate=True) | x = y
y = x.clone() | y.scatter_(-1, x.argmax(-1, keepdim=True), 0.0) | x = y
y = x.clone() | y.index_add_(-1, torch.tensor([0]), x[..., -1:]) | x = y
y = x.clone() | y.fill_(0.5) | x = x + y
y = x.clone() | y.diagonal(dim1=0, dim2=-1).mul_(0.5) | x = y
y = x.clone() | y.view(-1)[:2] = 0.5 | x = y
y = x.detach().clone() | y.requires_grad_(False) | y[..., 0] = 1.0 | x = x * y
g = torch.full((1,), 0.3, dtype=x.dtype) | g[0] = 0.7 | x = x * g
mask = torch.ones_like(x, dtype=torch.bool) | mask[..., 0] = False | x = torch.where(mask, x, x.new_zeros(()))
y = x * 1.0 | v = y[:, 0] | v.add_(1.0) | x = y * v.mean()
y = x + 0.0 | v = y.view(-1) | v.mul_(0.5) | x = y + x
y = x.clone() | y.transpose(0, -1)[0].mul_(0.5) | x = y
y = x.clone() | y.unsqueeze(0)[0, 0].zero_() | x = x + y
y = x.clone() | for k in range(6): |     y.select(-1, k).mul_(0.9) | x = y
y = x.sin() | y.flatten(1)[:, :1].copy_(x.flatten(1)[:, -1:]) | x = y
i = x.detach().argsort(-1, descending=True) | x = torch.zeros_like(x).scatter_(-1, i, x)
x = F.gelu(x).mul_(0.5).add_(x)
"""

PYTHON = """
a, b = x[..., :1], x[..., 1:] | x = torch.cat([b, a], -1)
a, b = x.split([1, 5], -1) | x = torch.cat([b.tanh(), a], -1)
h = x | for k in range(3): |     h = h + 0.1 * torch.sin(h * (k + 1)) | x = h
parts = [] | for k in range(6): |     parts.append(x[..., k] * (k + 1)) | x = torch.stack(parts, -1)
f = lambda v, s=0.5: v * s + 1 | x = f(f(x), s=0.2)
if self.training and x.dim() > 1: |     x = x * 1.5 | else: |     x = x.tanh()
match x.dim(): |     case 2: |         x = x * 0.5 |     case _: |         x = x.tanh()
with torch.no_grad(): |     m = x.mean(-1, keepdim=True) | x = x - m
with torch.autograd.set_grad_enabled(True): |     x = x.tanh()
with torch.autocast('cpu', dtype=torch.bfloat16, enabled=False): |     x = x.tanh()
with torch.inference_mode(): |     m = torch.ones(6, dtype=x.dtype) * 0.5 | x = x * m.clone()
try: |     x = x.sin() | finally: |     pass
n, *rest = x.shape | x = x.reshape(n, -1).tanh().reshape(n, *rest)
assert x.shape[0] > 0, 'empty' | torch._assert(x.dim() > 1, 'dims') | x = x * 2
from functools import reduce | x = reduce(torch.add, [x, x.sin(), x.cos()])
keep = x.detach() > 0 | x = x * keep / keep.to(x.dtype).mean().clamp(min=0.1)
x = torch.func.vmap(torch.sin)(x)
x = torch.func.grad(lambda v: (v.sin() * v).sum())(x)
_, x = torch.func.jvp(lambda v: v.tanh() * v, (x,), (torch.ones_like(x),))
y, pull = torch.func.vjp(torch.tanh, x) | x = y + pull(torch.ones_like(y))[0]
with torch.enable_grad(): |     v = x.detach().requires_grad_(True) |     (g,) = torch.autograd.grad((v * v.tanh()).sum(), v) | x = x + g
(g,) = torch.autograd.grad((x.tanh() * x).sum(), x, create_graph=True) | x = x + 0.1 * g
if (k := x.shape[-1]) > 2: |     x = x / k
x = x + 1e-3 * sum(p.square().sum() for p in self.parameters())
x = x + 1e-3 * sum(p.abs().mean() for n, p in self.named_parameters() if n.endswith('weight'))
x = x * (1 + 0.1 * len(list(self.children())))
x = torch.as_strided(x.contiguous(), x.shape, x.contiguous().stride())
y = x.contiguous().as_strided((len(x), 2, 12), (24, 12, 1)) | x = x + y.softmax(-1).reshape(x.shape)
y = x.contiguous().as_strided((len(x), 2, 6), (24, 12, 1), 3) | x = x + y.mean(1, keepdim=True)
y = x.reshape(-1, 4, 2, 3).contiguous(memory_format=torch.channels_last) | x = x + y.as_strided((len(x), 2, 6), (24, 12, 2)).mean(1, keepdim=True)
y = x.reshape(-1, 4, 2, 3).contiguous(memory_format=torch.channels_last) | x = x + F.adaptive_avg_pool2d(y, 1)[..., 0]
x = x + F.one_hot(x.argmax(-1), 6)
y = torch.empty(0, dtype=x.dtype) | x = torch.cat([y, x.flatten()]).view_as(x)
x = x.to(torch.bfloat16).to(x.dtype) + (x.int() * 2).to(x.dtype) + x
x = x + torch.triu_indices(2, 3).sum() * 0.01
x = x - x.amin((0, -1), keepdim=True)
x = (x.unsqueeze(1) * x.unsqueeze(0)).mean(0)
x = x - x.mean(0, keepdim=True) | x = x / (x.std(0, keepdim=True) + 1)
x = x[x.flatten(1).sum(1).argsort(descending=True)]
x = x + (x.flatten(1) @ x.flatten(1).t()).mean(1).view(-1, 1, 1) * 0.1
x = x + torch.arange(x.shape[0], dtype=x.dtype).view(-1, 1, 1) * 0.1
x = torch.stack([s * 2 for s in x])
x = x + F.batch_norm(x.flatten(1), None, None, training=True).view(x.shape)
def inner(*args, scale=1.0, **more): |     return args[0] * scale + more.get('bias', 0.0) | x = inner(x, scale=0.5, bias=0.1)
xs = [x] * 3 | xs[1] = xs[1].tanh() | x = torch.stack(tuple(reversed(xs))).mean(0)
it = iter([x, x.tanh()]) | x = next(it) * next(it)
b = Both(x.sin(), b=x.cos()) | x = b.a + b._replace(a=x).a * b[1]
x = x + targets(x) * 0.1 | x = squashed(x)
h, out = x.new_zeros(x.shape[0], 6), [] | for k in range(4): |     h = 0.5 * h + x[:, k] |     out.append(h) | x = torch.stack(out, 1)
m = (x.detach().mean(-1) > 0.1).to(x.dtype) | y = (x * m.unsqueeze(-1)).sum(1) / m.sum(1, keepdim=True).clamp(min=1) | x = x + y[:, None]
i = (torch.arange(4) % 2).expand(x.shape[0], -1)[..., None] | y = x.new_zeros(x.shape[0], 2, 6).scatter_add(1, i.expand_as(x), x) | x = torch.cat([x[:, 2:], y], 1)
z = torch.view_as_complex(x.reshape(*x.shape[:-1], 3, 2)) | x = torch.view_as_real(z * z.conj().angle().cos()).flatten(-2)
y = x.unsqueeze(1) | y = F.grid_sample(y, F.affine_grid(torch.eye(2, 3, dtype=x.dtype).expand(len(y), 2, 3), y.shape, align_corners=False), align_corners=False) | x = y[:, 0]
y = x.unsqueeze(1).contiguous(memory_format=torch.channels_last) | x = F.fold(F.unfold(y, 3, padding=1), (4, 6), 3, padding=1)[:, 0] / 9
"""

PARTS = """
self.a = nn.Parameter(torch.randn(6, 6) * 0.3) :: x = x @ self.a.tanh() + F.linear(x, self.a.t())
self.a = nn.Parameter(torch.tensor(0.7)) :: x = torch.where(x > self.a, x, self.a * x) * self.a.exp()
self.a = nn.ParameterList([nn.Parameter(torch.randn(6) * 0.3) for _ in range(3)]) :: for p in self.a: |     x = x + p * x.tanh()
self.a = nn.ParameterDict({"mean": nn.Parameter(torch.randn(6)), "std": nn.Parameter(torch.ones(6))}) :: x = (x - self.a["mean"]) * self.a["std"]
self.a = nn.Linear(6, 6) | self.a.requires_grad_(False) :: x = self.a(x)
self.a = nn.Linear(6, 6) :: with torch.no_grad(): |     t = self.a(x) | x = x + t
self.a = nn.Linear(6, 6) | self.b = nn.Parameter(torch.randn(6, 6), requires_grad=False) :: with torch.no_grad(): |     self.b.mul_(0.9).add_(self.a.weight, alpha=0.1) | x = self.a(x) + x @ self.b
self.a = nn.Linear(6, 6) :: x = F.linear(x, self.a.weight.detach(), self.a.bias) + F.linear(x.detach(), self.a.weight)
self.a = nn.Linear(6, 3) :: x = x * 1.0
self.a = nn.Linear(6, 4, bias=False) | self.b = nn.Linear(6, 4, bias=False) | self.b.weight = self.a.weight :: x = (self.a(x).tanh() + self.b(x).sin()) @ self.a.weight
self.a = nn.Linear(6, 6) | self.b = self.a :: x = self.b(torch.relu(self.a(x)))
self.a = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)]) :: for layer in reversed(self.a): |     x = x + layer(x).tanh()
self.a = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)]) :: hidden = [x] | for k, layer in enumerate(self.a): |     hidden.append(layer(hidden[-1]).sigmoid() * k) | x = torch.stack(hidden[1:], -1).mean(-1)
self.a = nn.ModuleDict({"left": nn.Linear(6, 6), "mean": nn.Linear(6, 6)}) :: for name, head in self.a.items(): |     if name == 'mean': |         x = x + head(x)
self.a = 'gelu' | self.b = None | self.c = functools.partial(F.leaky_relu, negative_slope=0.3) :: if self.a == 'gelu' and self.b is None: |     x = self.c(x)
self.a = [torch.ones(6, dtype=DTYPE), torch.arange(6).to(DTYPE)] | self.b = {'low': -1.0, 'high': torch.tensor(1.5, dtype=DTYPE)} :: x = torch.clamp(x * self.a[0] + self.a[1] * 0.1, min=self.b['low']) * self.b['high']
self.register_buffer("a", torch.randn(6), persistent=False) | self.register_buffer("b", torch.randn(4, 1)) :: x = x * self.a - self.b.detach().tanh()
self.register_buffer("a", torch.zeros(6)) :: self.a.mul_(0.9).add_(x.detach().flatten(0, -2).mean(0), alpha=0.1) | x = x - self.a
self.register_buffer("a", torch.zeros(6)) :: self.a = 0.9 * self.a + 0.1 * x.detach().flatten(0, -2).mean(0) | x = x + self.a.clone()
self.register_buffer("a", torch.zeros(6)) :: with torch.no_grad(): |     self.a += x.detach().flatten(0, -2).mean(0) | x = x - self.a
self.register_buffer("a", torch.zeros(6)) :: m = self.a.mul(0.5) + x.detach().mean((0, 1)) | self.a.copy_(m) | x = x + m
self.register_buffer("a", torch.zeros(())) :: self.a += 1 | x = x / (1 + 0.1 * self.a)
self.register_buffer("a", torch.tensor(0)) :: self.a = self.a + 1 | x = x / (1 + 0.1 * self.a)
self.register_buffer("a", torch.zeros(4, 6)) :: x = x + self.a.mean(0) | self.a = torch.cat([self.a[1:], x.detach().flatten(0, -2)[:1]])
self.register_buffer("a", torch.zeros(4, 6)) :: self.a[:-1] = self.a[1:].clone() | self.a[-1:] = x.detach().flatten(0, -2)[:1] | x = x + self.a.sum(0) * 0.1
self.a = nn.Buffer(torch.zeros(6)) :: setattr(self, 'a', self.a * 0.5 + 0.1) | x = x + self.a
self.a = nn.Linear(6, 6) | self.a.weight.register_hook(lambda g: g.clamp(-0.01, 0.01)) | self.a.bias.register_hook(lambda g: None) :: x = self.a(x)
self.a = nn.Linear(6, 6) | self.register_buffer("b", torch.arange(6.0)) | mask = (torch.arange(6) < 3).to(DTYPE) | self.a.weight.register_hook(lambda g: g * mask) | self.a.weight.register_hook(lambda g: g / (g.norm() + 1e-6)) | self.a.bias.register_hook(lambda g: [g.mul_(0.5), None][1]) | self.a.bias.register_hook(lambda g: g * self.b + 0.1 * self.a.bias.detach()) :: x = self.a(x)
self.a = nn.Linear(6, 6) | self.a.register_forward_hook(lambda m, i, o: o * 2) | self.a.register_forward_pre_hook(lambda m, i: (i[0].tanh(),)) :: x = self.a(x)
x = x.tanh() | if x.requires_grad: |     x.register_hook(lambda g: g * 0.5) | x = x * 2
self.a = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)) | self.b = nn.utils.weight_norm(nn.Linear(6, 6), dim=None) :: x = self.a(x) + self.b(x)
self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6), n_power_iterations=2) | self.b = nn.utils.spectral_norm(nn.Linear(6, 6)) :: x = self.a(x) + self.b(x)
self.a = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map='cayley') :: x = self.a(x)
self.a = nn.Linear(6, 6) | nn.utils.parametrize.register_parametrization(self.a, 'weight', Symmetric()) :: with nn.utils.parametrize.cached(): |     x = self.a(x) + self.a(x.tanh())
from torch.nn.utils import prune | self.a = nn.Linear(6, 6) | prune.l1_unstructured(self.a, 'weight', 0.3) :: x = self.a(x)
self.a = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) :: from torch.utils.checkpoint import checkpoint | x = x + checkpoint(lambda v: self.a(v).sin(), x, use_reentrant=False)
self.a = nn.Sequential(nn.Linear(6, 12), nn.SiLU(inplace=True), nn.Unflatten(-1, (2, 6)), nn.Flatten(-2), nn.Linear(12, 6), nn.Dropout(0.0)) :: x = self.a(x)
self.a = nn.Linear(6, 6) :: x = torch.func.functional_call(self.a, {k: v * 0.5 for k, v in self.a.named_parameters()}, (x,))
self.a = nn.Linear(6, 6) :: y = F.linear(x.float(), self.a.weight.float()).to(x.dtype) | x = x + y
self.a = Derived(6) :: x = self.a(x, residual=False) + type(self.a).forward(self.a, x)
self.a = Frozen(nn.BatchNorm1d(4)) | self.b = nn.BatchNorm1d(4, momentum=None) | self.c = nn.BatchNorm1d(4, affine=False, track_running_stats=False) :: x = self.a(x) + self.b(x) + self.c(x)
self.a = nn.InstanceNorm1d(4, affine=True, track_running_stats=True) | self.b = nn.GroupNorm(2, 4) :: x = self.a(x) + self.b(x)
self.a = nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True, proj_size=3) :: x = self.a(x)[0]
self.a = nn.Parameter(torch.randn(1, 1, 6) * 0.3) | self.b = nn.GRU(6, 6, batch_first=True) :: x, last = self.b(x, self.a.expand(-1, len(x), -1).contiguous()) | x = x + last[-1].unsqueeze(1)
self.a = nn.RNN(6, 6, nonlinearity='relu') :: x = self.a(x.transpose(0, 1))[0].transpose(0, 1)
self.a = nn.GRUCell(6, 6) | self.b = nn.Parameter(torch.zeros(6)) :: h, out = self.b.expand(len(x), -1), [] | for k in range(4): |     h = self.a(x[:, k], h) |     out.append(h) | x = torch.stack(out, 1)
self.a = nn.LSTMCell(6, 6) :: h = (x.new_zeros(len(x), 6), x.new_zeros(len(x), 6)) | for _ in range(2): |     h = self.a(x[:, 0], h) | x = x + h[0][:, None]
self.a = nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=True) :: y, _ = self.a(x, x, x, attn_mask=torch.ones(4, 4, dtype=torch.bool).triu(1), need_weights=False) | x = x + y
self.a = nn.MultiheadAttention(6, 3, batch_first=False, bias=False) :: z = x.transpose(0, 1) | y, p = self.a(z, z, z.tanh(), key_padding_mask=(torch.arange(4) >= 3).expand(len(x), -1)) | x = x + y.transpose(0, 1)
self.a = nn.Linear(6, 18) :: q, k, v = self.a(x).view(-1, 4, 3, 2, 3).permute(2, 0, 3, 1, 4) | y = F.scaled_dot_product_attention(q, k, v, is_causal=True) | x = x + y.transpose(1, 2).reshape(-1, 4, 6)
self.a = nn.Linear(6, 18) :: q, k, v = (p.view(-1, 4, 2, 3).transpose(1, 2) for p in self.a(x).chunk(3, -1)) | p = q @ k.transpose(-2, -1) / 3 ** 0.5 | p = p.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), float('-inf')) | x = x + (p.softmax(-1) @ v).transpose(1, 2).flatten(2)
self.a = nn.Linear(6, 18) :: q, k, v = [p.unflatten(-1, (2, 3)).transpose(1, 2) for p in self.a(x).split(6, -1)] | p = torch.einsum("bhtd,bhsd->bhts", q, k).softmax(-1) | x = x + torch.einsum("bhts,bhsd->bhtd", p, v).transpose(1, 2).contiguous().view(-1, 4, 6)
self.a = nn.Linear(6, 6) | self.b = nn.Linear(6, 6) | self.c = nn.Parameter(torch.zeros(1, 2, 4, 4)) :: q, k = (l(x).unflatten(-1, (2, 3)).transpose(1, 2) for l in (self.a, self.b)) | x = x + F.scaled_dot_product_attention(q, k[:, :1], k[:, :1], attn_mask=self.c.tanh().squeeze(0), enable_gqa=True).transpose(1, 2).flatten(2)
self.register_buffer("a", torch.outer(torch.arange(4.0), 1.0 / 10 ** torch.arange(3.0))) :: cos, sin = self.a.cos(), self.a.sin() | a, b = x[..., ::2], x[..., 1::2] | x = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
self.a = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True, norm_first=True, activation='gelu') :: x = self.a(x, src_mask=nn.Transformer.generate_square_subsequent_mask(4).to(x.dtype))
self.a = nn.Transformer(6, 2, 1, 1, 6, dropout=0.0, batch_first=True) :: x = self.a(x, x.tanh())
self.a = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True), 1, enable_nested_tensor=False) :: x = self.a(x, mask=nn.Transformer.generate_square_subsequent_mask(4).to(x.dtype).mT.contiguous())
self.a = nn.Embedding(7, 6) | self.b = nn.Parameter(torch.randn(5, 6) * 0.1) :: x = x + self.a(torch.arange(x.shape[1], device=x.device)).unsqueeze(0) + self.b[: x.size(1)]
self.a = nn.Parameter(torch.randn(1, 1, 6) * 0.1) :: x = torch.cat([self.a.expand(x.shape[0], -1, -1), x[:, 1:]], 1)
self.a = nn.Embedding(5, 6, padding_idx=0) :: x = x + self.a(((x.detach().tanh() + 1) * 2).long()).mean(-2)
self.a = nn.EmbeddingBag(6, 6, mode='sum', sparse=True) :: ids = (x[:, 0].detach().tanh().abs() * 5).round().long() | x = x + self.a(ids)[:, None] + F.embedding_bag(ids, self.a.weight, mode='mean')[:, None]
self.a = nn.Linear(4, 4) :: x = (self.a.weight.tril() @ x) + torch.einsum("btc,st->bsc", x, self.a.weight)
self.a = nn.Parameter(torch.randn(3, 6)) :: x = x + F.normalize(x, dim=-1) @ F.normalize(self.a, dim=-1).t() @ self.a - torch.cdist(x, self.a[None]).mean(-1, keepdim=True)
self.a = nn.Linear(6, 2) | self.b = nn.Parameter(torch.randn(2, 6, 6) * 0.3) :: v, i = self.a(x).softmax(-1).topk(1) | x = v * torch.einsum("btc,btcd->btd", x, self.b[i[..., 0]])
self.a = nn.Linear(6, 2) | self.b = nn.Parameter(torch.randn(2, 6, 6) * 0.3) :: g = self.a(x).softmax(-1) | x = sum(g[..., k : k + 1] * (x @ self.b[k]) for k in range(2))
self.a = nn.Parameter(torch.randn(6, 6) * 0.2) :: e = torch.eye(6, dtype=x.dtype) | x = x @ torch.linalg.inv(self.a + 2 * e) + x @ torch.linalg.cholesky(self.a @ self.a.t() + e)
self.a = nn.Conv1d(6, 6, 3, padding='same', groups=6, padding_mode='circular') | self.b = nn.Conv1d(6, 6, 2) :: x = self.a(x.mT).mT + self.b(F.pad(x.mT, (1, 0))).mT
self.a = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(inplace=True), nn.Conv2d(4, 4, 2, stride=2), nn.ConvTranspose2d(4, 1, 2, stride=2)) :: x = self.a(x.unsqueeze(1))[:, 0]
self.a = nn.Parameter(torch.randn(1, 1, 3, 3) * 0.2) :: k = self.a - self.a.mean((1, 2, 3), keepdim=True) | x = F.conv2d(x.unsqueeze(1), k, padding=1).squeeze(1)
"""

# Of logits o (B, 4, 6) and what the batch has beside: classes, some of them left out; numbers.
LOSSES = """
F.cross_entropy(o.flatten(0, 1), classes.flatten())
F.cross_entropy(o.transpose(1, 2), some)
F.cross_entropy(o.mT, some, label_smoothing=0.1)
F.cross_entropy(o.mT, some, weight=torch.linspace(0.5, 1.5, 6, dtype=o.dtype))
F.cross_entropy(o.mT, classes, ignore_index=0)
(F.cross_entropy(o.mT, some, reduction='none') * (some != -100)).sum() / (some != -100).sum()
F.cross_entropy(o.permute(0, 2, 1), classes, reduction='none').mean()
F.cross_entropy(o[:, :-1].reshape(-1, 6), classes[:, 1:].reshape(-1), reduction='sum') / classes[:, 1:].numel()
-o.log_softmax(-1).gather(-1, classes.unsqueeze(-1)).mean()
(o.logsumexp(-1) - o.gather(-1, classes.unsqueeze(-1)).squeeze(-1)).mean()
F.nll_loss(o.softmax(-1).clamp(min=1e-6).log().mT, classes)
(F.cross_entropy(o.mT, classes, reduction='none') * (1 - o.softmax(-1).gather(-1, classes[..., None])[..., 0]) ** 2).mean()
F.cross_entropy(o.flatten(0, 1), numbers.flatten(0, 1).softmax(-1))
F.kl_div(F.log_softmax(o, -1), numbers.log_softmax(-1), log_target=True, reduction='batchmean')
F.binary_cross_entropy_with_logits(o, numbers.sigmoid(), pos_weight=torch.full((6,), 2.0, dtype=o.dtype))
F.mse_loss(o, numbers) + 0.1 * o.pow(2).mean()
F.gaussian_nll_loss(o, numbers, numbers.exp())
((o - numbers) ** 2 * (numbers > 0)).sum() / (numbers > 0).sum().clamp(min=1)
(o - numbers).norm()
F.smooth_l1_loss(o.cumsum(1), numbers, beta=0.5)
(1 - F.cosine_similarity(o, numbers, dim=-1)).mean()
torch.quantile((o - numbers).abs(), 0.5)
F.cross_entropy(F.normalize(o.flatten(1), dim=-1) @ F.normalize(numbers.flatten(1), dim=-1).t() / 0.2, torch.arange(len(o)))
sum(F.cross_entropy(a, b) for a, b in zip(o, classes)) / len(classes)
F.ctc_loss(o.log_softmax(-1).transpose(0, 1), classes[:, :2].clamp(min=1), torch.full((len(o),), 4), torch.full((len(o),), 2))
F.cross_entropy(o.mean(1), classes[:, 0]).sqrt()
"""

# What forward returns, where the loss finds the logits, and what is added to the loss.
OUTPUTS = (
    ("x", "output", "0.0"),
    ("(x, x.detach().mean())", "output[0]", "0.0"),
    ("{'logits': x, 'aux': x.pow(2).mean() * 0.1}", "output['logits']", "output['aux']"),
    ("[{'out': (x, None)}, 3]", "output[0]['out'][0]", "0.0"),
    ("Output(logits=x, aux=(x * x).mean())", "output.logits", "0.1 * output.aux"),
    ("Both(x, x.abs().mean())", "output.a", "output.b * 0.05"),
)

# What a user should not write, or flowrun may refuse.
MISTAKES = """
y = x * 1.0 | y[y > 0.5] *= 0.5 | x = y
y = torch.cat([x, x], -1) | y[..., :6].mul_(y[..., 6:]) | x = y[..., :6]
h = {'a': x, 'b': x.tanh()} | x = sum(v for _, v in sorted(h.items()))
i = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(1)) | x = x[i]
self.a = nn.Linear(6, 6) | self.a.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,)) | self.a.register_full_backward_pre_hook(lambda m, go: (go[0] * 2,)) :: x = self.a(x)
self.a = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) :: from torch.utils.checkpoint import checkpoint_sequential | x = checkpoint_sequential(self.a, 2, x, use_reentrant=False)
self.a = 0 :: self.a += 1 | x = x * (1 + 0.1 * self.a)
self.a = 0 :: self.a += 1
self.a = [] :: self.a.append(x.detach().mean()) | x = x + sum(self.a)
self.a = {} :: x = x + self.a.get('last', 0.0) | self.a['last'] = x.detach().mean()
self.a = 1.0 :: self.a *= 0.9 | x = x / self.a
global CALLS | CALLS += 1 | x = x * CALLS
self.a = None :: x = x + (self.a if self.a is not None else 0) | self.a = x.detach().mean(0)
self.a = torch.ones(6).to(DTYPE) :: self.a = self.a * 0.9 | x = x * self.a
if x.sum() > 0: |     x = x * 2
x = x * (1 + abs(x.mean().item()))
x = x + len(x.detach().flatten().tolist()) * 0.01
x = x + torch.from_numpy(x.detach().numpy().copy()).to(x.dtype)
x = x * (x > 0).nonzero().shape[0] * 0.1
self.a = nn.Parameter(torch.ones(6)) :: with torch.no_grad(): |     self.a.mul_(0.9) | x = x * self.a
self.a = nn.Parameter(torch.ones(6)) :: self.a.data = self.a.data * 0.9 | x = x * self.a
self.a = nn.Dropout(0.0) :: self.a.eval() | x = self.a(x)
self.a = nn.LayerNorm(6) :: self.a.train(not self.a.training) | x = self.a(x) * (2 if self.a.training else 1)
print('x') | x = x * 1.5
import random | x = x * (1 if random.random() < 2 else 2)
import time | x = x * (1 if time.time() > 0 else 2)
self.a = nn.Parameter(torch.ones(7)) :: x = x * self.a
x = x * self.nowhere
x = x @ torch.ones(6, 6, dtype=torch.int64)
if x.shape[-1] != 1000: |     raise ValueError('the last dim must be 1000')
self.a = nn.Parameter(torch.ones(6)) | self.b = nn.Parameter(self.a.data) :: x = x * self.a + self.b
self.a = nn.Parameter(torch.ones(2, 6)) | self.b = nn.Parameter(self.a.data[0]) :: x = x * self.a[1] + self.b
self.a = None :: if self.a is None: |     self.a = torch.arange(6, dtype=x.dtype) | x = x + self.a
self.a = nn.Linear(6, 6) :: self.a.requires_grad_(False) | x = self.a(x)
self.zero_grad() | x = x * 1.5
x = torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,))
self.a = nn.Parameter(torch.ones(6, dtype=torch.complex64)) :: x = x * self.a.abs().to(x.dtype)
x = x * len(torch.unique(x.detach())) * 0.01
self.a = torch.Generator().manual_seed(3) :: x = x + 0 * torch.rand(x.shape, generator=self.a).to(x.dtype)
self.a = nn.Linear(6, 6) :: x = copy.deepcopy(self.a)(x)
z = torch.nested.nested_tensor([v for v in x]) | x = x + z.to_padded_tensor(0.0).reshape(x.shape) * 0.1
m = x > 0 | y = x.clone() | y[m] = y[m] * 0.5 | x = y
x = x + x[x > 0].mean()
x = x + x[x.flatten(1).sum(1) > 0].sum() * 0.1
x = x + torch.bincount((x.detach().flatten() > 0).long(), minlength=2).sum() * 0.01
self.a = torch.compile(nn.Linear(6, 6), backend='eager') :: x = self.a(x)
self.a = nn.LazyLinear(6) :: x = self.a(x)
x = x * 1.0 | x.data = x.data * 0.5
torch.manual_seed(0) | x = x * 1.5
self.a = nn.Parameter(torch.ones(6)) :: (self.a * 2).sum().backward() | x = x * self.a
self.a = nn.Parameter(torch.ones(6)) :: self.a.register_hook(lambda g: g * 2) | x = x * self.a
import warnings | warnings.warn('slow') | x = x * 1.5
self.more = nn.Identity() | x = self.more(x)
y = x.tanh() | y.detach_() | x = x + y
self.a = nn.Embedding(2, 6) :: x = x + self.a(torch.full(x.shape[:-1], 2))
self.a = None :: x = self.a(x)
self.a = nn.Parameter(torch.ones(6)) :: self.a = nn.Parameter(self.a.detach() * 0.9) | x = x * self.a
self.a = __import__('threading').Lock() :: with self.a: |     x = x * 1.5
self.a = nn.Linear(6, 6) :: with torch.no_grad(): |     self.a.weight.copy_(F.normalize(self.a.weight, dim=1)) | x = self.a(x)
exec('y = 1') | x = x * 1.5
open('/dev/null').read() | x = x * 1.5
x = x + torch.ones(6, device='meta')
self.a = nn.Embedding(7, 6, max_norm=1.0) :: x = x + self.a((x[..., 0].detach().tanh().abs() * 6).long())
"""

HEAD = """
import copy
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

DTYPE = torch.float64
CALLS = 0


@dataclass
class Output:
    logits: torch.Tensor
    aux: torch.Tensor = None


class Both(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


class Frozen(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm.eval()

    def train(self, mode=True):
        return super().train(False)

    def forward(self, x):
        return self.norm(x)


class Base(nn.Module):
    factor = 0.5

    def __init__(self, n):
        super().__init__()
        self.linear = nn.Linear(n, n)
        self._n = n

    @property
    def n(self):
        return self._n

    @classmethod
    def scaled(cls, x):
        return x * cls.factor

    def forward(self, x, *, residual=True):
        y = self.scaled(self.linear(x).tanh()) / self.n
        return x + y if residual else y


class Derived(Base):
    factor = 2.0

    def forward(self, x, **kwargs):
        return super().forward(x, **kwargs) * 0.5


@torch.no_grad()
def targets(x):
    return x.sign()


def traced(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs) * 1.5

    return inner


@traced
def squashed(x):
    return x.tanh()
"""
