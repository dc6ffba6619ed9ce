"""Small samples of every op that has a signature table: several for each where broadcasting, dims
or flags matter.

Sizes are small, unlike each other and mostly not divisible by the number of ranks, so that uneven
pieces are the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from flowrun.engine.placement import Shape

from support.simulated_ranks import Sample, sample

_random = torch.Generator().manual_seed(20240229)
aten = torch.ops.aten


def T(*shape: int) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=_random, dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    """Between 0.2 and 0.9: inside the domain of log, asin, atanh and sqrt."""
    return 0.2 + 0.7 * torch.rand(shape, generator=_random, dtype=torch.float64)


def below(high: int, *shape: int) -> torch.Tensor:
    """Whole numbers from 0 to high - 1."""
    return torch.randint(0, high, shape, generator=_random)


def mask(*shape: int) -> torch.Tensor:
    """Trues and falses."""
    return T(*shape) > 0


def whole_numbers(*shape: int) -> torch.Tensor:
    """0, 1, 2, 0, 1, 2 … as floats: many are equal, some are zero."""
    return (torch.arange(torch.Size(shape).numel()) % 3).double().reshape(shape)


def one_true(*shape: int) -> torch.Tensor:
    """False but for the first element, so that the ranks differ."""
    made = torch.zeros(shape, dtype=torch.bool)
    made.view(-1)[0] = True
    return made


def with_hole(hole: float, *shape: int) -> torch.Tensor:
    """Normal numbers, and one that is none."""
    made = T(*shape)
    made.view(-1)[1] = hole
    return made


def shuffled(*shape: int) -> torch.Tensor:
    """Whole numbers, each once, in a mixed order (the number of elements is no multiple of 11)."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 11 + 2) % count).double().reshape(shape)


# ---- kernels that trust their shapes -------------------------------------------------------------


def _same(*inputs: int) -> Callable[[Sequence[Shape]], bool]:
    """These inputs must have one shape."""
    return lambda shapes: len({shapes[k] for k in inputs}) == 1


def _attention(shapes: Sequence[Shape]) -> bool:
    query, key, value = shapes[:3]
    fits = query[:2] == key[:2] == value[:2] and key[2] == value[2] and query[3] == key[3] == value[3]
    return fits and all(_mask_fits(m, query, key) for m in shapes[3:])


def _mask_fits(m: Shape, query: Shape, key: Shape) -> bool:
    scores = (*query[:3], key[2])
    return len(m) in (2, 4) and all(a in (1, b) for a, b in zip(m, scores[4 - len(m) :], strict=True))


def _attention_backward(shapes: Sequence[Shape]) -> bool:
    grad, query, key, value, out, logsumexp, *masks = shapes
    return _attention((query, key, value, *masks)) and grad == out == query and logsumexp == query[:3]


def _layer_norm_backward(shapes: Sequence[Shape]) -> bool:
    grad, x, mean, rstd, *rest = shapes
    return grad == x and mean == rstd == (*x[:-1], 1) and all(s == x[-1:] for s in rest)


def _group_norm_backward(shapes: Sequence[Shape]) -> bool:
    grad, x, mean, rstd, weight = shapes
    return grad == x == (x[0], 4, 3) and mean == rstd == (x[0], 2) and weight == (4,)


def _embedding_backward(shapes: Sequence[Shape]) -> bool:
    return shapes[0][:-1] == shapes[1]


def _pool_backward(shapes: Sequence[Shape]) -> bool:
    grad, x, *rest = shapes
    return grad == (*x[:-2], 2, 2) and x[-2:] in ((4, 4), (5, 5)) and all(s == grad for s in rest)


# ---- samples -------------------------------------------------------------------------------------


