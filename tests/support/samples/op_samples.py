"""Small samples of every op that has a signature table: several where broadcasting or flags matter.

Sizes are small, unlike each other and mostly not divisible by the number of ranks, so that uneven
pieces are the rule.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  (registers the grouped product)

from flowrun.engine.ir.placement import Shape
from flowrun.engine.ops.flow.sparse import RowUpdate
from flowrun.engine.ops.proof.simulated_ranks import OpSample, sample
from flowrun.models import optimizers
from support.samples.batch_norm_samples import batch_norm_samples
from support.samples.kernel_samples import kernel_samples, same_shape
from support.samples.random_samples import random_samples
from support.samples.sample_values import (
    T,
    below,
    mask,
    one_true,
    positive,
    shuffled,
    whole_numbers,
    with_hole,
)


def _grouped(shapes: Sequence[Shape]) -> bool:
    """Tokens, weight, ends, gradient: the kernel would resize what it writes to."""
    (tokens, width), (_, inner, outer), _, *grad = shapes
    return width == inner and grad in ([], [(tokens, outer)])


def _scales(*shape: int) -> torch.Tensor:
    return positive(*shape).float()


def _of_8_bits(*scales: torch.Tensor) -> OpSample:
    operands = T(5, 4).to(torch.float8_e5m2), T(4, 3).to(torch.float8_e4m3fn)
    return sample("aten._scaled_mm.default", *operands, *scales, out_dtype=torch.float32)


def _matmul() -> list[OpSample]:
    ends = torch.tensor([2, 2, 6, 7])  # the second expert has no tokens
    grouped = "transformers.grouped_mm_fallback"
    return [
        sample(f"{grouped}.default", T(7, 5), T(4, 5, 3), ends, sound=_grouped),
        sample(f"{grouped}_backward.default", T(7, 5), T(4, 5, 3), ends, T(7, 3), sound=_grouped),
        sample("aten.mm.default", T(5, 4), T(4, 3)),
        _of_8_bits(_scales(5, 1), _scales(1, 3)),
        _of_8_bits(_scales(1, 1), _scales(1, 1)),
        sample("flow.product", T(5, 4), T(7, 4), None, "mk,ck->mc"),
        sample("flow.product", T(5, 4), T(7, 4), T(7), "mk,ck->mc"),
        sample("flow.product", T(5, 7), T(7, 4), None, "mc,ck->mk"),
        sample("flow.product", T(5, 7), T(5, 4), None, "mc,mk->ck"),
        sample("flow.product", T(2, 5, 4), T(7, 4), T(7), "btk,nk->btn"),
        sample("flow.product", T(2, 5, 7), T(7, 4), None, "btn,nk->btk"),
        sample("flow.product", T(2, 5, 7), T(2, 5, 4), None, "btn,btk->nk"),
        sample("flow.product", T(2, 5, 4), T(7, 4), None, "btk,ck->btc"),
        sample("aten.bmm.default", T(3, 5, 4), T(3, 4, 2)),
        sample("aten.matmul.default", T(2, 3, 5, 4), T(2, 3, 4, 2)),
        sample("aten.mv.default", T(5, 4), T(4)),
        sample("aten.dot.default", T(5), T(5)),
        sample("aten.addmm.default", T(3), T(5, 4), T(4, 3)),
        sample("aten.addmm.default", T(5, 3), T(5, 4), T(4, 3)),
        sample("aten.addmm.default", T(5, 1), T(5, 4), T(4, 3), beta=0.5, alpha=2.0),
        sample("aten.addmm.default", T(1), T(5, 4), T(4, 3)),
        sample("aten.baddbmm.default", T(3, 5, 2), T(3, 5, 4), T(3, 4, 2)),
        sample("aten.baddbmm.default", T(5, 2), T(3, 5, 4), T(3, 4, 2)),
    ]


_NORMAL = """
    abs asinh atan ceil clone contiguous cos cosh detach alias elu erf erfc exp exp2 expm1 floor
    gelu hardsigmoid hardswish hardtanh leaky_relu lift_fresh_copy mish neg reciprocal relu round
    sgn sigmoid sign silu sin sinh softplus tan tanh trunc
