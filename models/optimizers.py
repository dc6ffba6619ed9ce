"""Optimizers as functions of tensors.

    (param, grad, states …, *, lr, step, numbers …) -> (new param, new states …)

They are plain torch, written for one whole parameter; flowrun traces them
(engine/capture/update_trace.py).  All states are shaped as the parameter and start at zero.  `lr`
and `step` (from 1) are scalar tensors.  Users write their own in this form and name them in
optim._target_.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lion(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    *,
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor]:
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2): a step along a momentum's sign.

    beta1, beta2: decay of the momentum in the direction, and in the state.  weight_decay:
    decoupled, times lr.
    """
    direction = (beta1 * exp_avg + (1 - beta1) * grad).sign()
    return param - lr * (direction + weight_decay * param), beta2 * exp_avg + (1 - beta2) * grad


def lamb(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: Tensor,
    step: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """LAMB (You et al. 2020, arXiv 1904.00962, algorithm 2): Adam scaled to the weight's norm.

    eps: added to the root of the second moment.  weight_decay: part of the direction.  The scale is
    1 if either norm is 0.
    """
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    average, square = exp_avg / (1 - beta1**step), exp_avg_sq / (1 - beta2**step)
    direction = average / (square.sqrt() + eps) + weight_decay * param
    length, wanted = direction.norm(), param.norm()
    known = (length > 0) & (wanted > 0)
    trust = torch.where(known, wanted / torch.where(known, length, 1.0), 1.0)
    return param - lr * trust * direction, exp_avg, exp_avg_sq


def adagrad(
    param: Tensor, grad: Tensor, state_sum: Tensor, *, lr: Tensor, eps: float, weight_decay: float
) -> tuple[Tensor, Tensor]:
    """Adagrad (Duchi et al. 2011), as torch.optim.Adagrad without lr_decay.

    eps: added to the root of the sum.  weight_decay: added to the gradient, times param.
    """
    grad = grad + weight_decay * param
    state_sum = state_sum + grad * grad
    return param - lr * grad / (state_sum.sqrt() + eps), state_sum
