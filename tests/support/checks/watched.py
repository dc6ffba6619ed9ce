"""What forward does that Dynamo cannot follow: some of it trains while Python runs it, the rest
depends on what Python holds, and is refused.

Each function is the second half of a forward, after a lock that Dynamo cannot enter.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import itertools
import logging
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft.utils.other import transpose
from torch import Tensor, nn

Body = Callable[[Any, Tensor], Tensor]
LOCK = threading.Lock()
LIBRARY = torch.library.Library("flowrun_watched", "FRAGMENT")
COUNTS = {"calls": 0}


def numbers() -> Iterator[float]:
    yield from itertools.cycle([1.0, 2.0, 3.0])


class Net(nn.Module):
    """Layers, a buffer, and Python state of many kinds."""

    run: Tensor
    calls_of_all = 0

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.layer, self.other, self.body = nn.Linear(4, 4), nn.Linear(4, 4), body
        self.tied, self.drop, self.norm = nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.tied.weight = self.layer.weight
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.register_buffer("run", torch.zeros(4))
        self.calls, self.flag, self.items, self.plain = 0, False, [0], torch.ones(4)
        self.kept: Tensor | None = None
        self.cycle, self.numbers = itertools.cycle([1, 2]), numbers()
        self.draws, self.weights = np.random.default_rng(0), [self.other.weight]

    def forward(self, x: Tensor) -> Tensor:
        with LOCK:
            x = x * 1.0
        return self.body(self, self.layer(x)) + self.tied(x)


# ---- trains --------------------------------------------------------------------------------------


def plain(net: Any, h: Tensor) -> Tensor:
    return h + net.plain


def keeps_what_nobody_reads(net: Any, h: Tensor) -> Tensor:
    net.kept = h.detach()
    return h


def writes_a_buffer(net: Any, h: Tensor) -> Tensor:
    net.run.mul_(0.9).add_(h.detach().mean(0))
    return h + net.run


def assigns_a_buffer(net: Any, h: Tensor) -> Tensor:
    net.run = net.run * 0.9 + h.detach().mean(0)
    return h + net.run


def prints_and_warns(net: Any, h: Tensor) -> Tensor:
    print("h is", h)
    print(f"the mean is {h.mean():.3f}", h.shape)
    if not net.flag:
        warnings.warn("once", stacklevel=1)
        net.flag = True
    logging.getLogger("x").info("h is %s", h)
    return h


def hooks(net: Any, h: Tensor) -> Tensor:
    h = h * 1
    h.register_hook(lambda grad: grad * 2)  # type: ignore[no-untyped-call]
    return h


def infers(net: Any, h: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = net.plain * 0.5
        with torch.inference_mode(False):
            h = h * h.exp()
    return h * scale.clone()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 5 * grad * ctx.saved_tensors[0]


def a_function(net: Any, h: Tensor) -> Any:
    return Cube.apply(h)  # type: ignore[no-untyped-call]


def reads_a_library(net: Any, h: Tensor) -> Tensor:
    """An object of C whose type makes no other."""
    return h + bool(LIBRARY)


def all_true(mask: Tensor) -> bool:
    return bool(mask.all())


def checks_values(net: Any, h: Tensor) -> Tensor:
    if not all_true(h < 1e9):
        raise ValueError
    if (h > 1e9).any():
        raise ValueError(f"too large: {h}")
    assert torch.isfinite(h).all(), "not finite"
    with torch.no_grad():
        if net.calls == 3 or not (h < 1e9).all():
            raise ValueError
    return h


def a_distribution(net: Any, h: Tensor) -> Tensor:
    one = torch.distributions.Normal(h, torch.ones(4), validate_args=True)
    other = torch.distributions.Normal(torch.zeros(4), torch.ones(4), validate_args=True)
    return h + one.log_prob(h * 2) + torch.distributions.kl_divergence(one, other)


def a_covariance(net: Any, h: Tensor) -> Tensor:
    spread = torch.diag_embed(h.exp())
    made = torch.distributions.MultivariateNormal(h, spread, validate_args=True)
    return h + made.log_prob(h * 2)[:, None]


def is_for_plain_torch(net: Any, h: Tensor) -> Tensor:
    return h * (None if torch.compiler.is_compiling() else 2.0)  # type: ignore[operator]


def makes_a_parameter_in_peft(net: Any, h: Tensor) -> Tensor:
    return h @ transpose(net.other.weight, True)


def recurrent(net: Any, h: Tensor) -> Any:
    return net.rnn(h[:, None])[0][:, 0]


def norm_and_dropout(net: Any, h: Tensor) -> Any:
    return net.drop(net.norm(h))


def force(net: Any, h: Tensor) -> Tensor:
    x = h.detach()
    x.requires_grad_()
    (grad,) = torch.autograd.grad(net.other(x).tanh().sum(), x, create_graph=True)
    return h + grad


def maps_gradients(net: Any, h: Tensor) -> Tensor:
    return h + torch.func.vmap(torch.func.grad(lambda v: net.other(v).pow(2).sum()))(h)


def sums_parameters(net: Any, h: Tensor) -> Tensor:
    known = [p for p in net.parameters() if isinstance(p, nn.Parameter)]
    return h + sum(p.pow(2).sum() for p in known)


def narrow(net: Any, h: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return net.other(h).float()


def looks_up(net: Any, h: Tensor) -> Tensor:
    return h + F.embedding(h.argmax(-1), net.other.weight, sparse=True)


@lru_cache
def double(n: int) -> int:
    return 2 * n


def caches(net: Any, h: Tensor) -> Tensor:
    return h * double(3)


def saves_memory(net: Any, h: Tensor) -> Any:
    inside = lambda h: net.drop(net.other(h))  # noqa: E731
    return torch.utils.checkpoint.checkpoint(inside, h, use_reentrant=False)


def collects(net: Any, h: Tensor) -> Tensor:
    gc.collect()
    return h


def skips_a_look_while_traced(net: Any, h: Tensor) -> Tensor:
    if not torch.compiler.is_compiling() and bool((h == 7).any()):
        warnings.warn("seven", stacklevel=1)
    return net.layer(h)


def chooses_once(net: Any, h: Tensor) -> Tensor:
    if getattr(net, "kind", None) is None:
        net.kind = "real" if h.dtype.is_floating_point else "whole"
    return h * 2 if net.kind == "real" else h


TRAIN = (
    *(plain, keeps_what_nobody_reads, writes_a_buffer, assigns_a_buffer, prints_and_warns, hooks),
    *(a_function, checks_values, a_distribution, recurrent, norm_and_dropout, force),
    *(a_covariance, is_for_plain_torch, makes_a_parameter_in_peft, infers),
    *(
        maps_gradients,
        sums_parameters,
        narrow,
        looks_up,
        caches,
        collects,
        saves_memory,
        reads_a_library,
        skips_a_look_while_traced,
        chooses_once,
    ),
)


# ---- refused -------------------------------------------------------------------------------------


def counts(net: Any, h: Tensor) -> Tensor:
    net.calls += 1
    return h * 2 if net.calls > 100 else h


def flips(net: Any, h: Tensor) -> Tensor:
    net.flag = not net.flag
    return h * 2 if net.flag else h


def counts_outside(net: Any, h: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    return h * 2 if COUNTS["calls"] > 100 else h


def counts_in_the_class(net: Any, h: Tensor) -> Tensor:
    Net.calls_of_all += 1
    return h * 2 if Net.calls_of_all > 100 else h


def counts_in_itself(net: Any, h: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(1)
    return h * 2 if len(seen) > 100 else h


def lengthens(net: Any, h: Tensor) -> Tensor:
    net.items.append(1)
    return h * 2 if len(net.items) > 100 else h


def iterates(net: Any, h: Tensor) -> Tensor:
    return h * next(net.cycle)


def generates(net: Any, h: Tensor) -> Tensor:
    return h * next(net.numbers)


def draws_of_numpy(net: Any, h: Tensor) -> Tensor:
    return h if net.draws.random() < 0.999 else -h


def draws_of_python(net: Any, h: Tensor) -> Tensor:
    return h if random.random() < 0.999 else -h


def tells_time(net: Any, h: Tensor) -> Tensor:
    return h if time.perf_counter() < 1e15 else -h


def reads_frames(net: Any, h: Tensor) -> Tensor:
    return h * len(inspect.stack())


def asks_for_its_frame(net: Any, h: Tensor) -> Tensor:
    return h * len(sys._getframe().f_code.co_names)


def runs(net: Any, h: Tensor) -> Tensor:
    subprocess.run(["true"])
    return h


def begins_with_data(net: Any, h: Tensor) -> Tensor:
    if not net.flag:
        net.run = h.detach().mean(0)
        net.flag = True
    return h - net.run


def remembers(net: Any, h: Tensor) -> Tensor:
    out = h if net.kept is None else h + net.kept
    net.kept = h.detach()
    return out


def keeps_a_list(net: Any, h: Tensor) -> Tensor:
    net.items = [h.detach()]
    return h


def registers(net: Any, h: Tensor) -> Tensor:
    if not hasattr(net, "late"):
        net.register_buffer("late", torch.ones(4))
    return h + net.late


def formats(net: Any, h: Tensor) -> Tensor:
    return h * len(f"{h}")


def reenters(net: Any, h: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(net.other, h, use_reentrant=True)


def counts_in_backward(net: Any, h: Tensor) -> Tensor:
    def hook(grad: Tensor) -> Tensor:
        net.calls += 1
        return grad * 2 if net.calls > 100 else grad

    h = h * 1
    h.register_hook(hook)  # type: ignore[no-untyped-call]
    return h


def branches(net: Any, h: Tensor) -> Tensor:
    return -h if h.sum() > 0 else h


def returns_early(net: Any, h: Tensor) -> Tensor:
    if (h > 1e9).any():
        return h * 0
    return h


def may_raise(net: Any, h: Tensor) -> Tensor:
    if any([(h > 1e9).any()]):
        raise ValueError
    return h


def catches(net: Any, h: Tensor) -> Tensor:
    try:
        if (h > 0).any():
            raise ValueError
    except ValueError:
        return -h
    return h


def mends(net: Any, h: Tensor) -> Tensor:
    if (h > 0).any():
        try:
            raise ValueError
        except ValueError:
            h = -h
    return h


def check(h: Tensor) -> None:
    if (h > 0).any():
        raise ValueError


def catches_outside(net: Any, h: Tensor) -> Tensor:
    try:
        check(h)
    except ValueError:
        return -h
    return h


def suppresses(net: Any, h: Tensor) -> Tensor:
    with contextlib.suppress(ValueError):
        check(h)
        return h * 2
    return h


def prints_a_length(net: Any, h: Tensor) -> Tensor:
    print(net.items.append(len(f"{h}")))
    return h * net.items[-1]


def swallows(net: Any, h: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        return h + h[h > 0].sum()
    return h


def writes_outside(net: Any, h: Tensor) -> Tensor:
    net.plain.add_(1)
    return h + net.plain


def reads_a_weight_elsewhere(net: Any, h: Tensor) -> Tensor:
    return h @ net.weights[0]


def replaces_data(net: Any, h: Tensor) -> Any:
    net.other.weight.data = net.other.weight.data * 0.9
    return net.other(h)


def reads_gradients(net: Any, h: Tensor) -> Tensor:
    return h if net.other.weight.grad is None else -h


def changes_mode(net: Any, h: Tensor) -> Any:
    net.drop.eval()
    return net.drop(h)


def copies(net: Any, h: Tensor) -> Any:
    return copy.deepcopy(net.other)(h)


def takes_a_gradient(net: Any, h: Tensor) -> Tensor:
    h.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return h


PYTHON = "reads other values of Python in its second call"
CHANGES = "in Python"
CALLS = "which does not compute with tensors"
VALUE = "asks for the value of a tensor"
LOCKED = ""  # where Dynamo stops is said
REFUSED = {
    counts: "forward changes `calls`",
    **dict.fromkeys((flips, begins_with_data, generates, iterates), PYTHON),
    **dict.fromkeys((counts_outside, counts_in_the_class, counts_in_itself), PYTHON),
    **dict.fromkeys((lengthens, draws_of_numpy, counts_in_backward), CHANGES),
    **dict.fromkeys((draws_of_python, tells_time, reads_frames, asks_for_its_frame, runs), CALLS),
    **dict.fromkeys((formats, branches, returns_early, may_raise, catches), VALUE),
    **dict.fromkeys((catches_outside, mends, suppresses, prints_a_length), VALUE),
    swallows: "the shape of its result depends on values",
    remembers: "a tensor that an earlier call has kept",
    keeps_a_list: "forward keeps tensors in `items`",
    reenters: "it calls get_rng_state",
    reads_a_weight_elsewhere: "forward reads other.weight from a list",
    replaces_data: "replaces the .data",
    reads_gradients: "forward reads gradients",
    takes_a_gradient: "",
    **dict.fromkeys((registers, writes_outside, changes_mode, copies), LOCKED),
}
