"""count_kinds: what each tensor that is made of the batch alone is, seen by the micro-batches.

Micro-batches are one more axis that splits the batch, in time.  Whether an op keeps the samples
separate or sums them is read from the tables of signatures (S(0) -> S(d), S(0) -> P).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flowrun.engine.ir.graph import BACKWARD, FORWARD, LogicalGraph, Op, Ref
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ir.sbp import B, P, S, Sbp
from flowrun.engine.ops import registry
from flowrun.engine.ops.nn import loss
from flowrun.engine.ops.traits import has, is_engine_op, is_random, is_view

# kinds of tensors that are made of the batch alone, as the micro-batches of a step see them
CONSTANT = "constant"  # equal in all micro-batches
SAMPLES = "samples"  # dim `dim` indexes samples
COUNTED = "counted"  # a sum over samples: the micro-batches' values add up to the step's
STEP = "step"  # made of counts: known once a step
LATE = "late"  # made of samples and of values known once a step
UNKNOWN = "unknown"  # made of the batch in a way that no rule here covers

_SUMS: Mapping[str, int] = {  # -> degree
    "aten.sum.default": 1,
    "aten.sum.dim_IntList": 1,
    loss.COUNT: 1,
    "aten.mean.default": 0,
    "aten.mean.dim": 0,
}


def name_targets(text: str) -> frozenset[str]:
    """Return the aten targets of these names."""
    return frozenset(f"aten.{name}" for name in text.split())


_SAME_DEGREE = name_targets("""
    _to_copy.default clone.default detach.default alias.default neg.default abs.default
    clamp.default clamp_min.default clamp_max.default relu.default add.Scalar sub.Scalar
    mul.Scalar div.Scalar expand.default squeeze.default squeeze.dim squeeze.dims unsqueeze.default
""")
_EQUAL_DEGREES = name_targets(
    "add.Tensor sub.Tensor maximum.default minimum.default clamp_min.Tensor"
)
_COMPARISONS = name_targets("""
    eq.Scalar ne.Scalar gt.Scalar ge.Scalar lt.Scalar le.Scalar eq.Tensor ne.Tensor gt.Tensor
    ge.Tensor lt.Tensor le.Tensor logical_not.default logical_and.default logical_or.default
    bitwise_not.default
