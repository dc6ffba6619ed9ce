"""The story of a placement: recipe -> planner -> search -> the recipe that won."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrun.engine.errors import RecipeError
from flowrun.launcher.auto.outcome import Outcome
from flowrun.launcher.auto.planner import Planner
from flowrun.launcher.auto.search import Found, search
from flowrun.launcher.job import Job
from flowrun.launcher.quantities import size
from flowrun.launcher.schema import Recipe


@dataclass(frozen=True)
class Placed:
    """recipe: the recipe with the keys of the best candidate.  best: what was foreseen of it."""

    recipe: Recipe
    keys: dict[str, Any]
    best: Outcome
    found: Found


def place(recipe: Recipe) -> Placed:
    """Search.

    Raises RecipeError at hardware.memory_bytes if nothing fits: the closest candidate, and which
    rank lacks how many bytes; what the compiler said if nothing can be compiled.
    """
    planner = Planner(Job(recipe, values=False))
    found = search(planner, planner.limit, recipe.auto.plans)
    if found.best is None:
        raise _nothing(planner, found)
    candidate = found.best.candidate
    return Placed(planner.recipe_of(candidate), planner.keys_of(candidate), found.best, found)


def _nothing(planner: Planner, found: Found) -> RecipeError:
    closest = found.closest
    if closest is None:
        failed = next(iter((*planner.problems, *found.outcomes)), None)
        why = failed.problem if failed else "its batch cannot be divided so."
        what = f"{failed.candidate}: " if failed else ""
        return RecipeError("auto.placement", f"no placement can be compiled.\n{what}{why}")
    return RecipeError(
        "hardware.memory_bytes",
        f"no placement of {planner.space.ranks} ranks fits into {planner.limit:,} bytes a rank.\n"
        f"Closest is {closest.candidate}: rank {closest.rank} (stage {closest.stage}) needs"
        f" {closest.bytes:,} bytes; {closest.missing:,} ({size(closest.missing)}) are missing.",
        "Use more ranks (auto.ranks), a smaller train.batch_size or model, or more memory.",
    )