def _matmul() -> list[Sample]:
    return [
        sample("aten.mm.default", T(5, 4), T(4, 3)),
        sample("aten.bmm.default", T(3, 5, 4), T(3, 4, 2)),
        sample("aten.mv.default", T(5, 4), T(4)),
        sample("aten.dot.default", T(5), T(5)),
        sample("aten.addmm.default", T(3), T(5, 4), T(4, 3)),
        sample("aten.addmm.default", T(5, 3), T(5, 4), T(4, 3)),
        sample("aten.addmm.default", T(5, 1), T(5, 4), T(4, 3), beta=0.5, alpha=2.0),
        sample("aten.addmm.default", T(1), T(5, 4), T(4, 3)),
        sample("aten.baddbmm.default", T(3, 5, 2), T(3, 5, 4), T(3, 4, 2)),
        sample("aten.baddbmm.default", T(5, 2), T(3, 5, 4), T(3, 4, 2)),
    ]


          _NORMAL = """abs asinh atan ceil clone contiguous cos cosh detach alias elu erf erfc exp
          exp2 expm1 floor gelu hardsigmoid hardswish hardtanh leaky_relu lift_fresh_copy mish neg
          reciprocal relu round sigmoid sign silu sin sinh softplus tan tanh trunc""".split()
_POSITIVE = "acos asin atanh log log10 log1p log2 rsqrt sqrt".split()
_HOLES = {"isfinite": torch.inf, "isinf": torch.inf, "isnan": torch.nan, "nan_to_num": torch.nan}
          _BINARY = """atan2.default clamp.Tensor floor_divide.default fmax.default fmin.default
          fmod.Tensor ge.Tensor gt.Tensor le.Tensor logaddexp.default lt.Tensor maximum.default
          minimum.default remainder.Tensor""".split()
_OF_WHOLE_NUMBERS = """eq.Tensor logical_and.default logical_or.default logical_xor.default ne.Tensor""".split()
_LINEAR = "add.Tensor sub.Tensor rsub.Tensor mul.Tensor div.Tensor".split()
          _SCALAR = """clamp.default clamp_max.default clamp_min.default fmod.Scalar ge.Scalar
          gt.Scalar le.Scalar lt.Scalar remainder.Scalar add.Scalar sub.Scalar rsub.Scalar
          mul.Scalar div.Scalar add.Tensor mul.Tensor div.Tensor""".split()
_GRAD_OF_TWO = """gelu hardsigmoid hardswish mish sigmoid silu tanh""".split()


def _pointwise() -> list[Sample]:
    few = [[T(5, 4), T(4)], [T(5, 1), T(3)]]
    wide = [*few, [T(5, 4), T(5, 4)], [T(2, 1, 4), T(5, 4)], [T(5, 4), T()]]
    whole = [[whole_numbers(5, 4), whole_numbers(4)], [whole_numbers(5, 1), whole_numbers(3)]]
    return [
        *(sample(f"aten.{n}.default", T(5, 4)) for n in _NORMAL),
        *(sample(f"aten.{n}.default", positive(5, 4)) for n in _POSITIVE),
        *(sample(f"aten.{n}.default", with_hole(hole, 5, 4)) for n, hole in _HOLES.items()),
        *(sample(f"aten.{n}", *pair) for n in _BINARY for pair in few),
        *(sample(f"aten.{n}", *pair) for n in _LINEAR for pair in wide),
        *(sample(f"aten.{n}", *pair) for n in _OF_WHOLE_NUMBERS for pair in whole),
        *(sample(f"aten.{n}", T(5, 4), 0.7) for n in _SCALAR),
        *(sample(f"aten.{n}.Scalar", whole_numbers(5, 4), 1) for n in ("eq", "ne")),
        *(sample(f"aten.{n}_backward.default", T(5, 4), T(5, 4)) for n in _GRAD_OF_TWO),
        sample("aten.acosh.default", 1 + positive(5, 4)),
        sample("aten.bitwise_not.default", mask(5, 4)),
        sample("aten.logical_not.default", whole_numbers(5, 4)),
        sample("aten.pow.Scalar", 2.0, T(5, 4)),
        sample("aten.pow.Tensor_Scalar", T(5, 4), 2),
        sample("aten.pow.Tensor_Tensor", positive(5, 4), T(4)),
        *(sample(f"aten.bitwise_{n}.Tensor", mask(5, 4), mask(4)) for n in ("and", "or", "xor")),
        *(sample(f"aten.bitwise_{n}.Scalar", below(9, 5, 4), 3) for n in ("and", "or")),
        sample("aten.add.Tensor", T(5, 4), T(5, 4), alpha=-2.0),
        sample("aten.sub.Tensor", T(4), T(5, 4), alpha=3.0),
        sample("aten.sub.Tensor", T(5, 4), 1.5),
        sample("aten.div.Tensor_mode", T(5, 4), T(4), rounding_mode="floor"),
        sample("aten.div.Tensor_mode", T(5, 4), T(4), rounding_mode=None),
        sample("aten._to_copy.default", T(5, 4), dtype=torch.float32),
        sample("aten._to_copy.default", T(5, 4), dtype=torch.int64),
        sample("aten.where.self", mask(5, 4), T(5, 4), T(4)),
        sample("aten.where.self", mask(5, 1), T(3), T(5, 1)),
        sample("aten.masked_fill.Scalar", T(5, 4), mask(5, 4), 0.0),
        sample("aten.masked_fill.Scalar", T(5, 4), mask(4), -1.0),
        sample("aten.masked_fill.Tensor", T(5, 4), mask(5, 1), T()),
        sample("aten.addcmul.default", T(5, 4), T(4), T(5, 1), value=0.5),
        sample("aten.addcdiv.default", T(5, 4), T(4), T(5, 1), value=0.5),
        sample("aten.lerp.Scalar", T(5, 4), T(5, 4), 0.3),
        sample("aten.lerp.Tensor", T(5, 4), T(5, 4), T(5, 4)),
        sample("aten.threshold_backward.default", T(5, 4), T(5, 4), 0),
        sample("aten.hardtanh_backward.default", T(5, 4), T(5, 4), -1, 1),
        sample("aten.leaky_relu_backward.default", T(5, 4), T(5, 4), 0.1, False),
        sample("aten.elu_backward.default", T(5, 4), 1.0, 1.0, 1.0, False, T(5, 4)),
        sample("aten.softplus_backward.default", T(5, 4), T(5, 4), 1.0, 20.0),
    ]


