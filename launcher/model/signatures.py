"""signatures: rows for ops of one's own, from a recipe and from installed packages -> tables of the
compiler.

A package brings them by entry points of the group `flowrun.signatures`: the name is the op, the
object its function of rows or a GivenTable.  The recipe's go before.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from flowrun.engine.errors import RecipeError, refuse_as
from flowrun.engine.ir.table import GivenTable, OpTable
from flowrun.launcher.model.targets import find
from flowrun.launcher.recipe.recipe_errors import did_you_mean

GROUP = "flowrun.signatures"
# key of the recipe -> field of GivenTable
FIELDS = {"_target_": "rule", "local": "local", "flops": "cost_flops", "seconds": "cost_seconds"}


def tables_of(signatures: Mapping[str, object]) -> tuple[tuple[str, OpTable], ...]:
    """Raises RecipeError at the key that is wrong, or for an entry point that can't be used."""
    brought = {e.name: e for e in entry_points(group=GROUP) if e.name not in signatures}
    return (
        *((name, _table(name, given)) for name, given in signatures.items()),
        *((name, _brought(entry)) for name, entry in brought.items()),
    )


def _brought(entry: EntryPoint) -> GivenTable:
    name = f"entry point {entry.name} = {entry.value}"
    package = entry.dist.name if entry.dist else "some package"
    refuse = lambda error: RecipeError(  # noqa: E731
        f"signatures.{entry.name}",
        f"the {name} of {package} cannot be loaded: {type(error).__name__}: {error}",
        "Mend the package, or give this key.",
    )
    with refuse_as(refuse):
        found = entry.load()
    if isinstance(found, GivenTable):
        return found
    if not callable(found):
        raise RecipeError(
            f"signatures.{entry.name}",
            f"the {name} of {package} is a {type(found).__name__}.",
            "Name a function of an OpView that returns rows, or a GivenTable.",
        )
    return GivenTable(rule=found, name=name)


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
