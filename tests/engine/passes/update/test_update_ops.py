from typing import Any

import pytest
from torch import Tensor

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import BACKWARD, UPDATE, LogicalGraph
from flowrun.engine.passes.stages.split_stages import split_stages
from flowrun.engine.passes.update.update_ops import update_ops
from flowrun.engine.strategy import Optimizer, ParameterGroup
from support.plans.graph_text import assert_ops, graph_of, one_rank_stages, rewritten, two_layers

TWO_STAGES = (("a", "act"), ("b",))
THROUGH = (split_stages, update_ops)


def updated(stages: int = 1, **keys: Any) -> LogicalGraph:
    """The two layers, on one stage or two, with their updates."""
    modules = {"stage_modules": TWO_STAGES} if stages == 2 else {}
    return rewritten(THROUGH, one_rank_stages(stages, **modules, **keys))


def in_phase(graph: LogicalGraph, phase: str) -> list[str]:
    return [op.name for op in graph.ops if op.phase == phase]


def test_gradients_are_summed_after_their_makers_and_update_their_weights() -> None:
    graph = updated()
    assert in_phase(graph, BACKWARD) == [
        *("tangent", "dy", "dyt", "db", "grad/b.weight"),
        *("dr", "dh", "dht", "da", "grad/a.weight"),
    ]
    assert_ops(
        [graph.producer[name] for name in ("grad/a.weight", "a.weight'", "b.weight'")],
        """
        %grad/a.weight = flow.accumulate(%da)  # backward a stage 0
        %a.weight', %momentum_buffer/a.weight' = flow.sgd(%a.weight, %grad/a.weight, """
        """%momentum_buffer/a.weight, lr=%@lr@0, momentum=0.9)  # update a stage 0
        %b.weight', %momentum_buffer/b.weight' = flow.sgd(%b.weight, %grad/b.weight, """
        """%momentum_buffer/b.weight, lr=%@lr@0, momentum=0.9)  # update b stage 0
        """,
    )


def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches() -> None:
    graph = updated(micro_batches=4)
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
    graph = updated(2)
    states = [(v.name, v.of, v.new, v.stage) for v in graph.variables if v.kind == "state"]
    assert states == [
        ("momentum_buffer/a.weight", "a.weight", "momentum_buffer/a.weight'", 0),
        ("momentum_buffer/b.weight", "b.weight", "momentum_buffer/b.weight'", 1),
    ]
    weights = [(v.name, v.new) for v in graph.variables if v.kind == "parameter"]
    assert weights == [("a.weight", "a.weight'"), ("b.weight", "b.weight'")]


def test_adamw_has_two_states_and_rate_and_number_of_the_step_at_each_stage() -> None:
    adamw = Optimizer("adamw", (("lr", 0.1),))
    graph = updated(2, optimizer=adamw)
    assert [(f.field, f.tensor, f.stage) for f in graph.feeds] == [
        ("x", "x@0", 0),
        ("@lr", "@lr@0", 0),
        ("@step", "@step@0", 0),
        ("@lr", "@lr@1", 1),
        ("@step", "@step@1", 1),
    ]
    assert_ops(
        [graph.producer["b.weight'"]],
        """%b.weight', %exp_avg/b.weight', %exp_avg_sq/b.weight' = flow.adamw(%b.weight, """
        """%grad/b.weight, %exp_avg/b.weight, %exp_avg_sq/b.weight, lr=%@lr@1, step=%@step@1)"""
        """  # update b stage 1""",
    )


def test_clipping_sums_squares_within_each_stage_then_over_the_stages() -> None:
    clipped = Optimizer("sgd", (("lr", 0.1),), clip_norm=0.5)
    graph = updated(2, optimizer=clipped)
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
    result = {name: graph.producer[f"{name}.weight'"].inputs for name in "ab"}
    assert "clip_scale" in result["a"] and "clip_scale@1" in result["b"]
    assert graph.producer["clip_scale@1"].inputs == ("sumsq",)
    assert graph.results == (("loss", "loss/mean"), ("grad_norm", "grad_norm"))


def test_an_update_reads_on_its_own_stage_whether_the_norm_is_finite() -> None:
    graph = updated(2, skips_nonfinite=True)
    assert_ops(
        [graph.producer[name] for name in ("skip@0", "skip@1", "grad_norm", "b.weight'")],
        """
        %skip@0 = flow.not_finite(%sumsq)  # update - stage 0
        %skip@1 = flow.not_finite(%sumsq)  # update - stage 1
        %grad_norm = aten.sqrt.default(%sumsq)  # update - stage 1
        %b.weight', %momentum_buffer/b.weight' = flow.sgd(%b.weight, %grad/b.weight, """
        """%momentum_buffer/b.weight, lr=%@lr@1, skip=%skip@1, momentum=0.9)  # update b stage 1
        """,
    )


def test_where_the_run_ends_a_stage_waits_for_no_later_one() -> None:
    graph = updated(2, skips_nonfinite=True, skips_alike=False)
    assert_ops(
        [graph.producer[name] for name in ("skip@0", "sumsq<1", "skip@1", "grad_norm")],
        """
        %skip@0 = flow.not_finite(%sumsq@0)  # update - stage 0
        %sumsq<1 = flow.add_n(%sumsq@0, %sumsq@1)  # update - stage 1
        %skip@1 = flow.not_finite(%sumsq<1)  # update - stage 1
        %grad_norm = aten.sqrt.default(%sumsq<1)  # update - stage 1
        """,
    )


