"""Recurrent layers: one layer of nn.LSTM, GRU or RNN over whole sequences is one op of torch.

    flowrun.recurrent_layer(read, kind, both_ways, train, autocast)
        -> [out (T, samples, ways x h), a last state for each state, kept]
    flowrun.recurrent_layer_backward(gradients of these but kept, read, kept, …)
        -> gradients of all that is read

read: x (T, samples, in), the states h (ways, samples, h) and, of an LSTM, c, and the weights in
torch's order, of each way in turn.  Dropout between layers is an op of its own.

torch's functions run it, so that the kernel is the one that plain torch has: oneDNN's or a loop
over the steps on a CPU, cuDNN's on CUDA.  Forward and backward are two acts: between them the graph
that autograd made is held by `kept`, whose shape says how much memory that takes and whose elements
are those of `out`.  Where `kept` arrives as a copy, without the graph, forward runs once more.  The
graph also holds the weights: those that ZeRO 3 gathers for forward are free after backward.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from flowrun.engine.ir.graph import Op, refs
from flowrun.engine.ir.op_info import CostPart, OpCost, OpInfo, ProductKind, Trait, cost_part
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.sbp import B, P, S, Sbp
from flowrun.engine.ir.signature import LocalCall, LocalView, OpRows, OpView, Signature

FORWARD = "flowrun.recurrent_layer.default"
BACKWARD = "flowrun.recurrent_layer_backward.default"
LSTM, GRU = "lstm", "gru"
# torch's function of a kind of layers -> (m, n): torch 2.13 keeps on a CPU, for each step of a
# sample and each way, m numbers for one of h and n for one of h or x, whichever is wider
KINDS = {LSTM: (10, 7), GRU: (7, 1), "rnn_tanh": (1, 1), "rnn_relu": (1, 1)}
# For each, forward and backward: what a step on a CPU costs besides its products, in starts of ops
# from Python and in passes over h.  oneDNN runs an LSTM as one kernel; the others are loops of 4 to
# 14 kernels forward and 10 to 21 backward (torch's profiler), started in a third of the time.
_STEP = {
    LSTM: ((0, 4), (0, 9)),
    GRU: ((3, 14), (7, 18)),
    **dict.fromkeys(("rnn_tanh", "rnn_relu"), ((0, 4), (1, 5))),
}
_MM, _ADD = "aten.mm.default", "aten.add.Tensor"
_GRAPH = "_flowrun_graph"  # an attribute of `kept`


class _LayerGraph(NamedTuple):
    """The graph that autograd has recorded leads from `given`, of `read`, to `made`."""

    given: list[Tensor]
    made: list[Tensor]


def run(
    read: Sequence[Tensor], kind: str, both_ways: bool, train: bool, autocast: torch.dtype | None
) -> list[Tensor]:
    """Return the output, the last states, and what backward needs.

    kind: of KINDS.  train: backward will follow.  autocast: dtype of products; None: of x.
    """
    graph = _record(read, kind, both_ways, train, autocast)
    made = [each.detach() for each in graph.made]
    kept = made[0][..., :1].expand(_shape_of_kept(read, kind))
    if train:
        setattr(kept, _GRAPH, graph)
    return [*made, kept]


def run_backward(
    grads: Sequence[Tensor | None],
    read: Sequence[Tensor],
    kept: Tensor,
    kind: str,
    both_ways: bool,
    autocast: torch.dtype | None,
    wanted: Sequence[bool] = (),
) -> list[Tensor | None]:
    """Return the gradients of what is read.

    grads: of the output and the last states; None: nothing depends on it.  kept: of `run`.  wanted:
    for each gradient, whether it is; none: all are.
    """
    graph = vars(kept).pop(_GRAPH, None)  # a graph runs backward once
    graph = graph or _record(read, kind, both_ways, True, autocast)
    wanted = wanted or [True] * len(read)
    pairs = [(y, g) for y, g in zip(graph.made, grads, strict=True) if g is not None]
    outputs, known = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, [*compress(graph.given, wanted)], known))
    return [next(found) if each else None for each in wanted]


def _record(
    read: Sequence[Tensor], kind: str, both_ways: bool, train: bool, autocast: torch.dtype | None
) -> _LayerGraph:
    given = [each.detach().requires_grad_(train) for each in read]
    num_states = 1 + (kind == LSTM)
    weights = given[1 + num_states :]
    biases = len(weights) // (1 + both_ways) > 3
    with torch.set_grad_enabled(train), _autocast(read[0].device.type, autocast):
        # no leaves: autocast would cast them once for both ways, and round the sum of gradients
        x, *states = (each.view_as(each) for each in given[: 1 + num_states])
        state = states if kind == LSTM else states[0]
        made = getattr(torch, kind)(x, state, weights, biases, 1, 0.0, train, both_ways, False)
    with torch.set_grad_enabled(train):
        dtypes = _dtypes(read, kind, autocast)
        return _LayerGraph(given, [y.to(dtype) for y, dtype in zip(made, dtypes, strict=True)])


def _shape_of_kept(read: Sequence[Tensor], kind: str) -> tuple[int, int, int]:
    """Return (T, samples, numbers that are kept for a step of a sample)."""
    steps, samples, width = read[0].shape
    (ways, _, hidden), (of_hidden, of_wider) = read[1 + (kind == LSTM)].shape, KINDS[kind]
    return steps, samples, ways * (of_hidden * hidden + of_wider * max(hidden, width))


def _autocast(device: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(device, dtype) if dtype else contextlib.nullcontext()


def _dtypes(read: Sequence[Tensor], kind: str, autocast: torch.dtype | None) -> list[torch.dtype]:
    """Return those of the output and the last states, as a CPU makes them: where steps are a loop,
    autocast leaves what is added to a state as wide as that.
    """
    narrow = autocast or read[0].dtype
    wide = torch.promote_types(narrow, read[1 + (kind == LSTM)].dtype)
    if kind == GRU:
        return [wide, wide]
    is_projected = kind == LSTM and read[1].shape != read[2].shape  # then steps are a loop
    return [narrow, narrow, wide if is_projected else narrow][: 2 + (kind == LSTM)]


# ---- for torch -----------------------------------------------------------------------------------

torch.library.define(
    "flowrun::recurrent_layer",
    "(Tensor[] read, str kind, bool both_ways, bool train, ScalarType? autocast) -> Tensor[]",
)
torch.library.define(
    "flowrun::recurrent_layer_backward",
    "(Tensor?[] grads, Tensor[] read, Tensor kept, str kind, bool both_ways, ScalarType? autocast)"
    " -> Tensor[]",
)


def _fake(
    read: Sequence[Tensor], kind: str, both_ways: bool, _train: bool, autocast: torch.dtype | None
) -> list[Tensor]:
    dtypes, kept = _dtypes(read, kind, autocast), _shape_of_kept(read, kind)
    out = *kept[:2], (1 + both_ways) * read[1].shape[2]
    shapes = [out, *(state.shape for state in read[1 : len(dtypes)]), kept]
    typed = zip(shapes, [*dtypes, dtypes[0]], strict=True)
    return [read[0].new_empty(shape, dtype=dtype) for shape, dtype in typed]


def _fake_backward(_grads: object, read: Sequence[Tensor], *_: object) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in read]


class _LayerContext(FunctionCtx):
    """The context holds what autograd keeps of a call."""

    saved_tensors: tuple[Tensor, ...]
    how: tuple[str, bool, torch.dtype | None]


def _save(
    ctx: _LayerContext,
    inputs: tuple[list[Tensor], str, bool, bool, torch.dtype | None],
    output: list[Tensor],
) -> None:
    read, kind, both_ways, _, autocast = inputs
    ctx.how = kind, both_ways, autocast
    ctx.save_for_backward(*read, output[-1])
    ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)


def _backward(ctx: _LayerContext, grads: Sequence[Tensor | None]) -> tuple[object, ...]:
    *read, kept = ctx.saved_tensors
    run_op = torch.ops.flowrun.recurrent_layer_backward
    return run_op(list(grads[:-1]), read, kept, *ctx.how), None, None, None, None


torch.library.register_fake("flowrun::recurrent_layer", _fake)
torch.library.register_fake("flowrun::recurrent_layer_backward", _fake_backward)
torch.library.register_autograd("flowrun::recurrent_layer", _backward, setup_context=_save)


# ---- signatures ----------------------------------------------------------------------------------
#
# Samples are independent.  Not a split h: every gate of a step reads all of h, so that ranks would
# meet at each of T steps; nor split gates of x: torch's kernels multiply x and h in one call.


def forward(view: OpView) -> OpRows:
    """Split samples."""
    return (Signature(_by_sample(view), (S(1),) * len(view.op.outputs)),)


def backward(view: OpView) -> OpRows:
    """Split samples: ranks add up gradients of weights.  Linear in gradients, the first inputs."""
    read, made = _by_sample(view), len(view.op.outputs)
    weights, grads = read.count(B), len(list(refs(view.op.args[0])))
    outputs: tuple[Sbp, ...] = (*(S(1),) * (made - weights), *(P,) * weights)
    linear: tuple[Sbp, ...] = (*(P,) * grads, *(B,) * (len(read) - grads))
    return Signature(read, outputs), Signature(linear, (P,) * made)


def _by_sample(view: OpView) -> tuple[Sbp, ...]:
    """Return the SBPs of inputs: all but weights have samples."""
    return tuple(S(1) if len(shape) == 3 else B for shape in view.in_shapes)


def local_backward(view: LocalView) -> LocalCall:
    """Leave out the gradients that nobody reads."""
    wanted = tuple(name is not None for name in view.op.outputs)
    return LocalCall(run_backward, view.op.args, (("wanted", wanted),))


def _flops(op: Op, in_shapes: Sequence[Shape], _: Sequence[Shape | None]) -> float:
    """Count a product with each matrix of weights at each step, or two in backward."""
    positions = math.prod(in_shapes[-1 if op.target == BACKWARD else 0][:2])
    matrices = sum(math.prod(shape) for shape in in_shapes if len(shape) == 2)
    return (4.0 if op.target == BACKWARD else 2.0) * positions * matrices


def _parts(op: Op, ins: Sequence[Shape]) -> Iterator[CostPart]:
    """Yield a product of x with all steps, and at each step those with a state and the passes over
    its gates.
    """
    is_backward = op.target == BACKWARD
    steps, samples, _ = ins[-1 if is_backward else 0]
    kind, both_ways = op.args[-3:-1] if is_backward else op.args[1:3]
    matrices = [shape for shape in ins if len(shape) == 2]
    of_way = len(matrices) // (1 + both_ways)
    part = partial(cost_part, op, like=op.inputs[0])
    for k, (out, inner) in enumerate(matrices):
        rows, times = (samples, steps) if k % of_way else (samples * steps, 1)
        yield part(_MM, times * (1 + is_backward), (rows, inner), (inner, out), (rows, out))
        if is_backward and k % of_way and kind != LSTM:
            yield part(_ADD, steps, (out, inner), (out, inner), (out, inner))
    starts, passes = _STEP[kind][is_backward]
    numbers = steps * samples * (1 + both_ways) * matrices[1][1] * passes // max(1, starts * steps)
    yield part(_ADD, max(1, starts * steps), *((numbers,),) * 3)


_COST = OpCost(product=ProductKind.MATRIX, flops=_flops, parts=_parts)
OPS: Mapping[str, OpInfo] = {
    FORWARD: OpInfo(forward, function=run, traits=(Trait.PRODUCT, Trait.PLAIN), cost=_COST),
    BACKWARD: OpInfo(
        backward, local=local_backward, function=run_backward, traits=(Trait.PLAIN,), cost=_COST
    ),
}
