"""find_rows: captured -> captured.  Ops that no family of the engine knows get rows of their own.

These are the rows that the user gives, else those that hold in an experiment (engine/ops/proof).
The pass runs twice: over the captured ops, and over the ops of the update.  It tries nothing if no
axis has two ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flowrun.engine.ir.graph import LogicalGraph, Op
from flowrun.engine.ops import registry
from flowrun.engine.ops.proof.call_form import MOST_READINGS, CallForm, call_forms
from flowrun.engine.ops.proof.experiment import is_tried
from flowrun.engine.ops.proof.kept_rows import TORCH, KeptRows, kept_rows, shipped_rows
from flowrun.engine.ops.traits import is_engine_op
from flowrun.engine.strategy import Strategy

MIN_NOTED_S = 1.0  # experiments that take longer get a note


def find_rows(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Fill Op.table of each op that no family knows."""
    if all(size == 1 for placement in strategy.placements for size in placement.shape):
        return graph
    given = dict(strategy.signatures)
    kept = kept_rows(strategy.kept_rows)
    before = kept.seconds
    readings = {
        op.name: _readings(op, graph)
        for op in graph.ops
        if _name(op.target) not in given and _is_unknown(op)
    }
    _learn(kept, list(readings.values()))
    tables = {name: kept.table(forms) for name, forms in readings.items()}
    ops = tuple(
        replace(op, table=given.get(_name(op.target)) or tables.get(op.name) or op.table)
        for op in graph.ops
    )
    return replace(graph, ops=ops, notes=(*graph.notes, *_note(kept.seconds - before)))


def _learn(kept: KeptRows, readings: Sequence[Sequence[CallForm]]) -> None:
    """Try the first reading of every call, then the next of those that it leaves undecided."""
    for level in range(MOST_READINGS):
        kept.learn(
            forms[level]
            for forms in readings
            if len(forms) > level and not any(map(kept.decides, forms[:level]))
        )


def _note(seconds: float) -> Iterator[str]:
    if seconds > MIN_NOTED_S:
        why = "" if shipped_rows() else f", as no found rows ship for {TORCH}"
        yield f"trying ops without a table took {seconds:.1f} s{why}"


def _is_unknown(op: Op) -> bool:
    known = op.table is not None or is_engine_op(op.target) or registry.has_table(op.target)
    return not known and bool(op.inputs) and is_tried(op.target)


def _readings(op: Op, graph: LogicalGraph) -> list[CallForm]:
    tensors = graph.tensors
    out_shapes = [None if name is None else tensors[name].shape for name in op.outputs]
    read = [tensors[name] for name in op.inputs]
    return list(call_forms(op, [t.shape for t in read], [t.dtype for t in read], out_shapes))


def _name(target: str) -> str:
    """Return the name that torch.library gives a target: "my.op.default" -> "my::op".

    Other overloads keep their name: "my.op.out" -> "my::op.out".
    """
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    return f"{namespace}::{name}" + ("" if overload in ("", "default") else f".{overload}")