""")
_POWERS = {"aten.reciprocal.default": -1.0, "aten.sqrt.default": 0.5, "aten.rsqrt.default": -0.5}
_FACTORS = {"aten.mul.Tensor": 1, "aten.div.Tensor": -1}  # -> power of the second factor


@dataclass(frozen=True, slots=True)
class Known:
    """A tensor that is made of the batch alone.

    dim: the dim of samples, for SAMPLES.  degree: m times as many samples make it m ** degree times
    as large.
    """

    kind: str
    dim: int = 0
    degree: float = 0.0

    @property
    def once(self) -> bool:
        """True if the value is known once a step."""
        return self.kind in (COUNTED, STEP)


def learn_kinds(graph: LogicalGraph) -> dict[str, Known]:
    """Return the kind of every tensor of forward and backward that is made of the batch alone."""
    trains = any(v.new for v in graph.variables if v.kind == "parameter")
    known = {  # an evaluation changes no parameter, and yet they are what a loss is of
        v.tensor: Known(CONSTANT)
        for v in graph.variables
        if v.new is None and (trains or v.kind != "parameter")
    }
    for feed in graph.feeds:
        if not feed.is_own and not feed.per_step:
            of_samples = bool(graph.tensors[feed.tensor].shape)
            known[feed.tensor] = Known(SAMPLES if of_samples else UNKNOWN)
    for op in graph.ops:
        if op.phase in (FORWARD, BACKWARD) and _is_made_of_known(op, known):
            kind = _classify(graph, op, [known[name] for name in op.inputs])
            known.update(dict.fromkeys(op.makes, kind))
    return known


def _is_made_of_known(op: Op, known: Mapping[str, Known]) -> bool:
    """Return whether an op reads only tensors that are made of the batch, and draws nothing."""
    if any(name not in known for name in op.inputs) or not op.makes:
        return False
    draws = is_random(op.target) if not is_engine_op(op.target) else not _is_constant(op)
    return bool(op.inputs) or not draws


def _classify(graph: LogicalGraph, op: Op, states: list[Known]) -> Known:
    kinds = {state.kind for state in states}
    if kinds <= {CONSTANT}:
        return Known(CONSTANT)
    if UNKNOWN in kinds:
        return Known(UNKNOWN)
    if SAMPLES in kinds and kinds <= {SAMPLES, CONSTANT}:
        return _follow_row(graph, op, states)
    if not kinds <= {COUNTED, STEP, CONSTANT}:
        return Known(LATE)
    degree = _degree(op, states)
    return Known(UNKNOWN) if degree is None else Known(STEP, degree=degree)


def _follow_row(graph: LogicalGraph, op: Op, states: list[Known]) -> Known:
    """Return the kind that the op's table gives for a batch in two pieces."""
    if len(op.outputs) != 1:
        return Known(UNKNOWN)
    ins = [
        _twice(graph, name, state.dim if state.kind == SAMPLES else None)
        for name, state in zip(op.inputs, states, strict=True)
    ]
    read = tuple(S(state.dim) if state.kind == SAMPLES else B for state in states)
    output = op.makes[0]
    for dim in range(len(graph.tensors[output].shape)):
        if _has_row(op, ins, _twice(graph, output, dim), read, S(dim)):
            return Known(SAMPLES, dim)
    if op.target in _SUMS and _has_row(op, ins, _twice(graph, output, None), read, P):
        return Known(COUNTED, degree=_SUMS[op.target])
    return Known(UNKNOWN)


def _twice(graph: LogicalGraph, name: str, dim: int | None) -> tuple[int, ...]:
    """Return the shape of a tensor with twice as many samples along `dim`; None: unchanged."""
    shape = graph.tensors[name].shape
    return tuple(2 * n if d == dim else n for d, n in enumerate(shape))


def _has_row(
    op: Op, ins: list[tuple[int, ...]], out: tuple[int, ...], read: tuple[Sbp, ...], output_sbp: Sbp
) -> bool:
    try:
        rows = registry.signatures(op, ins, [out], 2)
    except (AssertionError, IndexError, RuntimeError, ValueError):
        return False  # shapes that do not fit one another
    return any(row.inputs == read and row.outputs == (output_sbp,) for row in rows)


def _is_constant(op: Op) -> bool:
    return has(op.target, Trait.CONSTANT)


def _degree(op: Op, states: list[Known]) -> float | None:
    """Return the degree of an op's output, made of counts and constants; None if it has none."""
    if op.target in _COMPARISONS:
        return 0.0
    if op.target in _SAME_DEGREE or is_view(op.target):
        return states[0].degree
    if op.target in _EQUAL_DEGREES:  # a constant added to a sum is the step's: clamp(min=1), + eps
        return _common_degree(states, otherwise=None)
    if op.target == "aten.where.self":
        return _common_degree(states[1:], otherwise=0.0)
    if op.target in _POWERS:
        return _POWERS[op.target] * states[0].degree
    if op.target in _FACTORS:
        parts = [s.degree if s.kind != CONSTANT else 0.0 for s in states]
        if len(parts) == 1:  # by a number, or a number by it
            parts = [*parts, 0.0] if isinstance(op.args[0], Ref) else [0.0, *parts]
        return parts[0] + _FACTORS[op.target] * parts[1]
    return None


def _common_degree(states: Iterable[Known], otherwise: float | None) -> float | None:
    """Return the one degree of all that is not constant; `otherwise` where all is."""
    degrees = {state.degree for state in states if state.kind != CONSTANT}
    if not degrees:
        return otherwise
    return degrees.pop() if len(degrees) == 1 else None
