"""A run, read again: its recipe, and its model as plain torch makes it with the weights of now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.stored_weights import find_weights
from flowrun.launcher.model.build import instantiate_model
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.store.checkpoint import RECIPE
from flowrun.launcher.store.run_tokenizer import use_own_tokenizer


@dataclass(frozen=True)
class LoadedRun:
    """A run's recipe, and its model with the weights after some steps, in evaluation mode."""

    recipe: Recipe
    model: nn.Module
    step: int


def load_run(
    run_folder: Path,
    step: int | None = None,
    best: bool = False,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    averages: bool = False,
) -> LoadedRun:
    """Make the model of a run, whole and in this process, with its weights.

    run_folder: of the run.  step: of a checkpoint; None: the newest weights.  best: True for the
    checkpoint that is best by train.keep_best.  overrides: of its recipe.  config_dir: the user's
    own groups.  averages: True for the moving averages where evaluation reads them
    (optim.ema_eval).  Raises RecipeError.
    """
    stored = find_weights(run_folder, step, best)
    recipe = load([f"recipe={run_folder / RECIPE}", *overrides], config_dir)
    recipe = replace(recipe, weights="")
    if not any(override.lstrip("+~").startswith("data") for override in overrides):
        recipe = use_own_tokenizer(recipe, run_folder)
    state = stored.read(bool(averages and recipe.optim.ema and recipe.optim.ema_eval))
    return LoadedRun(recipe, fill_model(recipe, state, run_folder, stored.step), stored.step)


def fill_model(
    recipe: Recipe, state: Mapping[str, Tensor], run_folder: Path, step: int
) -> nn.Module:
    """Make the model of a recipe with the weights of a run, in evaluation mode.

    state: by the names of its state_dict.  run_folder, step: that they are of, for errors.  Raises
    RecipeError.
    """
    model = instantiate_model(recipe)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise RecipeError(
            "model",
            f"the model that the recipe of {run_folder} makes now has not the weights of step "
            f"{step}: {' '.join(str(error).split())}",
            "Its class must be that of the run.",
        ) from error
    return model.eval()
