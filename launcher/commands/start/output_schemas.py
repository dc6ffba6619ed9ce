"""flowrun schema --of COMMAND: the JSON Schema of what its `--format json` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping

from hydra.utils import get_class

from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.terminal.as_json import describe_fields

# command -> the type of what it prints, in launcher/, which is imported when it is asked for
OUTPUTS: Mapping[str, str] = {
    "bench": "bench.results.BenchResult",
    "check": "commands.start.check_recipes.CheckedRecipes",
    "eval": "commands.evaluate.Evaluation",
    "recipes": "commands.start.list_recipes.RecipeList",
    "plan": "page.page_data.Page",
    "report": "page.page_data.Page",
    "runs": "commands.run_folders.run_summary.RunList",
    "sample": "text.prompts.WrittenText",
    "status": "commands.run_folders.run_summary.RunSummary",
    "verify": "commands.verify.LayoutComparison",
}


def type_of(command: str) -> type:
    """Return the frozen type that a command prints.  Raises RecipeError for one that has none."""
    if command not in OUTPUTS:
        raise CommandLineError(
            f"--of {command}", "this command prints no JSON.", f"Write one of {', '.join(OUTPUTS)}."
        )
    return get_class(f"flowrun.launcher.{OUTPUTS[command]}")


def schema_of(command: str) -> str:
    """Return the schema as text.  Raises RecipeError."""
    return json.dumps(describe_fields(type_of(command)), indent=1)
