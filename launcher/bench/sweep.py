"""A sweep as experiments: the layout that auto.placement picks, and all others of a set.

Each layout is a run of flowrun, as those of any suite; its line says what its plan foresees, and
how the pick's time compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf

from flowrun.launcher.bench.suite import Suite, Sweep
from flowrun.launcher.job.job import Job
from flowrun.launcher.place.place import place_by
from flowrun.launcher.place.planner import Planner
from flowrun.launcher.place.repeated_blocks import Captures
from flowrun.launcher.place.space import Candidate, Space
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe


def expand_sweep(suite: Suite, config_dir: str | None = None) -> Suite:
    """Return the suite whose experiments are the layouts of each row on each number of ranks: the
    pick, and all others of the set.

    config_dir: the user's own groups.  Raises FlowrunError where nothing can be picked.
    """
    assert suite.sweep is not None
    rows = [suite.experiments[name] for name in suite.rows]
    loaded = [load([*suite.recipe_of(row), "auto.placement=true"], config_dir) for row in rows]
    experiments = {}
    for row, recipe in zip(rows, loaded, strict=True):
        captures = Captures(Job(recipe, values=False))
        for ranks in suite.sweep.ranks:
            pick = place_by(Planner(captures, ranks)).best.candidate
            others = (each for each in candidates(recipe, ranks, suite.sweep) if each != pick)
            name = f"{row.name}_{ranks}"
            experiments[name] = replace(
                row,
                name=name,
                title=f"{row.title or row.name}, {ranks} ranks; auto.placement picks {pick}",
                ranks=ranks,
                flowrun=pick.overrides,
                others={str(each): each.overrides for each in others},
            )
    return replace(suite, experiments=experiments, rows=tuple(experiments), sweep=None)


def candidates(recipe: Recipe, ranks: int, wanted: Sweep) -> Iterator[Candidate]:
    """Yield all grids of `ranks` ranks for a recipe, as the sweep `wanted` asks: no more stages
    than micro-batches, and the default schedule alone.
    """
    tree: Any = OmegaConf.to_container(OmegaConf.create(recipe.text))
    space = Space.of(tree, ranks)
    for branch in space.branches():
        if branch.micro_batches in wanted.micro_batches and branch.stages <= branch.micro_batches:
            for leaf in space.leaves(branch):
                if leaf.zero in wanted.zero and leaf.in_flight == "auto":
                    yield leaf
