"""Modules and functions of torch, each in a net as small as can be: what a survey trains under one
rank and under two, beside plain torch.

The functions and what they are given are those of torch's own tests: `op_db`, `module_db`.  A net
scales and shifts every element of its samples by weights of its own, hands them to the op, and
takes the mean of the tangent hyperbolic of the result; of an op that returns one number, that.  A
function is given one sample at a time, by vmap; a module all samples together.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from flowrun.engine.ir.graph import UPDATE, LogicalGraph
from flowrun.engine.ir.sbp import Broadcast, Split
from flowrun.engine.ops import registry
from flowrun.engine.ops.flow.structure import BOX, PIN
from support.layouts.grids import Layout, compiled, virtual_run
from support.layouts.plain_loop import (
    Batch,
    Training,
    largest,
    loss_difference,
    plain_loop,
    seeded,
    sgd,
)

SAMPLES, STEPS = 6, 2
BY_HAND, FOUND, WHOLE = "by hand", "found", "whole"
LEAST = 1e-2  # of a weight's norm: a smaller one counts as that


class NoCase(Exception):
    """torch has no sample that fits, or plain torch cannot train on it: the message says which."""


@dataclass(frozen=True, eq=False)
class Case:
    """One row of the survey.

    make: the op, of a batch.  draw: seed -> what the op is given: tensors of `SAMPLES` samples.
    """

    make: Callable[[], Callable[..., Any]]
    draw: Callable[[int], list[Tensor]]


class _Net(nn.Module):
    """See the head of the file."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.op, values = case.make(), case.draw(0)
        shape = values[0].shape[1:]
        self.scale, self.shift = (
            nn.Parameter(torch.ones(shape)),
            nn.Parameter(torch.full(shape, 1e-3)),
        )

    def forward(
        self, a: Tensor, b: Tensor | None = None, c: Tensor | None = None, d: Tensor | None = None
    ) -> Tensor:
        rest = [value for value in (b, c, d) if value is not None]
        if a.is_floating_point():
            return _one_number(self.op(a * self.scale + self.shift, *rest))
        return _one_number(self.op(a, *rest)) * self.scale.mean() + self.shift.mean()


def _one_number(out: Any) -> Tensor:
    """A mean over the batch."""
    if isinstance(out, (tuple, list)):
        parts = [
            v for v in out if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex())
        ]
        return sum((_one_number(v) for v in parts), torch.zeros(()))
    out = torch.view_as_real(out.resolve_conj()) if out.is_complex() else out
    return out if not out.ndim else 2 + out.float().tanh().mean()


def _loss(output: Tensor, batch: Batch) -> Tensor:
    return output


# ---- cases ---------------------------------------------------------------------------------------


class _Each(nn.Module):
    """A function of one sample, with the rest of what it is given."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        given = _function_sample(op, 0)
        self.function, self.rest, self.named = op.op, given.args, given.kwargs

    def forward(self, x: Tensor) -> Any:
        return torch.vmap(lambda sample: self.function(sample, *self.rest, **self.named))(x)


def _function_sample(op: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    for given in op.sample_inputs("cpu", torch.float32, requires_grad=False):
        x = given.input
        dense = isinstance(x, Tensor) and x.layout == torch.strided and x.is_floating_point()
        if dense and x.ndim and x.numel():
            return given
    raise NoCase("torch has no sample of one dim or more")


def _function_batch(op: Any, seed: int) -> list[Tensor]:
    samples = range(SAMPLES * seed, SAMPLES * (seed + 1))
    return [torch.stack([_function_sample(op, sample).input for sample in samples])]


class _Whole(nn.Module):
    """A module of a batch, whose tensors come one by one."""

    def __init__(self, info: Any) -> None:
        super().__init__()
        given, _, self.spec = _module_sample(info, 0)
        self.module = info.module_cls(*given.args, **given.kwargs)

    def forward(self, *values: Tensor) -> Any:
        arguments, named = tree_unflatten(list(values), self.spec)
        return self.module(*arguments, **named)


def _module_sample(info: Any, seed: int) -> tuple[Any, list[Tensor], Any]:
    """What the constructor is given, the tensors that forward is given, and how they are nested."""
    torch.manual_seed(seed)
    inputs = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
    )
    for each in inputs:
        given = each.forward_input
        values, spec = tree_flatten((given.args, given.kwargs) if given else ())
        tensors = all(isinstance(value, Tensor) and value.ndim for value in values)
        one_batch = tensors and len({len(value) for value in values}) == 1
        if one_batch and len(values) <= 4 and (values[0].ndim > 1 or len(values) > 1):
            return each.constructor_input, values, spec
    raise NoCase("torch has no sample of a batch of tensors")


def _module_batch(info: Any, seed: int) -> list[Tensor]:
    draws = [_module_sample(info, SAMPLES * seed + k)[1] for k in range(SAMPLES)]
    return [torch.cat(parts)[:SAMPLES].clone() for parts in zip(*draws, strict=True)]


def _databases() -> tuple[list[Any], list[Any]]:
    """`op_db` and `module_db`, whose import leaves torch's settings and the environment alone."""
    environment = dict(os.environ)
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    os.environ.clear()
    os.environ.update(environment)
    torch.backends.__allow_nonbracketed_mutation_flag = True
    return op_db, module_db


