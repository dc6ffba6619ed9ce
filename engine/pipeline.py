"""PASSES: the compiler's table of contents, in order.  Each is a pure function (graph, strategy) ->
graph.
"""

from __future__ import annotations

from collections.abc import Callable

from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.passes.count_step import count_step
from flowrun.engine.passes.count_targets import count_targets
from flowrun.engine.passes.find_rows import find_rows
from flowrun.engine.passes.hoist_weights import hoist_weights
from flowrun.engine.passes.insert_boxing import insert_boxing
from flowrun.engine.passes.layout.infer_sbp import infer_update
from flowrun.engine.passes.layout.pin_activations import pin_activations
from flowrun.engine.passes.mirrored_view import mirror
from flowrun.engine.passes.narrow_gradients import narrow_gradients
from flowrun.engine.passes.recompute import recompute
from flowrun.engine.passes.search.search_sbp import assign_sbp
from flowrun.engine.passes.split_weight_grads import split_weight_grads
from flowrun.engine.passes.stages.split_stages import split_stages
from flowrun.engine.passes.sum_tied_gradients import sum_tied_gradients
from flowrun.engine.passes.update.shard_optimizer import shard_optimizer
from flowrun.engine.passes.update.update_ops import update_ops
from flowrun.engine.strategy import Strategy

Pass = Callable[[LogicalGraph, Strategy], LogicalGraph]

PASSES: tuple[Pass, ...] = (
    find_rows,  # rows of ops without a table: the user's, or by experiment
    narrow_gradients,  # accumulated and reduced in the dtype that they were computed in
    mirror,  # in the mirrored view: each rank its own batch
    split_stages,  # which group of ranks runs each op
    sum_tied_gradients,  # a weight that several stages read: its gradient in parts
    update_ops,  # accumulation, clipping and the optimizer as ops
    find_rows,  # of what an optimizer of one's own does
    count_step,  # what losses are divided by, over the micro-batches of the step
    split_weight_grads,  # weight gradients may run late
    pin_activations,  # the recipe's in and out pins
    assign_sbp,  # a signature for each op of forward and backward
    recompute,  # activation checkpointing: backward computes again what it would have stored
    shard_optimizer,  # ZeRO: new homes for weights and states
    infer_update,  # a signature for each op of the update
    count_targets,  # of a split batch: early, where they are read
    hoist_weights,  # what is made of weights alone, once a step; casts before and behind boxings
    insert_boxing,  # communication where layouts meet
)


STAGING = PASSES[: PASSES.index(split_stages) + 1]  # no schedule matters so far
LAYOUT = PASSES[: PASSES.index(assign_sbp) + 1]  # neither ZeRO nor recomputation matters so far


def stage(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """captured -> staged: the same for strategies that differ as in lay_out, or by in_flight."""
    for rewrite in STAGING:
        graph = rewrite(graph, strategy)
    return graph


def lay_out(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """captured, or staged -> laid out: a stage for every op, a signature for those of forward and
    backward.

    The same for strategies that differ by zero.stage, recompute or the numbers of in_flight alone.
    """
    if graph.level == "captured":
        graph = stage(graph, strategy)
    for rewrite in LAYOUT[len(STAGING) :]:
        graph = rewrite(graph, strategy)
    return graph


def finish(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """laid out -> boxed."""
    for rewrite in PASSES[len(LAYOUT) :]:
        graph = rewrite(graph, strategy)
    return graph
