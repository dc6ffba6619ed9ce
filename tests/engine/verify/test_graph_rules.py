from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flowrun.engine import pipeline
from flowrun.engine.boxing.boxing import BoxingStep
from flowrun.engine.errors import PlanError
from flowrun.engine.ir.graph import (
    BOXED,
    CAPTURED,
    FORWARD,
    LAID_OUT,
    LEVELS,
    SIGNED,
    STAGED,
    TRAINED,
    UPDATE,
    LogicalGraph,
    Op,
    Ref,
)
from flowrun.engine.ir.sbp import B, P, S
from flowrun.engine.pipeline import TRAINING, advance
from flowrun.engine.verify.graph_rules import verify
from support.plans.graph_text import one_axis, two_layers

STRATEGY = one_axis("data", micro_batches=2)


def changed(graph: LogicalGraph, op_name: str, **fields: Any) -> LogicalGraph:
    """The graph with one op replaced by another."""
    assert any(op.name == op_name for op in graph.ops)
    ops = (replace(op, **fields) if op.name == op_name else op for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def moved_last(graph: LogicalGraph, name: str) -> LogicalGraph:
    """The graph with one op after all others."""
    last = [op for op in graph.ops if op.name == name]
    return replace(graph, ops=(*(op for op in graph.ops if op.name != name), *last))


def without_homes(graph: LogicalGraph) -> LogicalGraph:
    return replace(graph, variables=tuple(replace(v, nd_sbp=()) for v in graph.variables))


def of_unsummed(graph: LogicalGraph) -> LogicalGraph:
    """An update that reads the gradient of one micro-batch."""
    reader = next(op for op in graph.ops if "grad/a.weight" in op.inputs)
    args = tuple(Ref("da") if arg == Ref("grad/a.weight") else arg for arg in reader.args)
    return changed(graph, reader.name, args=args)


def first_box(graph: LogicalGraph) -> Op:
    return next(op for op in graph.ops if op.target == "flow.box")


def with_another_step(graph: LogicalGraph) -> LogicalGraph:
    """A boxing that gathers where it should reduce."""
    box = first_box(graph)
    return changed(graph, box.name, args=(box.args[0], BoxingStep(0, S(0), B)))


def unboxed_result(graph: LogicalGraph) -> LogicalGraph:
    """A loss of which each rank reports its own part."""
    return replace(graph, results=(("loss", "loss"),))


Plant = Callable[[LogicalGraph], LogicalGraph]
FAULTS: tuple[tuple[str, Plant, str, str], ...] = (
    (CAPTURED, lambda g: moved_last(g, "at"), "op h ", "it reads %at, which no op before makes"),
    (CAPTURED, lambda g: changed(g, "r", name="h"), "op h", "two ops have this name"),
    (CAPTURED, lambda g: changed(g, "h", phase=UPDATE), "op h ", "its phase is update"),
    (CAPTURED, lambda g: replace(g, results=(("loss", "nil"),)), "result loss", "no op makes %nil"),
    (CAPTURED, lambda g: changed(g, "dyt", phase=FORWARD), "op dyt ", "which phase backward makes"),
    (STAGED, lambda g: changed(g, "y", stage=1), "op y ", "it is of stage 1"),
    (TRAINED, of_unsummed, "op ", "it runs once a step and reads %da"),
    (LAID_OUT, lambda g: changed(g, "r", in_sbp=((S(3),),)), "op r ", "is S(3) on axes (data)"),
    (LAID_OUT, lambda g: changed(g, "r", in_sbp=()), "op r ", "it has 0 + 1 nd-SBPs for 1 + 1"),
    (
        LAID_OUT,
        lambda g: changed(g, "r", in_sbp=((P,),), out_sbp=((P,),)),
        "op r (aten.relu.default, module act, forward, stage 0)",
        "its row on axis data is P -> P",
    ),
    (SIGNED, without_homes, "source a.weight", "is () on axes (data)"),
    (
        BOXED,
        lambda g: changed(g, "r", in_sbp=((B,),), out_sbp=((B,),)),
        "op r ",
        "it reads %h as B on stage 0; that is S(0) on stage 0",
    ),
    (BOXED, with_another_step, "op dyt:S(1)", "S(0) -> B, does not change B -> S(1)"),
    (BOXED, unboxed_result, "result loss", "%loss is P on stage 0"),
)


@pytest.mark.parametrize(("level", "plant", "where", "found"), FAULTS)
def test_a_planted_fault_is_refused_with_its_op_level_and_pass(
    level: str, plant: Plant, where: str, found: str
) -> None:
    graph = advance(two_layers(), STRATEGY, level)
    with pytest.raises(PlanError) as refused:
        verify(plant(graph), STRATEGY, "a_pass")
    assert refused.value.where.startswith(where)
    assert found in refused.value.problem
    assert f"At level {level}, made by a_pass. Expected: " in refused.value.problem


def test_every_level_is_verified_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(pipeline, "verify", lambda g, s, made_by: seen.append((g.level, made_by)))
    advance(two_layers(), STRATEGY, BOXED)
    assert [made_by for _, made_by in seen] == [
        rewrite.__name__ for passes in TRAINING.values() for rewrite in passes
    ]
    assert list(dict.fromkeys(level for level, _ in seen)) == list(LEVELS)


def test_a_pass_that_breaks_a_promise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "always_verify", False)

    def forget(graph: LogicalGraph, _: object) -> LogicalGraph:
        return changed(graph, "r", in_sbp=())

    passes = {**TRAINING, LAID_OUT: (*TRAINING[LAID_OUT], forget)}
    with pytest.raises(PlanError, match=r"(?s)op r .*At level laid_out, made by forget"):
        advance(two_layers(), replace(STRATEGY, check=True), LAID_OUT, passes)
    assert advance(two_layers(), STRATEGY, LAID_OUT, passes)