def _cases() -> Iterator[tuple[str, Case]]:
    functions, modules = _databases()
    for info in modules:
        if "Lazy" not in info.name:  # the same as others after their first forward
            yield info.name, Case(partial(_Whole, info), partial(_module_batch, info))
    for op in functions:
        if op.supports_autograd and op.supports_dtype(torch.float32, "cpu"):
            name = op.name.replace("nn.functional", "F")
            name = name if name.startswith("F.") else f"torch.{name}"
            variant = f" ({op.variant_test_name})" if op.variant_test_name else ""
            yield name + variant, Case(partial(_Each, op), partial(_function_batch, op))


CASES: Mapping[str, Case] = dict(_cases())


@cache
def training(name: str) -> Training:
    """Of a case, by name.  Raises NoCase."""
    case = CASES[name]
    make = partial(seeded, partial(_Net, case))
    with torch.random.fork_rng(devices=[]):
        drawn = [dict(zip("abcd", case.draw(1 + k), strict=False)) for k in range(STEPS)]
    given = Training(make, {field: field for field in drawn[0]}, _loss, tuple(drawn), sgd(0.1), 1)
    try:
        losses = plain_loop(given, 0.0, STEPS).losses
    except Exception as error:
        raise NoCase(f"plain torch: {type(error).__name__}: {str(error)[:60]}") from error
    if not all(map(math.isfinite, losses)):
        raise NoCase("plain torch: the loss is not finite")
    return given


# ---- verdicts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """kind: BY_HAND, FOUND or WHOLE.  found, whole: targets.  gathered: tensors of samples that are
    boxed to B before the update.  apart: of losses and weights from plain torch, under data 2.
    """

    kind: str
    found: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    apart: float = 0.0


def verdict(name: str) -> Verdict:
    """Trains the case on one rank and on two, as data parallel.  Raises NoCase, FlowrunError."""
    try:
        return _verdict(training(name))
    finally:  # where torch's capture fails inside of vmap, it stays inside
        while torch._C._functorch.peek_interpreter_stack() is not None:
            torch._C._functorch.pop_dynamic_layer_stack()


def _verdict(given: Training) -> Verdict:
    plain = plain_loop(given, 0.0, STEPS)
    apart = 0.0
    for layout in (Layout(), Layout(data=2)):
        run = virtual_run(given, layout, STEPS)
        weights = (
            float((run.weights[name] - after).norm()) / max(float(after.norm()), LEAST)
            for name, after in plain.after.items()
            if name in run.weights
        )
        apart = largest((apart, loss_difference(run.losses, plain), *weights))
    graph = compiled(given, Layout(data=2)).plan.graph
    by_experiment, whole = origins(graph)
    kind = WHOLE if whole else FOUND if by_experiment else BY_HAND
    return Verdict(kind, by_experiment, whole, gathered(graph), apart)


def origins(graph: LogicalGraph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Targets whose rows were found, and those without rows that read samples."""
    ops = [op for op in graph.ops if op.target not in (BOX, PIN)]
    ops = [op for op in ops if registry.info(op.target).relabels is None]
    of_samples = _of_samples(graph)
    by_experiment = {op.target for op in ops if op.table is not None}
    whole = {
        op.target
        for op in ops
        if op.table is None
        and not registry.has_table(op.target)
        and of_samples.intersection(op.inputs)
    }
    return tuple(sorted(by_experiment)), tuple(sorted(whole))


def _of_samples(graph: LogicalGraph) -> set[str]:
    """Tensors that depend on the batch."""
    names = {f.tensor for f in graph.feeds if not f.is_own}
    for op in graph.ops:
        if names.intersection(op.inputs):
            names.update(op.makes)
    return names


def gathered(graph: LogicalGraph) -> tuple[str, ...]:
    """Tensors of samples that travel from S to B before the update."""
    of_samples = _of_samples(graph)
    return tuple(
        op.inputs[0]
        for op in graph.ops
        if op.target == "flow.box"
        and op.phase != UPDATE
        and op.inputs[0] in of_samples
        and any(
            isinstance(a, Split) and isinstance(b, Broadcast)
            for a, b in zip(op.in_sbp[0], op.out_sbp[0], strict=True)
        )
    )