def _reduce() -> list[Sample]:
    return [
        *(sample(f"aten.{n}.default", T(5, 4)) for n in ("sum", "mean", "max", "min")),
        sample("aten.prod.default", 0.5 + positive(5, 4)),
        *(sample(f"aten.{n}.default", shuffled(5, 4)) for n in ("argmax", "argmin")),
        sample("aten.all.default", ~one_true(5, 4)),
        sample("aten.any.default", one_true(5, 4)),
        sample("aten.all.dim", ~one_true(5, 4), 0),
        sample("aten.any.dim", one_true(5, 4), 0),
        sample("aten.sum.dim_IntList", T(5, 4, 3), (0, -1)),
        sample("aten.sum.dim_IntList", T(5, 4), (0,), True),
        sample("aten.sum.dim_IntList", mask(5, 4), None, dtype=torch.int64),
        sample("aten.mean.dim", T(5, 4, 3), (1, 2)),
        sample("aten.mean.dim", T(5, 4), (-1,), True),
        *(sample(f"aten.{n}.default", T(5, 4), (1,), True) for n in ("amax", "amin")),
        *(sample(f"aten.{n}.default", T(5, 4, 3), (0,)) for n in ("amax", "amin")),
        *(sample(f"aten.{n}.dim", T(5, 4), 1) for n in ("max", "min")),
        *(sample(f"aten.{n}.default", T(5, 4), -1, True) for n in ("argmax", "argmin")),
        sample("aten.prod.dim_int", 0.5 + positive(5, 4), 0),
        sample("aten.linalg_vector_norm.default", T(5, 4), 2, (1,)),
        sample("aten.logsumexp.default", T(5, 4), (1,)),
        *(sample(f"aten.{n}.correction", T(5, 6), (1,), correction=1) for n in ("var", "std", "var_mean")),
        sample("aten.cumsum.default", T(5, 4), 1),
        sample("aten.sort.default", T(5, 4), 1),
        sample("aten.topk.default", T(5, 4), 4, 1),
    ]


