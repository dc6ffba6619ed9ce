"""Rows that a recipe gives for an op of one's own."""

from __future__ import annotations

import pytest

from flowrun.engine.errors import RecipeError, SbpError
from flowrun.engine.graph import Op, Ref
from flowrun.engine.ops import registry
from flowrun.engine.ops.signature import OpView, rows
from flowrun.launcher.signatures import tables_of

HERE = "flowrun.engine.ops.pointwise.NONLINEAR"


def test_rows_of_a_recipe_are_those_of_the_op() -> None:
    ((name, table),) = tables_of({"my::op": {"_target_": HERE}})
    op = Op("y", "aten.digamma.default", (Ref("x"),), (), ("y",), table=table)
    assert name == "my::op"
    found = registry.signatures(op, [(4, 6)], [(4, 6)], 2)
    assert found == rows("B -> B", "S0 -> S0", "S1 -> S1")


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({}, "signatures.my::op._target_"),
        ({"_target_": "no_such_module.rows"}, "signatures.my::op._target_"),
        ({"_target_": HERE, "locl": "a.b"}, "signatures.my::op.locl"),
    ],
    ids=["nothing", "missing", "misspelt"],
)
def test_a_wrong_key_is_told_at_its_place(given: dict[str, str], where: str) -> None:
    with pytest.raises(RecipeError) as told:
        tables_of({"my::op": given})
    assert told.value.where == where


def test_a_row_of_another_op_is_refused() -> None:
    ((_, table),) = tables_of({"my::op": {"_target_": HERE}})
    op = Op("y", "my.op.default", (Ref("a"), Ref("b")), (), ("y",))
    table = type(table)(lambda view: ("S0 -> S0",), name="mine")  # type: ignore[call-arg]
    with pytest.raises(SbpError, match="reads 2 tensors"):
        table.rows(OpView(op, ((4,), (4,)), ((4,),), 2))