def test_a_norm_that_clips_is_waited_for_by_all_stages() -> None:
    clipped = Optimizer("sgd", (("lr", 0.1),), clip_norm=0.5)
    keys = {"stage_modules": TWO_STAGES, "optimizer": clipped, "skips_nonfinite": True}
    alike, apart = (
        rewritten(THROUGH, one_rank_stages(2, **keys, skips_alike=each)) for each in (True, False)
    )
    assert str(alike) == str(apart)


def test_without_a_norm_and_a_check_the_gradients_are_not_read_once_more() -> None:
    graph = updated()
    assert graph.results == (("loss", "loss/mean"),)
    assert not any(op.target == "flow.sumsq" for op in graph.ops)


def test_a_parameter_without_a_gradient_is_not_updated() -> None:
    frozen = "\n".join(
        line for line in str(two_layers()).splitlines()[1:] if "grad/a.weight" not in line
    )
    graph = update_ops(graph_of(frozen), one_rank_stages(1))
    expected = {"a.weight": None, "b.weight": "b.weight'"}
    assert {v.name: v.new for v in graph.variables if v.kind == "parameter"} == expected


def test_sgd_without_momentum_has_no_state() -> None:
    graph = updated(optimizer=Optimizer("sgd", (("lr", 0.1),)))
    assert [v.kind for v in graph.variables] == ["parameter", "parameter"]


def test_values_are_clipped_before_the_norm_is_taken() -> None:
    clipped = Optimizer("sgd", (("lr", 0.1),), clip_norm=0.5, clip_value=0.25)
    graph = updated(optimizer=clipped)
    assert_ops(
        [graph.producer[name] for name in ("clipped/b.weight", "sumsq/b.weight", "b.weight'")],
        """
        %clipped/b.weight = aten.clamp.default(%grad/b.weight, -0.25, 0.25)  # update b stage 0
        %sumsq/b.weight = flow.sumsq(%clipped/b.weight)  # update b stage 0
        %b.weight' = flow.sgd(%b.weight, %clipped/b.weight, lr=%@lr@0, coefficient=%clip_scale)"""
        """  # update b stage 0
        """,
    )


def shrink(param: Tensor, grad: Tensor, seen: Tensor, best: Tensor = 7.0, *, lr: Tensor) -> Any:  # type: ignore[assignment]
    """An update function: its second state starts at 7."""
    return param - lr * grad, seen + grad, best


def test_a_function_is_traced_to_ops_and_one_assignment() -> None:
    traced = Optimizer("shrink", (("lr", 0.1),), function=shrink)
    graph = updated(optimizer=traced)
    assert_ops(
        [op for op in graph.ops if op.phase == UPDATE and "a.weight" in op.name],
        """
        %update.mul/a.weight = aten.mul.Tensor(%@lr@0, %grad/a.weight)  # update a stage 0
        %update.sub/a.weight = aten.sub.Tensor(%a.weight, %update.mul/a.weight)  # update a stage 0
        %update.add/a.weight = aten.add.Tensor(%seen/a.weight, %grad/a.weight)  # update a stage 0
        %a.weight', %seen/a.weight', %best/a.weight' = flow.assign("""
        """[%a.weight, %seen/a.weight, %best/a.weight], """
        """[%update.sub/a.weight, %update.add/a.weight, %best/a.weight])  # update a stage 0
        """,
    )
    starts = {v.name: v.start for v in graph.variables if v.of == "a.weight"}
    assert starts == {"seen/a.weight": 0.0, "best/a.weight": 7.0}


def test_a_moving_average_starts_as_its_weight_and_follows_the_new_one() -> None:
    averaged = Optimizer("sgd", (("lr", 0.1),), ema=0.9)
    graph = updated(optimizer=averaged)
    state = next(v for v in graph.variables if v.name == "ema/a.weight")
    assert (state.kind, state.of, state.start) == ("state", "a.weight", None)
    assert_ops(
        [graph.producer["ema/a.weight'"]],
        "%ema/a.weight' = flow.ema(%ema/a.weight, %a.weight', decay=0.9)  # update a stage 0",
    )


def test_of_groups_that_match_the_later_wins_key_by_key() -> None:
    grouped = Optimizer(
        "sgd",
        (("lr", 0.1), ("momentum", 0.9), ("weight_decay", 0.5)),
        groups=(
            ParameterGroup("*", (("weight_decay", 0.25), ("lr", 0.3))),
            ParameterGroup("b.*", (("weight_decay", 0.0),)),
        ),
        rates=((0.3, (0.3, 0.2)),),
    )
    graph = updated(optimizer=grouped)
    kwargs = {name: dict(graph.producer[f"{name}.weight'"].kwargs) for name in "ab"}
    assert [kwargs[name]["weight_decay"] for name in "ab"] == [0.25, 0.0]
    assert [str(kwargs[name]["lr"]) for name in "ab"] == ["%@lr=0.3@0"] * 2
    assert next(f.values for f in graph.feeds if f.field == "@lr=0.3") == (0.3, 0.2)


def test_a_group_that_matches_no_parameter_is_a_located_error() -> None:
    grouped = Optimizer("sgd", (("lr", 0.1),), groups=(ParameterGroup("*.bias", ()),))
    with pytest.raises(RecipeError, match=r"no parameter matches '\*\.bias'") as error:
        updated(optimizer=grouped)
    assert error.value.where == "optim.groups.*.bias"
