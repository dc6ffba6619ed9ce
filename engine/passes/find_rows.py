"""find_rows: captured -> captured.  Ops that no family of the engine knows get rows of their own:
those that the user gives, else those that hold in an experiment (engine/proof).

It runs twice: over what was captured, and over the ops of the update.  Where no axis has two ranks
nothing is tried.
"""

from __future__ import annotations

from dataclasses import replace

from flowrun.engine.graph import LogicalGraph, Op
from flowrun.engine.ops import registry
from flowrun.engine.ops.table import Table
from flowrun.engine.ops.traits import is_engines
from flowrun.engine.proof.kept_rows import KeptRows, kept_rows
from flowrun.engine.strategy import Strategy

ANNOUNCED_S = 1.0  # experiments that take longer are noted


def find_rows(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Fills Op.table."""
    if all(size == 1 for placement in strategy.placements for size in placement.shape):
        return graph
    given = dict(strategy.signatures)
    kept = kept_rows(strategy.kept_rows)
    before = kept.seconds
    ops = tuple(_with_table(op, graph, given.get(_name(op.target)), kept) for op in graph.ops)
    took = kept.seconds - before
    notes = (f"trying ops without a table took {took:.1f} s, once",) if took > ANNOUNCED_S else ()
    return replace(graph, ops=ops, notes=(*graph.notes, *notes))


def _with_table(op: Op, graph: LogicalGraph, given: Table | None, kept: KeptRows) -> Op:
    if given is not None:
        return replace(op, table=given)
    if op.table is not None or is_engines(op.target) or registry.has_table(op.target):
        return op
    tensors = graph.tensors
    found = kept.table(
        op,
        [tensors[name].shape for name in op.inputs],
        [tensors[name].dtype for name in op.inputs],
        [None if name is None else tensors[name].shape for name in op.outputs],
    )
    return op if found is None else replace(op, table=found)


def _name(target: str) -> str:
    """ "my.op.default" -> "my::op", as torch.library names it; of other overloads the name too."""
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    return f"{namespace}::{name}" + ("" if overload in ("", "default") else f".{overload}")
