"""flowrun schema --of COMMAND: the JSON Schema of what its `--format json` prints."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping

from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.terminal.as_json import describe_fields

_COMMANDS = "flowrun.launcher.commands"
# module and type of what a command prints; each is imported when it is asked for
OUTPUTS: Mapping[str, tuple[str, str]] = {
    "bench": ("flowrun.launcher.bench.results", "BenchResult"),
    "check": (f"{_COMMANDS}.start.check_recipes", "CheckedRecipes"),
    "eval": (f"{_COMMANDS}.evaluate", "Evaluation"),
    "recipes": (f"{_COMMANDS}.start.list_recipes", "RecipeList"),
    "plan": ("flowrun.launcher.page.page_data", "Page"),
    "report": ("flowrun.launcher.page.page_data", "Page"),
    "runs": (f"{_COMMANDS}.run_folders.run_summary", "RunList"),
    "sample": ("flowrun.launcher.text.prompts", "WrittenText"),
    "status": (f"{_COMMANDS}.run_folders.run_summary", "RunSummary"),
    "verify": (f"{_COMMANDS}.verify", "LayoutComparison"),
}


def type_of(command: str) -> type:
    """Return the frozen type that a command prints.  Raises RecipeError for one that has none."""
    if command not in OUTPUTS:
        raise CommandLineError(
            f"--of {command}", "this command prints no JSON.", f"Write one of {', '.join(OUTPUTS)}."
        )
    module, name = OUTPUTS[command]
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def schema_of(command: str) -> str:
    """Return the schema as text.  Raises RecipeError."""
    return json.dumps(describe_fields(type_of(command)), indent=1)
