"""A line that cannot be captured, in models of several kinds.

Each function stands in the forward of a part, or in a loss: it takes the part and values (3, 4).
The line that is refused is marked "# here", or is the only one.
"""

from __future__ import annotations

import copy
import datetime
import importlib
import inspect
import itertools
import math
import random
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from random import randint
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Mutation = Callable[[Any, Tensor], Any]


class Scripted(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h * 2


class Part(nn.Module):
    """A layer, things that forward may misuse, and a forward of any kind."""

    def __init__(self, mutation: Mutation) -> None:
        super().__init__()
        self.layer, self.made = nn.Linear(4, 4), mutation
        self.count, self.plain, self.table = itertools.cycle([1, 2]), torch.zeros(4), {0: 1.0}
        self.register_buffer("running", torch.zeros(4))
        self.lock, self.items, self.draws = threading.Lock(), list[Tensor](), torch.Generator()

    def forward(self, h: Tensor) -> Any:
        return self.made(self, self.layer(h))


# ---- Python decides by values


def branches(part: Any, h: Tensor) -> Any:
    if h.sum() > 0:  # here
        h = -h
    return h


def loops(part: Any, h: Tensor) -> Any:
    while h.norm() > 1:  # here
        h = h / 2
    return h


def counts(part: Any, h: Tensor) -> Any:
    for _ in range(int(h.abs().max()) + 1):  # here
        h = h * 2
    return h


def asserts_shape(part: Any, h: Tensor) -> Any:
    assert h.shape[-1] == 17, "17 features"  # here
    return h


def item(part: Any, h: Tensor) -> Any:
    return h * h.mean().item()


def floats(part: Any, h: Tensor) -> Any:
    return h * float(h.mean())


def lists(part: Any, h: Tensor) -> Any:
    return h * len(set(h.argmax(-1).tolist()))


def makes_tensor(part: Any, h: Tensor) -> Any:
    return h * torch.tensor([float(v) for v in h.flatten()[:4]])


def formats(part: Any, h: Tensor) -> Any:
    return h * len(f"{h.mean():.3f}")


def reprs(part: Any, h: Tensor) -> Any:
    return h * len(repr(h))


def hashes(part: Any, h: Tensor) -> Any:
    part.table[h.mean().item()] = 1.0  # here
    return h


def equal(part: Any, h: Tensor) -> Any:
    return h if torch.equal(h, -h) else -h


def allclose(part: Any, h: Tensor) -> Any:
    return h if torch.allclose(h, -h) else -h


def contains(part: Any, h: Tensor) -> Any:
    return h if 0 in h else -h


def boolean(part: Any, h: Tensor) -> Any:
    return h * bool(h.any())


def steps_range(part: Any, h: Tensor) -> Any:
    return h[: h.argmax() + 1]


def arange(part: Any, h: Tensor) -> Any:
    return h + torch.arange(h.argmax()).sum()


def repeats(part: Any, h: Tensor) -> Any:
    return h.repeat_interleave(h.argmax(-1).flatten(), 0)


# ---- shapes by values


def picks(part: Any, h: Tensor) -> Any:
    return h + h[h > 0].mean()


def nonzero(part: Any, h: Tensor) -> Any:
    return h + h.nonzero().sum()


def unique(part: Any, h: Tensor) -> Any:
    return h + h.unique().sum()


def wheres(part: Any, h: Tensor) -> Any:
    return h + torch.where(h > 0)[0].sum()


def masked(part: Any, h: Tensor) -> Any:
    return h + torch.masked_select(h, h > 0).mean()


def bincount(part: Any, h: Tensor) -> Any:
    return h + torch.bincount(h.argmax(-1).flatten()).sum()


def one_hot(part: Any, h: Tensor) -> Any:
    return h + F.one_hot(h.argmax(-1)).sum()


# ---- NumPy, random, time, the system


def numpy_random(part: Any, h: Tensor) -> Any:
    return h * np.random.rand()


def python_random(part: Any, h: Tensor) -> Any:
    return h if random.random() < 0.5 else -h


def python_randint(part: Any, h: Tensor) -> Any:
    return h * randint(1, 3)


def python_shuffle(part: Any, h: Tensor) -> Any:
    order = [0, 1, 2]
    random.shuffle(order)  # here
    return h[order]


GENERATOR = random.Random(0)


def python_generator(part: Any, h: Tensor) -> Any:
    return h * GENERATOR.random()


def python_sample(part: Any, h: Tensor) -> Any:
    return h[random.sample([0, 1, 2], 3)]


def python_choice(part: Any, h: Tensor) -> Any:
    return h * random.choice([1, 2])


def clock(part: Any, h: Tensor) -> Any:
    return h * (time.perf_counter() > 0)


def now(part: Any, h: Tensor) -> Any:
    return h * datetime.datetime.now().year


def reads_file(part: Any, h: Tensor) -> Any:
    return h * len(Path(__file__).read_text())


def opens(part: Any, h: Tensor) -> Any:
    with open(__file__) as f:  # here
        h = h * len(f.read())
    return h


def runs(part: Any, h: Tensor) -> Any:
    subprocess.run(["true"])  # here
    return h


def uuids(part: Any, h: Tensor) -> Any:
    return h * (uuid.uuid4().int % 2)


def frames(part: Any, h: Tensor) -> Any:
    return h * len(inspect.stack())


# ---- state


def iterates(part: Any, h: Tensor) -> Any:
    return h * next(part.count)


def adds_to_plain(part: Any, h: Tensor) -> Any:
    return h + part.plain.add_(1)


def writes_data(part: Any, h: Tensor) -> Any:
    part.running.data = h.detach().flatten()[:4]  # here
    return h + part.running


def writes_weight(part: Any, h: Tensor) -> Any:
    with torch.no_grad():
        part.layer.weight.clamp_(-1, 1)  # here
    return h


def writes_leaf(part: Any, h: Tensor) -> Any:
    part.layer.weight.add_(1)  # here
    return h


def assigns_weight(part: Any, h: Tensor) -> Any:
    part.layer.weight = nn.Parameter(part.layer.weight * 2)  # here
    return h


def makes_layer(part: Any, h: Tensor) -> Any:
    return nn.Linear(4, 4)(h)


def adds_module(part: Any, h: Tensor) -> Any:
    part.add_module("late", nn.Linear(4, 4))  # here
    return part.late(h)


def registers(part: Any, h: Tensor) -> Any:
    part.late = nn.Identity()  # here
    return part.late(h)


def copies(part: Any, h: Tensor) -> Any:
    return copy.deepcopy(part.layer)(h)


def freezes(part: Any, h: Tensor) -> Any:
    part.layer.requires_grad_(False)  # here
    return h


def keeps(part: Any, h: Tensor) -> Any:
    with part.lock:  # Dynamo stops here, and would follow the rest
        part.items.append(h.detach().mean())  # here
    return h + sum(part.items)


def moves(part: Any, h: Tensor) -> Any:
    return part.layer.to(torch.float64)(h.double()).float()


def grad_of(part: Any, h: Tensor) -> Any:
    return h + part.layer.weight.grad


def backwards(part: Any, h: Tensor) -> Any:
    h.sum().backward()  # here
    return h


def seeds(part: Any, h: Tensor) -> Any:
    torch.manual_seed(3)  # here
    return h + torch.rand(4)


def generates(part: Any, h: Tensor) -> Any:
    return h + torch.rand(4, generator=part.draws)


def forks(part: Any, h: Tensor) -> Any:
    with torch.random.fork_rng():  # here
        return h + torch.rand(4)


def saves(part: Any, h: Tensor) -> Any:
    torch.save(h, "/dev/null")  # here
    return h


def pointer(part: Any, h: Tensor) -> Any:
    return h * h.data_ptr()


def ids(part: Any, h: Tensor) -> Any:
    return h * (id(h) % 2)


def storage(part: Any, h: Tensor) -> Any:
    return h * len(h.untyped_storage())


# ---- kinds of code


def yields(part: Any, h: Tensor) -> Any:
    yield h


def tries(part: Any, h: Tensor) -> Any:
    try:
        return h @ torch.zeros(17, 2)
    except RuntimeError:
        return h * h.mean().item()  # here


def scripts(part: Any, h: Tensor) -> Any:
    return torch.jit.script(Scripted())(h)


def checkpoints(part: Any, h: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(lambda h: h * h.mean().item(), h, use_reentrant=False)


def custom(part: Any, h: Tensor) -> Any:
    class Rounds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Any:
            return h * h.mean().item()  # here

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad

    return Rounds.apply(h)  # type: ignore[no-untyped-call]


def sparse(part: Any, h: Tensor) -> Any:
    return torch.sparse.mm(h.flatten(0, -2).to_sparse(), torch.ones(4, 4))


def nested(part: Any, h: Tensor) -> Any:
    return torch.nested.nested_tensor([h, h]).to_padded_tensor(0.0)


# ---- mistakes


def shapes(part: Any, h: Tensor) -> Any:
    return h @ torch.zeros(17, 2)


def indexes(part: Any, h: Tensor) -> Any:
    return F.embedding(h, torch.zeros(4, 4))


def out_of_range(part: Any, h: Tensor) -> Any:
    return h[7]


def missing_attribute(part: Any, h: Tensor) -> Any:
    return part.lyer(h)


def missing_argument(part: Any, h: Tensor) -> Any:
    return part.layer()


def too_many(part: Any, h: Tensor) -> Any:
    return part.layer(h, h)


def list_argument(part: Any, h: Tensor) -> Any:
    return part.layer([h, h])


def keyword(part: Any, h: Tensor) -> Any:
    return F.relu(h, inplce=True)


def name(part: Any, h: Tensor) -> Any:
    return hh  # type: ignore[name-defined]  # noqa: F821


def key(part: Any, h: Tensor) -> Any:
    return h * part.table[3]


def divides(part: Any, h: Tensor) -> Any:
    return h / (1 // (h.dim() - h.dim()))


def raises(part: Any, h: Tensor) -> Any:
    raise ValueError(f"expected 17 features, got {h.shape[-1]}")


def raises_own(part: Any, h: Tensor) -> Any:
    raise type("OwnError", (Exception,), {})("mine")


def recurses(part: Any, h: Tensor) -> Any:
    return recurses(part, h)


def none_plus(part: Any, h: Tensor) -> Any:
    return h + part.table.get(7)


def unpacks(part: Any, h: Tensor) -> Any:
    a, _ = h.chunk(3)  # here
    return a


def cuda(part: Any, h: Tensor) -> Any:
    return h.cuda()


def device(part: Any, h: Tensor) -> Any:
    return h + torch.zeros(4, device="meta")


def not_implemented(part: Any, h: Tensor) -> Any:
    raise NotImplementedError


def stops(part: Any, h: Tensor) -> Any:
    raise StopIteration


def imports(part: Any, h: Tensor) -> Any:
    return importlib.import_module("not_there").layer(h)


# ---- returns


def nothing(part: Any, h: Tensor) -> Any:
    return None


def text(part: Any, h: Tensor) -> Any:
    return "loss"


def number(part: Any, h: Tensor) -> Any:
    return 3.0


def tuples(part: Any, h: Tensor) -> Any:
    return (h, h)


def mapping(part: Any, h: Tensor) -> Any:
    return {"logits": h}


def module(part: Any, h: Tensor) -> Any:
    return part


def function(part: Any, h: Tensor) -> Any:
    return lambda: h


def integer(part: Any, h: Tensor) -> Any:
    return h.argmax(-1)


def boolean_tensor(part: Any, h: Tensor) -> Any:
    return h > 0


def detaches(part: Any, h: Tensor) -> Any:
    return h.detach()


def math_call(part: Any, h: Tensor) -> Any:
    return h * math.exp(h.mean())
