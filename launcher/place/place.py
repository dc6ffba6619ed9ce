"""The story of a placement: recipe -> planner -> search -> the recipe that won."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

from flowrun.engine.compile import Rehearsed
from flowrun.engine.errors import RecipeError
from flowrun.launcher.place.outcome import Outcome
from flowrun.launcher.place.placement_search import PlacementResult, search
from flowrun.launcher.place.planner import Planner
from flowrun.launcher.place.reduced_depth import MAX_PLANS, ReducedDepthPlanner
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.terminal.units import size

MAX_WHOLE_PLANS = 3  # extrapolated candidates that are planned whole
EXTRAPOLATION_TOLERANCE = 0.05  # relative error of a step time foreseen by few blocks


@dataclass(frozen=True, kw_only=True)
class Placed:
    """recipe: the recipe with the keys of the best candidate, and training: its plan.  best: what
    was foreseen of it.
    """

    recipe: Recipe
    keys: dict[str, Any]
    best: Outcome
    training: Rehearsed
    found: PlacementResult


def place(recipe: Recipe) -> Placed:
    """Search for the fastest placement.

    Raises RecipeError at hardware.memory_bytes if nothing fits: the closest candidate, and which
    rank lacks how many bytes; what the compiler said if nothing can be compiled.
    """
    return place_by(Planner.of(recipe))


def place_by(planner: Planner) -> Placed:
    """Search with a planner, and what it knows already."""
    if planner.skip_repeats:
        found = _by_few_blocks(planner)
    else:
        found = search(planner, planner.limit, planner.job.recipe.auto.plans, until=planner.until)
    if found.best is None:
        raise _nothing(planner, found)
    best = found.best.candidate
    recipe, keys = planner.recipe_of(best), planner.keys_of(best)
    return Placed(
        recipe=recipe, keys=keys, best=found.best, training=planner.plans[best], found=found
    )


def _by_few_blocks(planner: Planner) -> PlacementResult:
    """Candidates by plans of few blocks.  Of those that fit the fastest few are then planned whole,
    and more until one fits after all; where nothing fits, what comes closest.
    """
    short = ReducedDepthPlanner(planner)
    most = min(MAX_PLANS, planner.job.recipe.auto.plans)
    found = search(short, planner.limit, most, until=planner.until)
    found = replace(found, skipped=short.skipped)
    del short  # a whole plan needs the memory of its graphs
    while (promising := found.next) and _may_be_best(promising, found, planner.until):
        found = found.instead(promising, planner.plan(promising.candidate))
    if found.best is None and (closest := found.closest) and closest.extrapolated:
        found = found.instead(closest, planner.plan(closest.candidate))
    return found


def _may_be_best(estimate: Outcome, found: PlacementResult, until: float) -> bool:
    """Return True if an extrapolated outcome is as fast as the best that was planned whole, and
    there is time to plan it; of none that fits there always is.
    """
    whole = [outcome for outcome in found.outcomes if outcome.estimate]
    best = min((o.estimate.step_s for o in whole if o.fits and o.estimate), default=math.inf)
    return estimate.step_s <= best * (1 + EXTRAPOLATION_TOLERANCE) and (
        math.isinf(best) or (len(whole) < MAX_WHOLE_PLANS and time.monotonic() < until)
    )


def _nothing(planner: Planner, found: PlacementResult) -> RecipeError:
    closest = found.closest
    if closest is None:
        failed = next(iter((*planner.problems, *found.outcomes)), None)
        why = (
            failed.problem
            if failed
            else "train.batch_size divides over no placement of these ranks."
        )
        what = f"{failed.candidate}: " if failed else ""
        return RecipeError("auto.placement", f"no placement can be compiled.\n{what}{why}")
    return RecipeError(
        "hardware.memory_bytes",
        f"no placement of {planner.space.ranks} ranks fits into {planner.limit:,} bytes a rank.\n"
        f"Closest is {closest.candidate}: rank {closest.rank} (stage {closest.stage}) needs"
        f" {closest.bytes:,} bytes; {closest.missing:,} ({size(closest.missing)}) are missing.",
        "Use more ranks (auto.ranks), a smaller train.batch_size or model, or more memory.",
    )
