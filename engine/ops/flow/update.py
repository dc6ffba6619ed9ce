"""The engine's own ops, `flow.*`: accumulation, the global norm, and optimizer updates; functions
and signatures together.

Updates are elementwise, so they run on any split of weight, gradient and state alike: that is all
ZeRO needs. They change weight and states in place.  An optimizer that has no op of its own here is
traced (engine/capture/update_trace.py): its values are ordinary ops, and flow.assign writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw as plain_adamw
from torch.optim.sgd import sgd as plain_sgd

from flowrun.engine.ir.graph import refs
from flowrun.engine.ir.op_info import OpInfo, Trait
from flowrun.engine.ir.sbp import B, P, S, Sbp
from flowrun.engine.ir.signature import OpRows, OpView, Signature, whole
from flowrun.engine.torch_internals import fused_adamw, fused_sgd

Tensor = torch.Tensor
Changed = Tensor | tuple[Tensor, ...]

FEW_ELEMENTS = 1 << 16  # to call the kernel takes a CPU as long as what it does to fewer


# ---- functions -----------------------------------------------------------------------------------


def snapshot(x: Tensor) -> Tensor:
    """A copy of what a buffer is before forward changes it."""
    return x.clone()


def accumulate(x: Tensor, before: Tensor | None = None, *, own: bool = False) -> Tensor:
    """Add `x` to the sum over the micro-batches so far.

    before: the sum without this addend, to which it is added in place; None: this is the first.
    own: the first is memory of its own, and becomes the sum.
    """
    if before is not None:
        return before.add_(x)
    return x if own else x.clone()


def sumsq(x: Tensor) -> Tensor:
    """Sum of squares, fp32 scalar."""
    flat = _real(x).reshape(-1).float()
    return torch.dot(flat, flat)


def add_n(*xs: Tensor) -> Tensor:
    """Sum of tensors of one shape."""
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total.clone() if len(xs) == 1 else total


def clip_scale(total: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / (norm + 1e-6)) of a sum of squares: torch.nn.utils.clip_grad_norm_."""
    return (max_norm / (total.sqrt() + 1e-6)).clamp_(max=1.0)


def adamw(param: Tensor, grad: Tensor, *states: Tensor, **numbers: Any) -> Changed:
    """adamw_of_many of one weight."""
    adamw_of_many(((param, grad, *states),), **numbers)
    return (param, *states)


def adamw_of_many(
    each: Sequence[Sequence[Tensor]],
    *,
    lr: Tensor | float,
    step: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    coefficient: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """Update weights in place by Adam with decoupled weight decay (torch.optim.AdamW).

    each: a weight, its gradient, the averages of that and of its square.
    lr, step: scalars; step counts this step, from 1.
    beta1, beta2, eps, weight_decay: as of torch.optim.AdamW.
    coefficient: scalar that multiplies gradients first.
    skip: where it is true, nothing changes.

    One pass over memory, on a CPU 4 to 6 times as fast as elementwise ops.
    """
    rule: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "weight_decay": weight_decay}
    rule |= {"eps": eps, "amsgrad": False, "maximize": False}

    def fused(changed: Sequence[list[Tensor]], grads: list[Tensor]) -> None:
        params, averages, squares = changed
        steps, bad = [step] * len(grads), _flag(skip)
        fused_adamw(params, grads, averages, squares, [], steps, lr=lr, found_inf=bad, **rule)

    def plain(changed: Sequence[Tensor], grad: Tensor) -> None:
        param, average, square = changed
        how = {"lr": float(lr), "foreach": False, **rule}
        plain_adamw([param], [grad], [average], [square], [], [step - 1], **how)

    _in_place(fused, plain, each, coefficient, skip)


def sgd(param: Tensor, grad: Tensor, *momentum_buffer: Tensor, **numbers: Any) -> Changed:
    """sgd_of_many of one weight."""
    sgd_of_many(((param, grad, *momentum_buffer),), **numbers)
    return one_or_all((param, *momentum_buffer))


