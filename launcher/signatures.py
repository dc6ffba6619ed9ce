"""signatures: rows that a recipe gives for ops of one's own -> tables of the compiler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrun.engine.errors import RecipeError
from flowrun.engine.ops.table import GivenTable, Table
from flowrun.launcher.build import find
from flowrun.launcher.errors import did_you_mean

# key of the recipe -> field of GivenTable
FIELDS = {"_target_": "rule", "local": "local", "flops": "cost_flops", "seconds": "cost_seconds"}


def tables_of(signatures: Mapping[str, Any]) -> tuple[tuple[str, Table], ...]:
    """Raises RecipeError at the key that is wrong."""
    return tuple((name, _table(name, given)) for name, given in signatures.items())


def _table(name: str, given: Any) -> GivenTable:
    where = f"signatures.{name}"
    if not isinstance(given, Mapping) or not given.get("_target_"):
        raise RecipeError(
            f"{where}._target_",
            "nothing says which function gives the rows of this op.",
            "Write the dotted path of a function of an OpView that returns rows.",
        )
    for key in given:
        if key not in FIELDS:
            raise RecipeError(f"{where}.{key}", f"there is no {key!r}.", did_you_mean(key, FIELDS))
    found: dict[str, Any] = {
        field: find(str(given[key]), f"{where}.{key}")
        for key, field in FIELDS.items()
        if given.get(key)
    }
    return GivenTable(**found, name=f"{where} ({given['_target_']})")
