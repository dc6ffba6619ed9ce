"""A run, read again: its weights, its recipe, and its model as plain torch makes it with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

from flowrun.engine.errors import RecipeError, RunError
from flowrun.engine.runtime.drivers import logical_checkpoint as disk
from flowrun.launcher.commands.resume import checkpoint_of
from flowrun.launcher.model.build import instantiate_model
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import ABOUT, AVERAGES, Checkpoint, find_all
from flowrun.launcher.store.run_files import RECIPE
from flowrun.launcher.store.run_tokenizer import text_of, use_own_tokenizer
from flowrun.launcher.store.tensor_file import Contents
from flowrun.models.lora import AdaptedWeights
from flowrun.models.reference import WithReference


@dataclass(frozen=True)
class Stored:
    """Weights on the disk.

    path: a file of weights, or the folder of a checkpoint.  step: steps that they were trained for.
    contents: shapes and dtypes.  names: of the model's state_dict -> name among the contents.
    value: reads one of the contents.  adapters: among them.
    """

    path: Path
    step: int
    contents: Contents
    names: Mapping[str, str]
    value: Callable[[str], Tensor]
    adapters: AdaptedWeights | None

    @staticmethod
    def of_file(file: Path) -> Stored:
        """Read the file that a run ends with.  Raises RunError."""
        step, adapters = weights.steps_of(file), weights.adapters_of(file)
        state = load_file(file)  # pages of the file
        contents = {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
        return Stored(file, step, contents, {n: n for n in state}, state.__getitem__, adapters)

    @staticmethod
    def of_checkpoint(checkpoint: Checkpoint) -> Stored:
        """Read a checkpoint, one tensor at a time."""
        folder, about = checkpoint.folder, checkpoint.about()
        contents, names = disk.read_contents(folder), weights.of_model(about.names)

        def value(name: str) -> Tensor:
            return disk.read_whole(folder, [name])[name]

        return Stored(folder, about.step, contents, names, value, about.adapters)

    def read(self, averages: bool = False) -> dict[str, Tensor]:
        """Read all by the names of the model's state_dict.

        averages: True for moving averages in place of the weights that have one (optim.ema).
        """
        if averages and self.path.is_file():
            return load_file(self.path.with_name(AVERAGES))
        names = weights.averaged_names(self.contents, self.names) if averages else self.names
        return {name: self.value(tensor) for name, tensor in names.items()}


def find_weights(run_folder: Path, step: int | None = None, best: bool = False) -> Stored:
    """Find what a run ended with, or what a checkpoint of it holds.

    run_folder: of the run, or a checkpoint, also one that was copied elsewhere.  step: of a
    checkpoint; None: the newest weights.  best: True for the checkpoint that is best by
    train.keep_best.  Raises RecipeError if there are no weights.
    """
    if (run_folder / ABOUT).is_file():
        return _read_checkpoint(run_folder, step, best)
    if best and step is None:
        step = checkpoint_of(run_folder, best=True).step
    ended = run_folder / weights.FILE
    found = find_all(run_folder)
    try:
        trained = weights.steps_of(ended) if ended.exists() else -1
    except RunError:
        if not any(checkpoint.step == step for checkpoint in found):
            raise
        trained = -1  # it is damaged, and not needed
    if trained >= 0 and (step == trained or step is None) and all(c.step <= trained for c in found):
        return Stored.of_file(ended)
    if not ended.exists() and not found:
        raise CommandLineError(str(run_folder), *_why_nothing(run_folder))
    return Stored.of_checkpoint(checkpoint_of(run_folder, step))


def _read_checkpoint(folder: Path, step: int | None, best: bool) -> Stored:
    """Read a folder that is a checkpoint.  step, best: that were asked for of a run."""
    try:
        found = Checkpoint(folder, Checkpoint(folder, 0).about().step)
        damage = found.damage()
    except (OSError, ValueError, TypeError) as error:
        damage = f"{ABOUT}: it is damaged: {error}."
    if damage:
        raise CommandLineError(str(folder), f"this checkpoint is not whole: {damage}")
    if best or step not in (None, found.step):
        asked = "--best" if best else f"--step {step}"
        problem = f"{folder} is a checkpoint, of {found.step} steps, and not a run."
        raise CommandLineError(asked, problem, f"Leave out {asked}, or name the run.")
    return Stored.of_checkpoint(found)


def _why_nothing(run_folder: Path) -> tuple[str, str]:
    """Say what is wrong with a folder that has no weights, and what to do."""
    if not run_folder.is_dir():
        return "there is no such folder.", "A run says at its end where everything of it is."
    return (
        f"it has neither {weights.FILE} nor a complete checkpoint.",
        f"A run ends with {weights.FILE} unless train.save=false, and saves a checkpoint every N "
        "steps with train.save_every=N.",
    )


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

    step: of a checkpoint; None: the newest weights.  best: True for the checkpoint that is best by
    train.keep_best.  overrides: of its recipe.  averages: True for the moving averages where
    evaluation reads them (optim.ema_eval).  Raises RecipeError.
    """
    stored = find_weights(run_folder, step, best)
    recipe = without_files(load([f"recipe={run_folder / RECIPE}", *overrides], config_dir))
    if not any(override.lstrip("+~").startswith("data") for override in overrides):
        recipe = use_own_tokenizer(recipe, run_folder)
    state = stored.read(bool(averages and recipe.optim.ema and recipe.optim.ema_eval))
    return LoadedRun(recipe, fill_model(recipe, state, run_folder, stored.step), stored.step)


def without_files(recipe: Recipe) -> Recipe:
    """Return a run's recipe without the files that its model began with: the run has all weights,
    and may have been moved.
    """
    beside = recipe.model.get("_target_") == f"{WithReference.__module__}.{WithReference.__name__}"
    model = {**recipe.model, "file": None} if beside else recipe.model
    return replace(recipe, weights="", model=model)


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


def text_run(run: LoadedRun) -> LoadedRun:
    """Return a run as that of a model of text: with no reference, and with the text of pairs."""
    recipe, model = replace(run.recipe, data=dict(text_of(run.recipe.data))), run.model
    if isinstance(model, WithReference):
        model = model.model
        argument = next(iter(inspect.signature(model.forward).parameters))
        task = replace(recipe.task, inputs={argument: "tokens"})
        recipe = replace(recipe, task=task, model=recipe.model.get("model", recipe.model))
    return LoadedRun(recipe, model, run.step)
