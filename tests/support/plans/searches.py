"""The search for a layout of a shipped recipe, alone: what it began with, found and proved."""

from dataclasses import replace
from functools import cache

from flowrun.engine.compile import Compilation
from flowrun.engine.ir.graph import TRAINED, LogicalGraph
from flowrun.engine.ir.sbp import NdSbp, format_nd_sbp
from flowrun.engine.passes.search.search_sbp import LayoutSearch, search_layout
from flowrun.engine.pipeline import advance
from flowrun.engine.strategy import Auto, Strategy
from support.plans.small_recipes import RECIPES, small_job


@cache
def _captured(recipe: str, *overrides: str) -> tuple[LogicalGraph, Strategy]:
    job = small_job(RECIPES[0].with_name(f"{recipe}.yaml"), *overrides)
    return Compilation(
        job.materials.task, job.materials.example, job.strategy
    ).captured, job.strategy


ENABLED = Auto(enabled=True)


def search_of(recipe: str, *overrides: str, pins: bool, auto: Auto = ENABLED) -> LayoutSearch:
    """Of a recipe made smaller; pins: that it has."""
    graph, strategy = _captured(recipe, *overrides)
    asked = replace(strategy, auto=auto, pins=strategy.pins if pins else ())
    graph = advance(graph, asked, TRAINED)
    return search_layout(graph, asked)


def homes(found: LayoutSearch) -> dict[str, NdSbp]:
    """Of every weight and field that does not live with another, by its tensor."""
    return found.network.options.homes_at(found.found.choice)


def words(found: LayoutSearch) -> dict[str, str]:
    return {name: format_nd_sbp(nd_sbp) for name, nd_sbp in homes(found).items()}
