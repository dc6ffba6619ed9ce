"""Optimizers as functions of tensors: (param, grad, states …, *, lr, step, numbers) -> (new param,
new states …).

Plain torch, written for one parameter as if it were whole; flowrun traces them (engine/
update_trace.py).  States start at zero.  A user's own look alike: optim.update names them.
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
    """Lion: the sign of a momentum (Chen et al. 2023, arXiv 2302.06675, algorithm 2)."""
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
    """LAMB: Adam, its length made the weight's own (You et al. 2020, arXiv 1904.00962, alg. 2).

    The factor between the lengths is 1 where either is 0.
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
    """Adagrad (Duchi et al. 2011), as torch.optim.Adagrad without lr_decay."""
    grad = grad + weight_decay * param
    state_sum = state_sum + grad * grad
    return param - lr * grad / (state_sum.sqrt() + eps), state_sum
