"""`flowrun plan --level`: every level has a text; other names are refused with the list."""

import pytest

from flowrun.engine.actors.plan import PLAN_LEVELS
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import LEVELS
from flowrun.launcher.report.show_level import EXPLAINED, check_level, level_report
from support.plans.small_recipes import RECIPES, small_job

RECIPE = next(file for file in RECIPES if file.stem == "mlp_pipeline")


def test_every_level_is_explained_and_printed() -> None:
    assert tuple(EXPLAINED) == ("recipe", *LEVELS, *PLAN_LEVELS)
    texts = {level: level_report(small_job(RECIPE), level) for level in EXPLAINED}
    for level, text in texts.items():
        assert text.startswith(f"{level}: {EXPLAINED[level]}\n")
    assert "\npasses: add_regions, merge_chains\n" in texts["regions"]
    assert "stage 1" in texts["staged"] and "stage 1" not in texts["captured"]
    assert "flow.transfer" in texts["boxed"] and "flow.transfer" not in texts["signed"]
    assert "bytes" in texts["registers"]


def test_another_level_is_refused_with_the_list() -> None:
    with pytest.raises(RecipeError, match=r"(?s)no level 'boxd'.*Choose recipe, .* or order\."):
        check_level("boxd")
