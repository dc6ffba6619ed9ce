"""sparse_ops: gradients of embedding tables as rows (part of the pass update_ops).

If the gradient of a table comes from look-ups alone, and a step looks up fewer rows than the table
has, ids and rows are collected over the micro-batches.  If an update of rows is equal to the dense
update, or is asked for (Optimizer.sparse), rows of equal ids are summed and the update changes only
those rows: a step then costs the same for any size of the table.  Otherwise the dense gradient is
made of the rows once a step: no micro-batch fills a table with zeros and adds it to another, and
ranks that divide the batch exchange rows if that is faster than summing tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flowrun.engine.capture.update_trace import ignores_zero_gradient, is_elementwise
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import BACKWARD, LogicalGraph, LogicalTensor, Op, Ref, Variable
from flowrun.engine.ir.placement import BATCH_AXES
from flowrun.engine.ir.signature import bind
from flowrun.engine.ops.flow.sparse import COALESCE, COLLECT, UPDATE_ROWS
from flowrun.engine.ops.math.pointwise import CAST
from flowrun.engine.ops.nn.embedding import EMBEDDING_BACKWARD
from flowrun.engine.passes.update.graph_builder import GraphBuilder, OpPlace
from flowrun.engine.strategy import Strategy, Update

_MIN_NOTED_RATIO = 4  # rows of a table / rows of a step from which a dense update gets a note


def lookups_of(graph: LogicalGraph, variable: Variable, parts: Sequence[str]) -> tuple[Op, ...]:
    """Return the look-ups whose gradients sum up to a parameter's; empty if the sum has other
    terms.

    parts: tensors of its gradient, one for each stage.
    """
    lookups: list[Op] = []
    pending = list(parts)
    while pending:
        op = graph.producer.get(pending.pop())
        if op is None or op.stage != variable.stage or len(parts) > 1:
            return ()
        readers = sum(len(graph.consumers.get(name, ())) for name in op.makes)
        if readers > (0 if op.makes[0] in parts else 1):
            return ()
        if _keeps_terms(op):
            pending += op.inputs  # the model casts the table, then looks up rows
        elif op.target == EMBEDDING_BACKWARD and not bind(op)["scale_grad_by_freq"]:
            lookups.append(op)
        else:
            return ()
    return tuple(reversed(lookups))


def _keeps_terms(op: Op) -> bool:
    """True for the sum of two tensors, and for a change of dtype alone."""
    if op.target == CAST:
        return [key for key, _ in op.kwargs] == ["dtype"]
    return op.target == "aten.add.Tensor" and len(op.inputs) == 2 and not op.kwargs


def choose_row_updates(
    graph: LogicalGraph, variable: Variable, lookups: Sequence[Op], strategy: Strategy
) -> tuple[bool, str]:
    """Return (whether the table is updated by rows, a note for the plan).

    lookups: as of `lookups_of`.  Raises RecipeError for optim.sparse=lazy with an optimizer that
    mixes rows.
    """
    if not lookups:
        return False, ""
    optimizer, update = strategy.optimizer, strategy.optimizer.update_of(variable.name)
    table, rows = _rows_of_a_step(graph, variable, lookups, strategy)
    lazy = optimizer.sparse == "lazy"
    if optimizer.sparse == "off" or (rows >= table and not lazy):
        return False, ""
    if lazy:
        _check_lazy(update, variable)
        return True, (
            f"{variable.name}: only rows that a step looks up, at most {rows} of {table}, are "
            f"updated (optim.sparse=lazy); {update.name} on the whole table may differ"
        )
    why = "a moving average changes with every step" if optimizer.ema else _why_all_change(update)
    if why:
        note = (
            f"{variable.name}: all {table} rows are updated every step, though at most {rows} are "
            f"looked up: {why}; optim.sparse=lazy leaves the others alone"
        )
        return False, note if table >= _MIN_NOTED_RATIO * rows else ""
    return True, (
        f"{variable.name}: at most {rows} of {table} rows are updated a step, those looked up; the "
        "same as the dense update"
    )


def is_made_of_rows(
    graph: LogicalGraph, variable: Variable, lookups: Sequence[Op], strategy: Strategy
) -> bool:
    """Return whether the dense gradient of a table is made once a step, of the rows of its one
    look-up.

    lookups: as of `lookups_of`.  Rows are split by samples and not as the table is.  So there must
    be fewer rows than a rank may hold of the table.
    """
    if len(lookups) != 1:
        return False
    table, rows = _rows_of_a_step(graph, variable, lookups, strategy)
    parts = math.prod(
        strategy.parts(variable.stage, axis)
        for axis, name in enumerate(strategy.axes)
        if name not in BATCH_AXES
    )
    return rows < table // parts


def _rows_of_a_step(
    graph: LogicalGraph, variable: Variable, lookups: Sequence[Op], strategy: Strategy
) -> tuple[int, int]:
    """Return the rows of the table, and the most rows that a step looks up."""
    ids = sum(math.prod(graph.tensors[op.inputs[1]].shape) for op in lookups)
    return graph.tensors[variable.tensor].shape[0], ids * strategy.micro_batches


def _why_all_change(update: Update) -> str:
    """Return why rows without a gradient change; "" if they do not."""
    if update.function is not None:
        if not is_elementwise(update.function, update.numbers):
            return f"{update.name} mixes rows"
        if ignores_zero_gradient(update.function, update.numbers):
            return ""
    if update.name == "sgd" and update.function is None:
        given = dict(update.settings)
        moving = [key for key in ("momentum", "weight_decay") if given.get(key)]
        return f"{' and '.join(moving)} moves them" if moving else ""
    return f"{update.name} moves them"


def _check_lazy(update: Update, variable: Variable) -> None:
    if update.function is None:
        return
    if not is_elementwise(update.function, update.numbers):
        raise RecipeError(
            "optim.sparse",
            f"{update.name} mixes the rows of {variable.name}, so they cannot be updated "
            "separately.",
            "Write exact or off, or use another optimizer.",
        )


def collect_rows(
    builder: GraphBuilder, variable: Variable, lookups: Sequence[Op], micro_batches: int
) -> tuple[str, str]:
    """Replace the dense gradient's ops by ops that make (ids, sums of their rows), each id once.

    lookups: as of `lookups_of`.
    """
    table = builder.tensors[variable.tensor]
    collected = [
        _collect(builder, op, f"{k}/{variable.tensor}", table.dtype, micro_batches)
        for k, op in enumerate(lookups)
    ]
    ids, grads = ([pair[k] for pair in collected] for k in (0, 1))
    builder.drop_dead([op.name for op in lookups])
    total = sum(int(builder.tensors[name].shape[0]) for name in ids)
    dtypes = builder.tensors[ids[0]].dtype, builder.tensors[grads[0]].dtype
    unique = builder.tensor(f"ids'/{variable.tensor}", LogicalTensor("", (total,), dtypes[0]))
    sums = builder.tensor(
        f"sums/{variable.tensor}", LogicalTensor("", (total, table.shape[1]), dtypes[1])
    )
    builder.op(
        f"coalesce/{variable.tensor}",
        COALESCE,
        (tuple(map(Ref, ids)), tuple(map(Ref, grads)), tuple(_padding(op) for op in lookups)),
        (),
        (unique, sums),
        at=OpPlace.of(variable),
    )
    return unique, sums


def densify_rows(builder: GraphBuilder, variable: Variable, lookup: Op, micro_batches: int) -> str:
    """Append ops that make the dense gradient of a table of the rows of all micro-batches; return
    it.

    lookup: its only one.
    """
    table = builder.tensors[variable.tensor]
    ids, rows = _collect(builder, lookup, f"/{variable.tensor}", table.dtype, micro_batches)
    builder.drop_dead([lookup.name])
    return builder.one(
        f"grad/{variable.tensor}",
        EMBEDDING_BACKWARD,
        (Ref(rows), Ref(ids), table.shape[0], _padding(lookup), False),
        like=table,
        at=OpPlace.of(variable),
    )


def _collect(
    builder: GraphBuilder, op: Op, suffix: str, dtype: torch.dtype, micro_batches: int
) -> tuple[str, str]:
    """Return (ids, rows) of one look-up, of all micro-batches of a step.

    Rows have the table's dtype, so that they are summed in it.
    """
    grad, index = (builder.tensors[name] for name in op.inputs)
    count = micro_batches * math.prod(index.shape)
    ids = builder.tensor(f"ids{suffix}", LogicalTensor("", (count,), index.dtype))
    rows = builder.tensor(f"rows{suffix}", LogicalTensor("", (count, grad.shape[-1]), dtype))
    builder.op(
        f"collect{suffix}",
        COLLECT,
        (Ref(grad.name), Ref(index.name)),
        (("dtype", dtype),) if grad.dtype != dtype else (),
        (ids, rows),
        at=OpPlace(op.stage, op.module, BACKWARD),
    )
    return ids, rows


def _padding(op: Op) -> int:
    return int(bind(op)["padding_idx"])


def sparse_tables(graph: LogicalGraph) -> frozenset[str]:
    """Return the tensors of the tables that are updated by rows."""
    return frozenset(op.inputs[0] for op in graph.ops if op.target == UPDATE_ROWS)
