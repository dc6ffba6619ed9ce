from typing import Any

import pytest
from torch import Tensor

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.passes.stages.split_stages import split_stages
from flowrun.engine.passes.update.update_ops import update_ops
from flowrun.engine.strategy import Optimizer, ParameterGroup
from support.plans.graph_text import assert_ops, one_rank_stages, rewritten

TWO_STAGES = (("a", "act"), ("b",))
THROUGH = (split_stages, update_ops)


def updated(stages: int = 1, **keys: Any) -> LogicalGraph:
    """The two layers, on one stage or two, with their updates."""
    modules = {"stage_modules": TWO_STAGES} if stages == 2 else {}
    return rewritten(THROUGH, one_rank_stages(stages, **modules, **keys))


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


def test_sgd_without_momentum_has_no_state() -> None:
    graph = updated(optimizer=Optimizer("sgd", (("lr", 0.1),)))
    assert [v.kind for v in graph.variables] == ["parameter", "parameter"]


def shrink(param: Tensor, grad: Tensor, seen: Tensor, best: Tensor = 7.0, *, lr: Tensor) -> Any:  # type: ignore[assignment]
    """An update function: its second state starts at 7."""
    return param - lr * grad, seen + grad, best


def test_states_of_a_function_start_at_its_defaults() -> None:
    graph = updated(optimizer=Optimizer("shrink", (("lr", 0.1),), function=shrink))
    starts = {v.name: v.start for v in graph.variables if v.of == "a.weight"}
    assert starts == {"seen/a.weight": 0.0, "best/a.weight": 7.0}


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


def test_rates_that_six_digits_show_alike_are_two_numbers() -> None:
    rates = (0.1, 0.12345671, 0.12345674)
    names = [Optimizer("sgd", (("lr", 0.5),)).rate_field(lr) for lr in rates]
    assert names == ["@lr=0.1", "@lr=0.12345671", "@lr=0.12345674"]
