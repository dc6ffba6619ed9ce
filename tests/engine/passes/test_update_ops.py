"""staged -> trained: text in, text out."""

from __future__ import annotations

from flowrun.engine.graph import BACKWARD, UPDATE, LogicalGraph
from flowrun.engine.passes.split_stages import split_stages
from flowrun.engine.passes.update_ops import update_ops
from flowrun.engine.strategy import Optimizer
from support.graph_text import assert_ops, graph_of, one_rank_stages, rewritten, two_layers

TWO_STAGES = (("a", "act"), ("b",))
THROUGH = (split_stages, update_ops)


def in_phase(graph: LogicalGraph, phase: str) -> list[str]:
    """Names of ops."""
    return [op.name for op in graph.ops if op.phase == phase]


def test_gradients_are_summed_behind_their_makers_and_update_their_weights() -> None:
    graph = rewritten(THROUGH, one_rank_stages(1))
    assert in_phase(graph, BACKWARD) == [
        *("tangent", "dy", "dyt", "db", "grad/b.weight"),
        *("dr", "dh", "dht", "da", "grad/a.weight"),
    ]
    assert_ops(
        [graph.producer[name] for name in ("grad/a.weight", "a.weight'", "b.weight'")],
        """
        %grad/a.weight = flow.accumulate(%da)  # backward a stage 0
        %a.weight', %momentum_buffer/a.weight' = flow.sgd(%a.weight, %grad/a.weight, None, """
        """%momentum_buffer/a.weight, lr=0.1)  # update a stage 0
        %b.weight', %momentum_buffer/b.weight' = flow.sgd(%b.weight, %grad/b.weight, None, """
        """%momentum_buffer/b.weight, lr=0.1)  # update b stage 0
        """,
    )


def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches() -> None:
    graph = rewritten(THROUGH, one_rank_stages(1, micro_batches=4))
    assert graph.results == (("loss", "loss/mean"),)
    assert_ops(
        [graph.producer[name] for name in ("loss/sum", "loss/mean", "tangent")],
        """
        %loss/sum = flow.accumulate(%loss)  # forward loss stage 0
        %loss/mean = aten.mul.Tensor(%loss/sum, 0.25)  # update - stage 0
        %tangent = aten.full.default([], 0.25, dtype=torch.float32)  # backward loss stage 0
        """,
    )


def test_states_become_variables_that_belong_to_their_weight() -> None:
    graph = rewritten(THROUGH, one_rank_stages(2, stage_modules=TWO_STAGES))
    states = [(v.name, v.of, v.new, v.stage) for v in graph.variables if v.kind == "state"]
    assert states == [
        ("momentum_buffer/a.weight", "a.weight", "momentum_buffer/a.weight'", 0),
        ("momentum_buffer/b.weight", "b.weight", "momentum_buffer/b.weight'", 1),
    ]
    weights = [(v.name, v.new) for v in graph.variables if v.kind == "parameter"]
    assert weights == [("a.weight", "a.weight'"), ("b.weight", "b.weight'")]


def test_adamw_has_two_states_and_the_number_of_the_step_at_each_stage() -> None:
    adamw = Optimizer("adamw", (("lr", 0.1),))
    strategy = one_rank_stages(2, stage_modules=TWO_STAGES, optimizer=adamw)
    graph = rewritten(THROUGH, strategy)
    assert [(f.field, f.tensor, f.stage) for f in graph.feeds] == [
        ("x", "x@0", 0),
        ("@step", "@step@0", 0),
        ("@step", "@step@1", 1),
    ]
    assert_ops(
        [graph.producer["b.weight'"]],
        """%b.weight', %exp_avg/b.weight', %exp_avg_sq/b.weight' = flow.adamw(%b.weight, """
        """%grad/b.weight, None, %exp_avg/b.weight, %exp_avg_sq/b.weight, %@step@1, lr=0.1)"""
        """  # update b stage 1""",
    )


def test_clipping_sums_squares_within_each_stage_then_over_the_stages() -> None:
    clipped = Optimizer("sgd", (("lr", 0.1),), clip_norm=0.5)
    strategy = one_rank_stages(2, stage_modules=TWO_STAGES, optimizer=clipped)
    graph = rewritten(THROUGH, strategy)
    assert_ops(
        [op for op in graph.ops if op.phase == UPDATE][:6],
        """
        %sumsq/a.weight = flow.sumsq(%grad/a.weight)  # update a stage 0
        %sumsq@0 = flow.add_n(%sumsq/a.weight)  # update - stage 0
        %sumsq/b.weight = flow.sumsq(%grad/b.weight)  # update b stage 1
        %sumsq@1 = flow.add_n(%sumsq/b.weight)  # update - stage 1
        %sumsq = flow.add_n(%sumsq@0, %sumsq@1)  # update - stage 0
        %clip_scale = flow.clip_scale(%sumsq, 0.5)  # update - stage 0
        """,
    )
    assert all("clip_scale" in graph.producer[f"{name}.weight'"].inputs for name in "ab")


def test_a_parameter_without_a_gradient_is_not_updated() -> None:
    frozen = "\n".join(
        line for line in str(two_layers()).splitlines()[1:] if "grad/a.weight" not in line
    )
    graph = update_ops(graph_of(frozen), one_rank_stages(1))
    assert {v.name: v.new for v in graph.variables if v.kind == "parameter"} == {
        "a.weight": None,
        "b.weight": "b.weight'",
    }