def _views() -> list[Sample]:
    pairs = [
        ((6, 4), (24,)), ((24,), (6, 4)), ((6, 4, 5), (24, 5)), ((5, 1, 4), (5, 4)), ((4, 6), (6, 4)),
        ((5, 12), (5, 6, 2)), ((6, 5), (2, 3, 5)), ((5, 4), (5, -1)), ((6, 4), (6, 4)),
    ]
    names = ("_unsafe_view", "reshape")
    return [
        *(sample("aten.view.default", T(*a), b) for a, b in pairs),
        *(sample(f"aten.{n}.default", T(6, 4), (3, 2, 4)) for n in names),
        sample("aten._reshape_alias.default", T(6, 4), (24,), (1,)),
    ]


def _shape() -> list[Sample]:
    return [
        *_views(),
        sample("aten.t.default", T(5, 4)),
        sample("aten.t.default", T(5)),
        sample("aten.transpose.int", T(5, 4, 3), 0, -1),
        sample("aten.permute.default", T(5, 4, 3), (2, 0, 1)),
        sample("aten.expand.default", T(5, 1), (3, 5, 4)),
        sample("aten.expand.default", T(5, 1), (-1, 4)),
        sample("aten.unsqueeze.default", T(5, 4), 1),
        sample("aten.unsqueeze.default", T(5, 4), -1),
        sample("aten.squeeze.default", T(5, 1, 4)),
        sample("aten.squeeze.dim", T(5, 1, 2), 1),
        sample("aten.squeeze.dim", T(3, 2), 0),
        sample("aten.squeeze.dims", T(1, 5, 1, 2), (0, 2)),
        sample("aten.squeeze.default", T(2, 3)),
        sample("aten.select.int", T(5, 4, 3), 1, 2),
        sample("aten.unbind.int", T(5, 4), 1),
        sample("aten.slice.Tensor", T(5, 4), 0, 1, 4),
        sample("aten.slice.Tensor", T(5, 4), 1, 0, 9223372036854775807),
        sample("aten.slice.Tensor", T(5, 7), 1, 0, 6, 2),
        sample("aten.split.Tensor", T(5, 4), 2, 1),
        sample("aten.split_with_sizes.default", T(5, 4), (1, 3), -1),
        sample("aten.chunk.default", T(5, 4), 2, 1),
        sample("aten.flip.default", T(5, 4), (0,)),
        sample("aten.roll.default", T(5, 4), (1,), (1,)),
        sample("aten.roll.default", T(5, 4), (1,)),
        *(sample(f"aten.{n}.default", T(3, 5, 4)) for n in ("tril", "triu")),
        sample("aten.constant_pad_nd.default", T(5, 4), (1, 2)),
        sample("aten.constant_pad_nd.default", T(5, 4), (1, 0, 0, 0), 3.0),
        sample("aten.repeat.default", T(5, 4), (3, 1, 2)),
        sample("aten.cat.default", [T(5, 4), T(5, 3)], 1),
        sample("aten.cat.default", [T(5, 4), T(5, 4), T(2, 4)]),
        sample("aten.stack.default", [T(5, 4), T(5, 4)], 1),
        sample("aten.slice_backward.default", T(3, 4), (5, 4), 0, 1, 4, 1),
        sample("aten.select_backward.default", T(5, 3), (5, 4, 3), 1, 2),
        sample("aten.slice_scatter.default", T(5, 4), T(3, 4), 0, 1, 4),
        sample("aten.select_scatter.default", T(5, 4, 3), T(5, 3), 1, 2),
        sample("aten.gather.default", T(5, 4), 1, below(4, 5, 2)),
        sample("aten.gather.default", T(5, 4), 1, below(4, 3, 2)),
        sample("aten.index_select.default", T(5, 4), 1, below(4, 3)),
        sample("aten.index.Tensor", T(4, 5), [below(4, 3, 2)]),
    ]


