from typing import Any

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.bench.foreseen.published import Foreseen, parse
from flowrun.launcher.bench.load_suite import load_suite
from flowrun.launcher.recipe.compose import load
from support.checks.thorough import few


def shipped(*arguments: str) -> Foreseen:
    suite, _ = load_suite(["suite=paper_foreseen", *arguments])
    assert isinstance(suite, Foreseen)
    return suite


OFTEN = ("megatron", "zero")  # every run composes their rows


@pytest.mark.parametrize("table", few([table.name for table in shipped().tables], OFTEN))
def test_every_row_composes_and_its_ranks_are_those_of_a_cluster(table: str) -> None:
    (found,) = shipped(f"suite.rows=[{table}]").tables
    for row in found.rows:
        recipe = load(list(row.overrides))
        assert recipe.train.batch_size % recipe.train.micro_batches == 0, row.name
        assert recipe.hardware.name != "cpu", row.name
        assert recipe.num_ranks <= 8 or recipe.num_ranks % 8 == 0, row.name
        assert row.figures and all(value > 0 for _, value in row.figures), row.name


def test_a_pattern_chooses_rows_and_other_arguments_change_their_recipes() -> None:
    (table,) = shipped("suite.rows=['zero/8 *']", "precision.dtype=bf16").tables
    expected = ["zero/8 off", "zero/8 on", "zero/8 of 1 off", "zero/8 of 1 on"]
    assert [row.name for row in table.rows] == expected
    assert load(list(table.rows[0].overrides)).precision.dtype == "bf16"


def tree(**changes: Any) -> dict[str, Any]:
    table = {
        "title": "T",
        "source": "S",
        "recipe": "mlp_hybrid",
        "columns": ["step_ms", "memory_mib", "train.batch_size"],
        "rows": {"small": [1.5, None, 8]},
    }
    bounds = {"rank_at_least": 0.9, "error_at_most": 0.15}
    return {"name": "mine", "note": "", "tables": {"t": table}, **bounds, **changes}


def test_a_figure_that_was_not_published_is_left_out() -> None:
    (row,) = parse(tree()).tables[0].rows
    assert row.figures == (("step_ms", 1.5),)
    assert row.overrides == ("recipe=mlp_hybrid", "train.batch_size=8")


def test_a_row_of_another_length_is_named() -> None:
    given = tree()
    given["tables"]["t"]["rows"]["short"] = [1.5, 8]
    with pytest.raises(RecipeError, match="2 values stand under 3 columns") as caught:
        parse(given)
    assert caught.value.where == "suite.tables.t.rows.short"


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        pytest.param({"rows": ["zero"]}, "suite.rows", id="no row has the name"),
        pytest.param({"rounds": 3}, "suite.rounds", id="no key of this kind of suite"),
    ],
)
def test_a_mistake_is_named(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(tree(**changes))
    assert caught.value.where == where
