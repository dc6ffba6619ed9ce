"""The compiler's table of contents: which passes lead to each level from the level before.

    TRAINING      graph of a training step, captured -> boxed
    EVALUATION    graph of forward alone, laid out as training is
    PLAN_PASSES   boxed graph -> plan

A pass is a pure function of a graph, or of a plan, and the strategy.  `advance` and `lower` apply
them; what each level promises is engine/verify/.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from flowrun.engine.actors.plan import ACTORS, BUFFERS, PLAN_LEVELS, REGIONS, REGISTERS, Plan
from flowrun.engine.ir.graph import BOXED, LAID_OUT, LEVELS, SIGNED, STAGED, TRAINED, LogicalGraph
from flowrun.engine.lowering.add_boxings import add_boxings
from flowrun.engine.lowering.add_readers import add_readers
from flowrun.engine.lowering.add_regions import add_regions
from flowrun.engine.lowering.add_registers import add_registers
from flowrun.engine.lowering.lower import add_costs, add_reports, start_plan
from flowrun.engine.lowering.merge_chains import merge_chains
from flowrun.engine.lowering.reuse_buffers import reuse_buffers
from flowrun.engine.lowering.share_weights import share_weights
from flowrun.engine.passes.count_step import count_step
from flowrun.engine.passes.count_targets import count_targets
from flowrun.engine.passes.find_rows import find_rows
from flowrun.engine.passes.head_products import chunk_loss, pad_classes
from flowrun.engine.passes.hoist_weights import hoist_weights
from flowrun.engine.passes.insert_boxing import insert_boxing
from flowrun.engine.passes.keep_narrow import keep_narrow
from flowrun.engine.passes.layout.apply_pins import apply_pins, with_pins
from flowrun.engine.passes.layout.expert_room import give_experts_room
from flowrun.engine.passes.layout.infer_sbp import infer_update
from flowrun.engine.passes.layout.keep_lengths import keep_lengths
from flowrun.engine.passes.mirrored_view import mirror
from flowrun.engine.passes.narrow_gradients import narrow_gradients
from flowrun.engine.passes.recompute import recompute
from flowrun.engine.passes.search.search_sbp import assign_sbp
from flowrun.engine.passes.split_weight_grads import split_weight_grads
from flowrun.engine.passes.stages.follow_training import follow_homes
from flowrun.engine.passes.stages.split_stages import split_stages
from flowrun.engine.passes.sum_tied_gradients import sum_tied_gradients
from flowrun.engine.passes.update.choose_owners import choose_owners
from flowrun.engine.passes.update.place_states import place_states
from flowrun.engine.passes.update.shard_optimizer import shard_optimizer
from flowrun.engine.passes.update.update_ops import update_ops
from flowrun.engine.strategy import Strategy
from flowrun.engine.verify.graph_rules import verify
from flowrun.engine.verify.plan_rules import validate

Pass = Callable[[LogicalGraph, Strategy], LogicalGraph]
Passes = Mapping[str, tuple[Pass, ...]]  # level -> what leads to it from the level before
PlanPass = Callable[[Plan, Strategy], Plan]

TRAINING: Passes = {
    STAGED: (
        apply_pins,  # the recipe's pins, from here on homes of variables and fields, and ops
        chunk_loss,  # head and loss some rows at a time
        keep_lengths,  # tokens keep a dim of their own where an axis divides them
        give_experts_room,  # slots for tokens that travel to their experts
        find_rows,  # rows of ops without a table: the user's, or by experiment
        narrow_gradients,  # accumulated and reduced in the dtype that they were computed in
        mirror,  # in the mirrored view: each rank its own batch
        split_stages,  # which group of ranks runs each op
        keep_narrow,  # weights that are kept in bf16, widened where they are read
    ),
    TRAINED: (
        sum_tied_gradients,  # a weight that several stages read: its gradient in parts
        update_ops,  # accumulation, clipping and the optimizer as ops
        choose_owners,  # which rank updates a matrix that is needed whole
        find_rows,  # rows of what a user's own optimizer does
        count_step,  # what losses are divided by, over the micro-batches of the step
        split_weight_grads,  # weight gradients may run late
        pad_classes,  # products around a cross entropy see aligned rows
    ),
    LAID_OUT: (assign_sbp,),  # a signature for each op of forward and backward
    SIGNED: (
        recompute,  # activation checkpointing: backward computes again what it would have stored
        shard_optimizer,  # ZeRO: new homes for weights and states
        infer_update,  # a signature for each op of the update
        follow_homes,  # variables lie where another update of the same step keeps them
        count_targets,  # targets of a split batch are counted early, where they are read
        hoist_weights,  # what is made of weights alone, once a step; casts before or after boxings
    ),
    BOXED: (
        insert_boxing,  # communication where layouts meet
        place_states,  # states of the optimizer in the host's memory
    ),
}
# forward alone, laid out as training is
EVALUATION: Passes = {
    STAGED: (
        *(with_pins, chunk_loss, keep_lengths, give_experts_room, find_rows),
        *(mirror, split_stages, keep_narrow),
    ),
    TRAINED: (update_ops, count_step),
    LAID_OUT: (assign_sbp,),
    SIGNED: (infer_update, follow_homes, hoist_weights),
    BOXED: (insert_boxing,),
}
PLAN_PASSES: Mapping[str, tuple[PlanPass, ...]] = {
    REGIONS: (
        add_regions,  # ops that run with no communication between them: one program
        merge_chains,  # regions that follow one another with no choice between them become one
    ),
    ACTORS: (
        add_readers,  # fields of the batch, and the steps in which samples are made
        add_boxings,  # collectives and messages, in buckets
        add_reports,  # scalars that a person sees
        share_weights,  # gathers of weights that move no byte: ranks of a host have them once
        add_costs,  # seconds and bytes of one act
    ),
    REGISTERS: (add_registers,),  # buffers between actors, their slots, and what waits for what
    BUFFERS: (reuse_buffers,),  # results are written over what nobody reads any more
}
PASSES = tuple(rewrite for passes in TRAINING.values() for rewrite in passes)
PLANNING = "flowrun.engine.planning"  # the logger of passes
always_verify = False  # tests set it: every graph is verified, whatever its strategy says


def log_pass(name: str) -> None:
    """Log that a pass begins: a person may wait for the plan."""
    logging.getLogger(PLANNING).info("planning: %s", name.replace("_", " "))


def advance(
    graph: LogicalGraph, strategy: Strategy, level: str, passes: Passes = TRAINING
) -> LogicalGraph:
    """Bring a graph up to a level.  passes: of training, or of evaluation.

    Strategies that differ in nothing but zero.stage, numbers of in_flight or, without a search,
    recompute have the same graph at level laid_out.  Raises RecipeError or SbpError where a recipe
    asks for what cannot be; PlanError where the graph breaks a promise of its level, if
    strategy.check asks.
    """
    for reached in LEVELS[LEVELS.index(graph.level) + 1 : LEVELS.index(level) + 1]:
        for rewrite in passes[reached]:
            log_pass(rewrite.__name__)
            graph = rewrite(graph, strategy)
            if rewrite is passes[reached][-1]:
                graph = replace(graph, level=reached)
            if strategy.check or always_verify:
                verify(graph, strategy, rewrite.__name__)
    return graph


def lower(graph: LogicalGraph, strategy: Strategy, level: str = BUFFERS) -> Plan:
    """Bring a boxed graph to a plan of a level, as the strategy asks.  The rehearsal finds the
    order.

    Raises RecipeError for an unknown schedule; PlanError as `advance` does.
    """
    plan, complete = start_plan(graph, strategy), ""
    for reached in PLAN_LEVELS[: PLAN_LEVELS.index(level) + 1]:
        for rewrite in PLAN_PASSES[reached]:
            log_pass(rewrite.__name__)
            plan = rewrite(plan, strategy)
            complete = reached if rewrite is PLAN_PASSES[reached][-1] else complete
            if complete and (strategy.check or always_verify):
                validate(plan, complete, rewrite.__name__)
    return plan