def _norm() -> list[Sample]:
    x, w, b = T(5, 3, 4), T(4), T(4)
    _, mean, rstd = aten.native_layer_norm.default(x, [4], w, b, 1e-5)
    g, gw, gb = T(5, 4, 3), T(4), T(4)
    _, group_mean, group_rstd = aten.native_group_norm.default(g, gw, gb, 5, 4, 3, 2, 1e-5)
    return [
        sample("aten.native_layer_norm.default", x, (4,), w, b, 1e-5),
        sample("aten.native_layer_norm.default", x, (4,), None, None, 1e-5),
        sample("aten.native_layer_norm.default", T(5, 3, 4), (3, 4), T(3, 4), None, 1e-5),
        sample("aten.native_layer_norm_backward.default", T(5, 3, 4), x, (4,), mean, rstd, w, b,
               (True, True, True), sound=_layer_norm_backward),
        sample("aten.native_layer_norm_backward.default", T(5, 3, 4), x, (4,), mean, rstd, w, None,
               (True, True, False), sound=_layer_norm_backward),
        sample("aten.native_layer_norm_backward.default", T(5, 3, 4), x, (4,), mean, rstd, None, None,
               (True, False, False), sound=_layer_norm_backward),
        sample("aten.native_group_norm.default", g, gw, gb, 5, 4, 3, 2, 1e-5),
        sample("aten.native_group_norm_backward.default", T(5, 4, 3), g, group_mean, group_rstd, gw,
               5, 4, 3, 2, (True, True, True), sound=_group_norm_backward),
        sample("aten._fused_rms_norm.default", x, (4,), w, 1e-5),
    ]


def _attention_samples() -> list[Sample]:
    made = []
    forward = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    backward = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    for causal, attn_mask in ((True, None), (False, None), (False, T(5, 3)), (False, T(3, 1, 5, 3))):
        length = 3 if attn_mask is not None else 5
        q, k, v = T(3, 2, 5, 4), T(3, 2, length, 4), T(3, 2, length, 4)
        extra = {} if attn_mask is None else {"attn_mask": attn_mask}
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, **extra)
        made.append(sample(forward, q, k, v, 0.0, causal, sound=_attention, **extra))
        made.append(sample(backward, T(3, 2, 5, 4), q, k, v, out, logsumexp, 0.0, causal,
                           sound=_attention_backward, **extra))
    return made


def _embedding() -> list[Sample]:
    return [
        sample("aten.embedding.default", T(7, 4), below(7, 5, 3)),
        sample("aten.embedding.default", T(7, 4), below(7, 5), 2),
        sample("aten.embedding_dense_backward.default", T(5, 3, 4), below(7, 5, 3), 7, -1, False,
               sound=_embedding_backward),
        sample("aten.embedding_dense_backward.default", T(5, 4), torch.tensor([6, 2, 1, 1, 2]), 7, 2, False,
               sound=_embedding_backward),
        sample("aten.embedding_dense_backward.default", T(5, 4), torch.tensor([1, 2, 1, 6, 1]), 7, -1, True,
               sound=_embedding_backward),
    ]


def _conv() -> list[Sample]:
    one, two, none = (1, 1), (2, 2), (0, 0)
    plain = (one, one, one, False, none, 1)
    turned = (two, none, one, True, none, 1)
    grouped = (one, one, one, False, none, 2)
    x, pooled = T(5, 3, 4, 4), T(5, 3, 2, 2)
    out, where = aten.max_pool2d_with_indices.default(x, [2, 2])
    return [
        sample("aten.convolution.default", T(5, 3, 4, 4), T(4, 3, 3, 3), T(4), *plain),
        sample("aten.convolution.default", T(5, 3, 4, 4), T(4, 3, 3, 3), None, *plain),
        sample("aten.convolution.default", T(5, 3, 2, 2), T(3, 4, 2, 2), T(4), *turned),
        sample("aten.convolution.default", T(3, 4, 4, 4), T(6, 2, 3, 3), T(6), *grouped),
        sample("aten.convolution_backward.default", T(5, 4, 4, 4), T(5, 3, 4, 4), T(4, 3, 3, 3), (4,), *plain,
               (True, True, True)),
        sample("aten.convolution_backward.default", T(5, 4, 4, 4), T(5, 3, 4, 4), T(4, 3, 3, 3), None, *plain,
               (True, True, False)),
        sample("aten.convolution_backward.default", T(5, 4, 4, 4), T(5, 3, 4, 4), T(4, 3, 3, 3), (4,), *plain,
               (False, True, True)),
        sample("aten.convolution_backward.default", T(5, 4, 4, 4), T(5, 3, 2, 2), T(3, 4, 2, 2), (4,), *turned,
               (True, True, True)),
        sample("aten.max_pool2d_with_indices.default", x, two),
        sample("aten.max_pool2d_with_indices_backward.default", pooled, x, two, two, none, one, False, where,
               sound=_pool_backward),
        sample("aten.avg_pool2d.default", T(5, 3, 4, 4), two),
        sample("aten.avg_pool2d_backward.default", pooled, x, two, two, none, False, True, None,
               sound=_pool_backward),
        sample("aten._adaptive_avg_pool2d.default", T(5, 3, 5, 5), two),
        sample("aten._adaptive_avg_pool2d_backward.default", pooled, T(5, 3, 5, 5), sound=_pool_backward),
    ]