"""
_POSITIVE = ["acos", "asin", "atanh", "log", "log10", "log1p", "log2", "rsqrt", "sqrt"]
_HOLES = {"isfinite": torch.inf, "isinf": torch.inf, "isnan": torch.nan, "nan_to_num": torch.nan}
_BINARY = """
    atan2.default clamp.Tensor floor_divide.default fmax.default fmin.default fmod.Tensor ge.Tensor
    gt.Tensor le.Tensor logaddexp.default lt.Tensor maximum.default minimum.default remainder.Tensor
"""
_OF_WHOLE_NUMBERS = """
    eq.Tensor logical_and.default logical_or.default logical_xor.default ne.Tensor
"""
_LINEAR = ["add.Tensor", "sub.Tensor", "rsub.Tensor", "mul.Tensor", "div.Tensor"]
_SCALAR = """
    clamp.default clamp_max.default clamp_min.default fmod.Scalar ge.Scalar gt.Scalar le.Scalar
    lt.Scalar remainder.Scalar add.Scalar sub.Scalar rsub.Scalar mul.Scalar div.Scalar add.Tensor
    mul.Tensor div.Tensor
"""
_GRAD_OF_TWO = ["gelu", "hardsigmoid", "hardswish", "mish", "sigmoid", "silu", "tanh"]


def _pointwise() -> list[OpSample]:
    few = [[T(5, 4), T(4)], [T(5, 1), T(3)]]
    wide = [*few, [T(5, 4), T(5, 4)], [T(2, 1, 4), T(5, 4)], [T(5, 4), T()]]
    whole = [[whole_numbers(5, 4), whole_numbers(4)], [whole_numbers(5, 1), whole_numbers(3)]]
    return [
        *(sample(f"aten.{n}.default", T(5, 4)) for n in _NORMAL.split()),
        *(sample(f"aten.{n}.default", positive(5, 4)) for n in _POSITIVE),
        *(sample(f"aten.{n}.default", with_hole(hole, 5, 4)) for n, hole in _HOLES.items()),
        *(sample(f"aten.{n}", *pair) for n in _BINARY.split() for pair in few),
        *(sample(f"aten.{n}", *pair) for n in _LINEAR for pair in wide),
        *(sample(f"aten.{n}", *pair) for n in _OF_WHOLE_NUMBERS.split() for pair in whole),
        *(sample(f"aten.{n}", T(5, 4), 0.7) for n in _SCALAR.split()),
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
        sample("aten._prelu_kernel.default", T(5, 4, 3), T(1, 4, 1)),
        sample("aten._prelu_kernel.default", T(5, 4), T(1, 1)),
        sample("aten._prelu_kernel_backward.default", T(5, 4, 3), T(5, 4, 3), T(1, 4, 1)),
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


def _reduce() -> list[OpSample]:
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
        *(sample(f"aten.{n}.default", shuffled(5, 4), -1, True) for n in ("argmax", "argmin")),
        sample("aten.prod.dim_int", 0.5 + positive(5, 4), 0),
        sample("aten.linalg_vector_norm.default", T(5, 4), 2, (1,)),
        sample("aten.logsumexp.default", T(5, 4), (1,)),
        *(
            sample(f"aten.{n}.correction", T(5, 6), (1,), correction=1)
            for n in ("var", "std", "var_mean")
        ),
        sample("aten.histc.default", T(5, 4), 4, -1, 1),
        sample("aten.histc.default", torch.arange(7).double().square(), 3),
        sample("aten.cumsum.default", T(5, 4), 1),
        sample("aten.sort.default", T(5, 4), 1),
        sample("aten.topk.default", T(5, 4), 4, 1),
    ]


def _views() -> list[OpSample]:
    pairs = [
        ((6, 4), (24,)),
        ((24,), (6, 4)),
        ((6, 4, 5), (24, 5)),
        ((5, 1, 4), (5, 4)),
        ((4, 6), (6, 4)),
        ((5, 12), (5, 6, 2)),
        ((6, 5), (2, 3, 5)),
        ((5, 4), (5, -1)),
        ((6, 4), (6, 4)),
    ]
    names = ("_unsafe_view", "reshape")
    return [
        *(sample("aten.view.default", T(*a), b) for a, b in pairs),
        *(sample(f"aten.{n}.default", T(6, 4), (3, 2, 4)) for n in names),
        sample("aten._reshape_alias.default", T(6, 4), (24,), (1,)),
    ]


def _shape() -> list[OpSample]:
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
        sample("aten.unsafe_split.Tensor", T(5, 4), 2, 1),
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
        sample("aten.as_strided.default", T(4, 6), (4, 2, 4), (6, 2, 1), 0),
        sample("aten.as_strided.default", T(4, 6), (4, 3), (5, 1), 1),
        sample("aten.as_strided_scatter.default", T(24), T(4, 2, 2), (4, 2, 2), (6, 3, 1), 0),
        sample("aten.as_strided_scatter.default", T(4, 6), T(4, 3), (4, 3), (6, 1), 2),
        sample("aten.slice_scatter.default", T(5, 4), T(3, 4), 0, 1, 4),
        sample("aten.select_scatter.default", T(5, 4, 3), T(5, 3), 1, 2),
        sample("aten.gather.default", T(5, 4), 1, below(4, 5, 2)),
        sample("aten.gather.default", T(5, 4), 1, below(4, 3, 2)),
        sample("aten.scatter_add.default", T(5, 4), 1, below(4, 5, 3), T(5, 3)),
        sample("aten.scatter_add.default", T(5, 4, 3), 0, below(5, 7, 2, 3), T(10, 4, 3)),
        sample("aten.index_add.default", T(5, 4), 0, below(5, 3), T(3, 4), alpha=2.0),
        sample("aten.index_add.default", T(5, 4, 3), 1, below(4, 7), T(5, 7, 3)),
        sample("aten.index_select.default", T(5, 4), 1, below(4, 3)),
        sample("aten.index.Tensor", T(4, 5), [below(4, 3, 2)]),
        sample("aten.index_put.default", T(4, 5), [torch.tensor([3, 0])], T(2, 5)),
        sample("aten.index_put.default", T(4, 5), [below(4, 7)], T(7, 5), True),
        sample("aten.index_put.default", T(5, 4), [None, below(4, 7)], T(5, 7), True),
        sample("aten.index_put.default", T(4, 5, 3), [below(4, 7, 1), below(5, 6)], T(6, 3), True),
        sample("aten.scatter.src", T(5, 4), 1, below(4, 5, 1), T(5, 1)),
        sample("aten.scatter.src", T(5, 4), 0, below(1, 1, 4), T(1, 4)),
        sample("aten.index.Tensor", T(5, 4), [None, below(4, 3, 1)]),
        sample("aten.index.Tensor", T(4, 5), [torch.tensor([[3], [0], [2]]), below(5, 2)]),
        sample("aten.index.Tensor", T(4, 3, 5), [below(4, 5), None, below(5, 5)]),
    ]


def _create() -> list[OpSample]:
    return [
        sample("flow.constant", tuple(range(20)), (5, 4), dtype=torch.float64),
        sample("aten.full.default", (5, 4), 3.0),
        sample("aten.zeros.default", (5, 4)),
        sample("aten.ones.default", (5, 4), dtype=torch.float64),
        sample("aten.scalar_tensor.default", 2.0, dtype=torch.float32),
        sample("aten.arange.default", 7),
        sample("aten.arange.start", 2, 9),
        sample("aten.arange.start_step", 1, 12, 3),
        sample("aten.arange.start_step", 0.0, 1.0, 0.2),
        sample("aten.arange.start_step", 6, -6, -1.0, dtype=torch.int64),
        *(sample(f"aten.{n}_like.default", T(5, 4)) for n in ("zeros", "ones")),
        sample("aten.full_like.default", T(5, 4), 3.0),
        sample("aten.fill.Scalar", T(5, 4), 3.0),
        *(sample(f"aten.new_{n}.default", T(5, 4), (3, 6)) for n in ("zeros", "ones")),
        sample("aten.new_full.default", T(5, 4), (3,), 2.0),
    ]


def _update() -> list[OpSample]:
    step, lr, no = torch.tensor(3.0), torch.tensor(0.1), torch.tensor(False)
    adamw: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    sgd: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    ids = torch.arange(20).reshape(5, 4)
    same = same_shape(0, 1, 2, 3)
    return [
        sample("flow.snapshot", T(5, 4)),
        # parts of a sum are in range, too
        sample("flow.check_range", ids, 1000, None, True, ("id", "rows"), ("tokens",)),
        sample("flow.accumulate", T(5, 4)),
        sample("flow.sumsq", T(5, 4)),
        sample("flow.sumsq", T()),
        sample("flow.add_n", T(), T(), T()),
        sample("flow.add_n", T(5, 4), T(5, 4)),
        sample("flow.add_n", T(5)),
        sample("flow.clip_scale", positive() * 9, 1.0),
        sample("flow.not_finite", positive()),
        sample(
            "flow.adamw",
            *(T(5, 3), T(5, 3), T(5, 3), positive(5, 3)),
            sound=same,
            **{"lr": lr, "step": step, "coefficient": positive(), "skip": no, **adamw},
        ),
        sample("flow.adamw", T(5), T(5), T(5), positive(5), lr=lr, step=step, **adamw),
        sample("flow.sgd", T(5, 3), T(5, 3), T(5, 3), lr=lr, coefficient=positive(), **sgd),
        sample("flow.sgd", T(5), T(5), T(5), lr=lr, skip=no, **{**sgd, "nesterov": False}),
        sample("flow.sgd", T(5), T(5), lr=lr, **{**sgd, "momentum": 0.0, "nesterov": False}),
        sample("flow.assign", (T(5, 3), T(5, 3)), (T(5, 3), positive(5, 3)), sound=same),
        sample("flow.assign", (T(5),), (T(5),), skip=no),
        sample("flow.ema", T(5, 3), T(5, 3), decay=0.9),
        sample("flow.ema", T(5), T(5), decay=0.9, skip=no),
        sample("flow.next_scale", *(T() for _ in range(4)), growth=2.0, backoff=0.5, interval=9),
    ]


def _sparse() -> list[OpSample]:
    ids, more = torch.tensor([6, 2, 6, 0, 3]), torch.tensor([2, 5, 1])
    unique = torch.tensor([-1, 0, 2, 3, 6])
    adagrad: dict[str, Any] = {"eps": 1e-3, "weight_decay": 0.0}
    return [
        sample("flow.collect", T(5, 4), ids),
        sample("flow.collect", T(6, 2, 3), shuffled(6, 2)),
        sample("flow.collect", T(5, 2, 3), shuffled(5, 2)),  # parts of 3 and 2 samples
        sample("flow.coalesce", (ids,), (T(5, 3),), (3,)),
        sample("flow.coalesce", (ids, more), (T(5, 3), T(3, 3)), (-1, -1)),
        sample(
            "flow.update_rows",
            *(T(7, 4), unique, T(5, 4), positive(7, 4)),
            by=RowUpdate("adagrad", optimizers.adagrad),
            lr=torch.tensor(0.1),
            coefficient=positive(),
            skip=torch.tensor(False),
            **adagrad,
        ),
    ]


@cache
def all_samples() -> tuple[OpSample, ...]:
    """Every sample, family after family; the same values for all test files of a session."""
    families = (_matmul, _pointwise, _reduce, _shape, _create, _update, _sparse)
    made = (one for family in families for one in family())
    return (*made, *kernel_samples(), *batch_norm_samples(), *random_samples())
