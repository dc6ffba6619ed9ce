"""flowrun: one YAML recipe trains any PyTorch model in any mix of parallelism.

    import flowrun

    recipe = flowrun.compose("gpt_hybrid", ["placement.axes.tensor=1"])
    print(flowrun.plan(recipe))
    report = flowrun.run("gpt_hybrid", ["train.steps=20"])
    print(report.measured["step_s"])

These are the functions that the command line calls.  Every one raises flowrun.FlowrunError, which
says where the mistake is, what is wrong, and what to write instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from flowrun.engine.errors import FlowrunError

if TYPE_CHECKING:  # each imports torch, or Hydra: `import flowrun` takes neither
    from flowrun.launcher.commands.verify import LayoutComparison
    from flowrun.launcher.recipe.recipe import Recipe
    from flowrun.launcher.report.report import Report
    from flowrun.launcher.run import Planned

__all__ = ["FlowrunError", "__version__", "compose", "plan", "run", "verify"]


def __getattr__(name: str) -> str:
    """Return __version__, which is read when it is asked for: that takes a while."""
    if name == "__version__":
        from importlib import metadata

        return metadata.version("flowrun")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def compose(
    recipe: str | Path, overrides: Sequence[str] = (), *, config_dir: str | Path | None = None
) -> Recipe:
    """Read a recipe and check it; nothing is made or started.

    Args:
        recipe: a name that `flowrun recipes` lists, or a YAML file.
        overrides: "key=value", as on the command line, the later one counts.
        config_dir: a folder of your own groups, searched first.

    Returns:
        The recipe: frozen, equal by value, picklable; `to_yaml()` is its text.

    Raises:
        RecipeError: a key, a value or a name is wrong, or keys contradict each other.
    """
    from flowrun.launcher.recipe.compose import load

    return load([f"recipe={recipe}", *overrides], str(config_dir) if config_dir else None)


def plan(
    recipe: str | Path | Recipe,
    overrides: Sequence[str] = (),
    *,
    config_dir: str | Path | None = None,
) -> Planned:
    """Compile a recipe and rehearse a step of it; nothing is started, and no weight has a value.

    Args:
        recipe: what `compose` takes, or what it returns.
        overrides: as of `compose`; none where the recipe is composed already.
        config_dir: as of `compose`.

    Returns:
        The plan of training.  `str()` is what `flowrun plan` prints; `training.rehearsal.step_s`
        is in seconds.

    Raises:
        RecipeError: the recipe is wrong, or the model cannot be captured.
        SbpError: a layout that a pin asks for cannot be.
        PlanError: the plan does not fit, or would wait for itself.
    """
    from flowrun.launcher.run import plan as make_plan

    return make_plan(_composed(recipe, overrides, config_dir))


def run(
    recipe: str | Path | Recipe,
    overrides: Sequence[str] = (),
    *,
    folder: str | Path | None = None,
    config_dir: str | Path | None = None,
) -> Report:
    """Train a recipe.  Ranks are forked from this process and are gone when it returns.

    Args:
        recipe: what `compose` takes, or what it returns.
        overrides: as of `compose`; none where the recipe is composed already.
        config_dir: as of `compose`.
        folder: of the run's plan, metrics, weights and report; without it
            outputs/DATE/TIME_NAME, as of the command.

    Returns:
        The report: losses, and what was foreseen and what was measured, in seconds and bytes.

    Raises:
        RecipeError: the recipe is wrong; nothing was started.
        SbpError: a layout is impossible; nothing was started.
        PlanError: the plan does not fit, or would wait for itself; nothing was started.
        RunError: a rank failed or was lost; the error names it.
    """
    from flowrun.launcher.run import run as train

    composed = _composed(recipe, overrides, config_dir)
    return train(composed, Path(folder) if folder else _new_folder(composed.name))


def verify(
    recipe: str | Path | Recipe,
    overrides: Sequence[str] = (),
    *,
    config_dir: str | Path | None = None,
) -> LayoutComparison:
    """Train a few steps of a recipe in every layout, and compare with a plain torch loop.

    All ranks of a layout run in this process, unless the recipe names a launch of its own.

    Args:
        recipe: what `compose` takes, or what it returns.
        overrides: as of `compose`; none where the recipe is composed already.
        config_dir: as of `compose`.

    Returns:
        A row for each layout: relative differences of losses and weights, and whether they are
        small enough (`row.ok`).

    Raises:
        RecipeError: the recipe is wrong, or has nothing to be compared with.
    """
    from flowrun.launcher.run import verify as compare

    if isinstance(recipe, str | Path):
        given = any(text.startswith("launch") for text in overrides)
        overrides = overrides if given else [*overrides, "launch=virtual"]
    return compare(_composed(recipe, overrides, config_dir))


def _composed(
    recipe: str | Path | Recipe, overrides: Sequence[str], config_dir: str | Path | None
) -> Recipe:
    if isinstance(recipe, str | Path):
        return compose(recipe, overrides, config_dir=config_dir)
    if overrides or config_dir:
        raise TypeError("a composed recipe takes no overrides: give them to flowrun.compose")
    return recipe


def _new_folder(name: str) -> Path:
    """As conf/config.yaml names the folder of a command."""
    now = datetime.now()
    return Path("outputs") / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}_{name}"