def _loss() -> list[Sample]:
    made = []
    for name in ("_softmax", "_log_softmax"):
        for x, dim in ((T(5, 4), 1), (T(3, 5, 4), -2)):
            made.append(sample(f"aten.{name}.default", x, dim, False))
            y = getattr(aten, name).default(x, dim, False)
            made.append(sample(f"aten.{name}_backward_data.default", T(*x.shape), y, dim, x.dtype,
                               sound=_same(0, 1)))
    target = torch.tensor([0, 5, 2, -100, 3])
    for reduction, weight in ((0, None), (1, None), (2, None), (2, positive(6)), (1, positive(6))):
        x = T(5, 6)
        loss, total = aten.nll_loss_forward.default(x, target, weight, reduction, -100)
        made.append(sample("aten.nll_loss_forward.default", x, target, weight, reduction, -100))
        made.append(sample("aten.nll_loss_backward.default", T(*loss.shape), x, target, weight, reduction, -100,
                           total))
    made.append(sample("aten.nll_loss_forward.default", T(6), torch.tensor(3), None, 2, -100))
    for reduction in (0, 1, 2):
        made.append(sample("aten.mse_loss.default", T(5, 4), T(5, 4), reduction))
        grad = T(5, 4) if reduction == 0 else T()
        made.append(sample("aten.mse_loss_backward.default", grad, T(5, 4), T(5, 4), reduction))
    return made


def _create() -> list[Sample]:
    return [
        sample("aten.full.default", (5, 4), 3.0),
        sample("aten.zeros.default", (5, 4)),
        sample("aten.ones.default", (5, 4), dtype=torch.float64),
        sample("aten.scalar_tensor.default", 2.0, dtype=torch.float32),
        sample("aten.arange.default", 7),
        sample("aten.arange.start", 2, 9),
        sample("aten.arange.start_step", 1, 12, 3),
        sample("aten.arange.start_step", 0.0, 1.0, 0.2),
        *(sample(f"aten.{n}_like.default", T(5, 4)) for n in ("zeros", "ones")),
        sample("aten.full_like.default", T(5, 4), 3.0),
        sample("aten.fill.Scalar", T(5, 4), 3.0),
        *(sample(f"aten.new_{n}.default", T(5, 4), (3, 6)) for n in ("zeros", "ones")),
        sample("aten.new_full.default", T(5, 4), (3,), 2.0),
    ]


def _update() -> list[Sample]:
    adamw = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    sgd = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    step = torch.tensor(3.0)
    return [
        sample("flow.accumulate", T(5, 4)),
        sample("flow.sumsq", T(5, 4)),
        sample("flow.sumsq", T()),
        sample("flow.add_n", T(), T(), T()),
        sample("flow.add_n", T(5, 4), T(5, 4)),
        sample("flow.add_n", T(5)),
        sample("flow.clip_scale", positive() * 9, 1.0),
        sample("flow.adamw", T(5, 3), T(5, 3), positive(), T(5, 3), positive(5, 3), step, sound=_same(0, 1, 3, 4), **adamw),
        sample("flow.adamw", T(5), T(5), None, T(5), positive(5), step, **adamw),
        sample("flow.sgd", T(5, 3), T(5, 3), positive(), T(5, 3), **sgd),
        sample("flow.sgd", T(5), T(5), None, T(5), **{**sgd, "nesterov": False}),
    ]


def all_samples() -> list[Sample]:
    """Every sample, family after family."""
    families = (
        _matmul, _pointwise, _reduce, _shape, _norm, _attention_samples, _embedding, _conv, _loss, _create, _update,
    )
    return [made for family in families for made in family()]