def sgd_of_many(
    each: Sequence[Sequence[Tensor]],
    *,
    lr: Tensor | float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    coefficient: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """Update weights in place by stochastic gradient descent (torch.optim.SGD) without dampening.

    each: a weight, its gradient, and a momentum buffer that starts at zero, or none where momentum
        is 0.
    lr, weight_decay, nesterov: as of torch.optim.SGD.
    coefficient, skip: as of adamw_of_many.
    """
    rule: dict[str, Any] = {"momentum": momentum, "weight_decay": weight_decay}
    rule |= {"dampening": 0.0, "nesterov": nesterov, "maximize": False}

    def fused(changed: Sequence[list[Tensor]], grads: list[Tensor]) -> None:
        params, buffers = changed if len(changed) > 1 else (*changed, [])
        how = {"lr": lr, "is_first_step": False, "found_inf": _flag(skip), **rule}
        fused_sgd(params, grads, buffers, **how)

    def plain(changed: Sequence[Tensor], grad: Tensor) -> None:
        param, *buffer = changed
        plain_sgd([param], [grad], [*buffer] or [None], foreach=False, lr=float(lr), **rule)

    _in_place(fused, plain, each, coefficient, skip)


def assign(
    changed: Sequence[Tensor],
    values: Sequence[Tensor],
    others: Sequence[Tensor] = (),
    other_values: Sequence[Tensor] = (),
    *,
    skip: Tensor | None = None,
) -> Changed:
    """Write `values` into `changed`, weight and states, in place; where `skip` is true, the old
    ones stay.  others: states of other shapes than the weight's.

    A value may be one of the old tensors, so all are read before any is written.
    """
    changed, values = (*changed, *others), (*values, *other_values)
    if skip is not None:
        values = [torch.where(skip, old, new) for old, new in zip(changed, values, strict=True)]
    elif len(changed) > 1:
        values = [v.clone() if any(v is old for old in changed) else v for v in values]
    for old, new in zip(changed, values, strict=True):
        old.copy_(new)
    return one_or_all(changed)


def ema(average: Tensor, param: Tensor, *, decay: float, skip: Tensor | None = None) -> Tensor:
    """Exponential moving average of a weight, in place: decay * average + (1 - decay) * param.

    skip: scalar; where it is true, nothing changes.
    """
    if skip is None:
        return average.lerp_(param, 1 - decay)
    return average.lerp_(param, (1 - decay) * (~skip).to(param.dtype))


_Fused = Callable[[Sequence[list[Tensor]], list[Tensor]], None]


def _in_place(
    fused: _Fused,
    plain: Callable[[Sequence[Tensor], Tensor], None],
    each: Sequence[Sequence[Tensor]],
    coefficient: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Fused kernels take memory as it lies: what is strided is updated in a copy, one at a time.

    fused: of weights and each of their states, and of gradients.  plain: of one weight, as torch's
    optimizers run by default: of narrow weights on a CPU, where torch's fused kernel of SGD is
    wrong, and that of Adam rounds less often.  A complex number is updated as its two parts.
    """
    together: list[list[Tensor]] = []
    apart: list[list[Tensor]] = []
    for tensors in ([*map(_real, tensors)] for tensors in each):
        shapes = {x.shape for x in tensors}
        assert len(shapes) == 1, (
            f"fused kernels check no shapes: those of weight, states and gradient differ, {shapes}"
        )
        if not _is_narrow(tensors[0]):
            fits = coefficient is None and _lies_for_one_kernel(tensors)
            (together if fits else apart).append(tensors)
        elif skip is None or not skip:  # on a device nobody asks for its value
            param, grad, *states = tensors
            plain((param, *states), _scale(grad, coefficient, param))
    if together:
        params, grads, *states_of = map(list, zip(*together, strict=True))
        fused([params, *states_of], grads)
    for tensors in apart:
        _update_copies(fused, tensors, coefficient)


def _update_copies(fused: _Fused, tensors: Sequence[Tensor], coefficient: Tensor | None) -> None:
    """Update one weight and its states in copies where they are strided."""
    param, grad, *states = tensors
    changed = (param, *states)
    dense = [x.contiguous() for x in changed]
    fused([[x] for x in dense], [_scale(grad, coefficient, param)])
    for x, new in zip(changed, dense, strict=True):
        if not x.is_contiguous():
            x.copy_(new)


def _lies_for_one_kernel(tensors: Sequence[Tensor]) -> bool:
    """True if (weight, gradient, states) can be updated with others in one call, as they lie."""
    param, grad, *_ = tensors
    small = param.is_cuda or param.numel() < FEW_ELEMENTS
    return small and grad.dtype == param.dtype and all(x.is_contiguous() for x in tensors)


def one_or_all(changed: Sequence[Tensor]) -> Changed:
    """Return one tensor by itself, several as a tuple."""
    return tuple(changed) if len(changed) > 1 else changed[0]


def _flag(skip: Tensor | None) -> Tensor | None:
    return None if skip is None else skip.float()


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _is_narrow(param: Tensor) -> bool:
    return param.device.type == "cpu" and param.dtype in (torch.bfloat16, torch.float16)


def _scale(grad: Tensor, coefficient: Tensor | None, param: Tensor) -> Tensor:
    return (grad if coefficient is None else grad * coefficient).to(param.dtype).contiguous()


@dataclass(frozen=True, slots=True)
class FusedUpdate:
    """A class of torch.optim that is one op here.

    one, many: functions of one weight, and of many at once.  numbers: with torch's defaults.
    states: their names; needed: a number without which there are none.  fed: numbers of a step.
    """

    kind: type[torch.optim.Optimizer]
    one: Callable[..., Changed]
    many: Callable[..., None]
    numbers: Mapping[str, float | bool]
    states: tuple[str, ...]
    needed: str = ""
    fed: tuple[str, ...] = ("lr",)


FUSED: Mapping[str, FusedUpdate] = {
    "adamw": FusedUpdate(
        torch.optim.AdamW,
        adamw,
        adamw_of_many,
        {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
        ("exp_avg", "exp_avg_sq"),
        fed=("lr", "step"),
    ),
    "sgd": FusedUpdate(
        torch.optim.SGD,
        sgd,
        sgd_of_many,
        {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False},
        ("momentum_buffer",),
        needed="momentum",
    ),
}
# What does for many weights what the first does for one.
OF_MANY = {fused.one: fused.many for fused in FUSED.values()}

# ---- signatures ----------------------------------------------------------------------------------


def together(view: OpView) -> OpRows:
    """accumulate, add_n: linear and elementwise, all tensors alike."""
    count, ndim = len(view.in_shapes), len(view.in_shapes[0])
    sbps: list[Sbp] = [*map(S, range(ndim)), P]
    return tuple(Signature((sbp,) * count, (sbp,)) for sbp in sbps)


def squares(view: OpView) -> OpRows:
    """sumsq: a split gives P.  Not "P -> P": the square of a sum has cross terms."""
    return tuple(Signature((S(d),), (P,)) for d in range(len(view.in_shapes[0])))


def update(view: OpView) -> OpRows:
    """Weight, gradient and states split alike, and so a buffer; keyword arguments are scalars,
    whole everywhere.

    Not P: Adam is not linear, and what is a partial sum has no home.
    """
    alike = len(refs(view.op.args))
    scalars = (B,) * (len(view.in_shapes) - alike)
    return tuple(
        Signature((S(d),) * alike + scalars, (S(d),) * len(view.op.outputs))
        for d in range(len(view.in_shapes[0]))
    )


def write(view: OpView) -> OpRows:
    """assign: weight and states of its shape alike, and their values; what else there is, whole."""
    alike, made = len(refs(view.op.args[:2])), len(refs(view.op.args[0]))
    rest = (B,) * (len(view.in_shapes) - alike), (B,) * (len(view.op.outputs) - made)
    return tuple(
        Signature((S(d),) * alike + rest[0], (S(d),) * made + rest[1])
        for d in range(len(view.in_shapes[0]))
    )


SNAPSHOT, ACCUMULATE, ADD_N = "flow.snapshot", "flow.accumulate", "flow.add_n"
SUMSQ, CLIP_SCALE = "flow.sumsq", "flow.clip_scale"
ASSIGN, EMA = "flow.assign", "flow.ema"
_OPTIMIZER = (Trait.IN_PLACE, Trait.FUSED, Trait.PLAIN)

OPS: Mapping[str, OpInfo] = {
    SNAPSHOT: OpInfo(update, function=snapshot),
    ACCUMULATE: OpInfo(
        together, function=accumulate, traits=(Trait.SUM, Trait.PLAIN, Trait.ALIASES)
    ),
    ADD_N: OpInfo(together, function=add_n),
    SUMSQ: OpInfo(squares, function=sumsq),
    CLIP_SCALE: OpInfo(whole, function=clip_scale),  # the root of a sum is not the sum of roots
    **{
        f"flow.{name}": OpInfo(update, function=f.one, traits=_OPTIMIZER)
        for name, f in FUSED.items()
    },
    ASSIGN: OpInfo(write, function=assign, traits=(Trait.IN_PLACE,)),
    EMA: OpInfo(update, function=ema, traits=(Trait.IN_PLACE,)),
}
