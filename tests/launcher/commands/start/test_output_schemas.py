"""What commands print for programs is as their schemas say."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.bench.foreseen.score import ScoredFigure
from flowrun.launcher.bench.results import BenchResult, ResultLine
from flowrun.launcher.commands.evaluate import Evaluation
from flowrun.launcher.commands.run_folders.run_summary import RunList, RunSummary
from flowrun.launcher.commands.start.check_recipes import check_recipes
from flowrun.launcher.commands.start.list_recipes import list_recipes
from flowrun.launcher.commands.start.output_schemas import OUTPUTS, schema_of, type_of
from flowrun.launcher.commands.verify import Difference, LayoutComparison
from flowrun.launcher.job.job import Job
from flowrun.launcher.page.make_page import plan_page
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.terminal.as_json import to_json
from flowrun.launcher.text.prompts import WrittenText

RUN = RunSummary(
    folder=Path("runs/a"),
    name="gpt",
    asked=10,
    done=3,
    loss=math.nan,
    validation=None,
    status="running",
    time=1.5,
    age_s=2.0,
)
LINE = ResultLine(experiment="data", title="data 2", side="flowrun", mode="", setting="")
FIGURE = ScoredFigure(table="t", row="t/a", unit="s", published=1.0)
# command -> what it prints, with values of every kind that a field may have
SAMPLES: dict[str, Callable[[], object]] = {
    "bench": lambda: BenchResult(Path("bench"), (LINE,), (FIGURE,)),
    "check": lambda: check_recipes(["gpt_dp", "nowhere"]),
    "eval": lambda: Evaluation(3, 8, {"loss": 1.25}, ("a note",)),
    "recipes": list_recipes,
    **dict.fromkeys(
        ("plan", "report"),
        lambda: plan_page(Job(load(["recipe=mlp_hybrid", "hardware=cpu"]), values=False)),
    ),
    "runs": lambda: RunList(runs=(RUN,)),
    "sample": lambda: WrittenText("def ", "f():", "stop"),
    "status": lambda: RUN,
    "verify": lambda: LayoutComparison((Difference("data 2", 2, 1e-7, math.inf, 8, "same"),), "x"),
}


@pytest.mark.parametrize("command", OUTPUTS)
def test_what_is_printed_is_as_the_schema_says(command: str) -> None:
    found, schema = SAMPLES[command](), json.loads(schema_of(command))
    assert type(found) is type_of(command)
    printed = json.loads(to_json(found), parse_constant=pytest.fail)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(printed, schema)
    printed.popitem()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(printed, schema)


def test_a_number_that_is_not_finite_is_null() -> None:
    assert json.loads(to_json(RUN))["loss"] is None


def test_a_command_without_json_is_refused_by_name() -> None:
    with pytest.raises(RecipeError, match="prints no JSON"):
        schema_of("plan_nothing")
