"""Rows that a recipe gives for an op of one's own."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowrun.engine.cost.op_cost import SizedOp
from flowrun.engine.errors import RecipeError, SbpError
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.ir.graph import LogicalGraph, Op, Ref
from flowrun.engine.ir.op_info import OpCost, OpInfo
from flowrun.engine.ir.placement import Placement, Shape
from flowrun.engine.ir.sbp import S
from flowrun.engine.ir.signature import LocalCall, LocalView, OpView, rows
from flowrun.engine.ir.table import GivenTable
from flowrun.engine.ops import registry
from flowrun.engine.strategy import Strategy
from flowrun.launcher.job.plan_cache import HIDES, inputs
from flowrun.launcher.model.signatures import GROUP, tables_of

OP = Op("y", "my.op.default", (Ref("x"),), (), outputs=("y",))
HERE = "flowrun.engine.ops.math.pointwise.NONLINEAR"


def test_rows_of_a_recipe_are_those_of_the_op() -> None:
    ((name, table),) = tables_of({"my::op": {"_target_": HERE}})
    op = Op("y", "aten.digamma.default", (Ref("x"),), (), outputs=("y",), table=table)
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
    op = Op("y", "my.op.default", (Ref("a"), Ref("b")), (), outputs=("y",))
    table = type(table)(rule=lambda view: ("S0 -> S0",), name="mine")  # type: ignore[call-arg]
    with pytest.raises(SbpError, match="reads 2 tensors"):
        table.rows(OpView(op, ((4,), (4,)), ((4,),), 2))


# ---- entry points of installed packages ----------------------------------------------------------


def negated(view: OpView) -> list[str]:
    return ["S0 -> S0"]


TABLE = GivenTable(rule=negated, name="a package")
NO_RULE = 3


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Installs a package with an entry point for my::op, beside this module."""

    def install(attribute: str) -> None:
        folder = tmp_path / "brings_rows-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: brings-rows\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{GROUP}]\nmy::op = rows_here:{attribute}\n")
        monkeypatch.setitem(sys.modules, "rows_here", sys.modules[__name__])
        monkeypatch.syspath_prepend(tmp_path)

    return install


@pytest.mark.parametrize(
    ("attribute", "origin"),
    [
        ("negated", "given by entry point my::op = rows_here:negated"),
        ("TABLE", "given by a package"),
    ],
)
def test_an_installed_package_brings_rows(
    attribute: str, origin: str, package: Callable[[str], None]
) -> None:
    package(attribute)
    ((name, table),) = tables_of({})
    assert (name, table.origin) == ("my::op", origin)
    assert table.rows(OpView(OP, ((4, 6),), ((4, 6),), 2)) == rows("S0 -> S0")


def test_a_recipe_goes_before_a_package(package: Callable[[str], None]) -> None:
    package("negated")
    ((_, table),) = tables_of({"my::op": {"_target_": HERE}})
    assert table.origin == f"given by signatures.my::op ({HERE})"


@pytest.mark.parametrize(
    ("attribute", "said"),
    [("missing", "of brings-rows cannot be loaded: AttributeError"), ("NO_RULE", "is a int")],
)
def test_a_package_whose_rows_cannot_be_used_is_named(
    attribute: str, said: str, package: Callable[[str], None]
) -> None:
    package(attribute)
    with pytest.raises(RecipeError, match=said) as told:
        tables_of({})
    assert told.value.where == "signatures.my::op"


# ---- what stands beside the rows -----------------------------------------------------------------


def halved(view: LocalView) -> LocalCall:
    """A local program: the op over what this rank holds."""
    return LocalCall(torch.div, (Ref("x"), view.in_slices[0][0][1]))


def measure(in_shapes: Sequence[Shape], out_shapes: Sequence[Shape | None]) -> float:
    return float(sum(map(len, in_shapes)) + 0.5)


def test_local_program_and_cost_are_those_that_the_recipe_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "rules_here", sys.modules[__name__])
    said = {"_target_": "negated", "local": "halved", "flops": "measure", "seconds": "measure"}
    given = {key: f"rules_here.{name}" for key, name in said.items()}
    ((_, table),) = tables_of({"my::op": given})
    split = ((S(0),),)
    op = replace(OP, target="aten.digamma.default", table=table, in_sbp=split, out_sbp=split)
    pieces, shapes = (((2, 2), (0, 6)),), ((4, 6),)
    whole, own = (
        dict(in_shapes=shapes, out_shapes=shapes),
        dict(in_slices=pieces, out_slices=pieces),
    )
    call = registry.localize(LocalView(op=op, **whole, **own))
    assert call == LocalCall(torch.div, (Ref("x"), 2))
    sized = SizedOp(op, [(2, 6)], [(2, 6)], {})
    assert sized.flops == 2.5
    hardware = Hardware()
    assert sized.seconds(hardware) == 2.5 + hardware.op_s
    (bare,) = (t for _, t in tables_of({"my::op": {"_target_": "rules_here.negated"}}))
    assert bare.over(OpInfo()).cost == OpCost()


def test_a_plan_whose_op_has_rows_by_a_function_is_not_kept_and_the_others_are() -> None:
    """Code of a function may change behind its name."""
    table = tables_of({"my::op": {"_target_": HERE}})
    graph = LogicalGraph((), {})
    bare = Strategy((), (Placement((("data", 1),), (0,)),), signatures=table)
    assert not HIDES.search(repr(inputs(bare, graph)))
    given = replace(graph, ops=(replace(OP, table=table[0][1]),))
    assert HIDES.search(repr(inputs(bare, given)))
