"""Go on with a run from one of its checkpoints, in the same folder, maybe in another layout."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from flowrun.engine.errors import RecipeError
from flowrun.launcher.job.materials import with_steps
from flowrun.launcher.job.resumed import differ, train_anew
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.key_schema import flatten_keys, schema
from flowrun.launcher.recipe.locate import show_path
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import CommandLineError, PlacedError
from flowrun.launcher.store.checkpoint import FOLDER, Checkpoint, find_all, find_best, find_whole
from flowrun.launcher.store.run_files import RECIPE

# Keys that make it the same training, each with all inside of it.  The rest may change.
FIXED = (
    *("view", "model", "data", "train.seed", "train.batch_size", "eval.fraction"),
    *("adapters.rank", "adapters.alpha", "adapters.modules"),
)


def checkpoint_of(run_folder: Path, step: int | None = None, best: bool = False) -> Checkpoint:
    """Return the last complete checkpoint of a run, or another.

    run_folder: of the run.  step: of another checkpoint.  best: True for the one that is best by
    train.keep_best.  Raises RecipeError, also where its files are not as they were written.
    """
    found = find_all(run_folder)
    if not found:
        raise CommandLineError(
            str(run_folder),
            f"there is no complete checkpoint in {run_folder / FOLDER}.",
            "A run saves them with train.save_every=N, every N steps.",
        )
    if best and step is None:
        step = _best_step(run_folder, found)
    wanted = found[-1].step if step is None else step
    for checkpoint in found:
        if checkpoint.step == wanted:
            _check_whole(run_folder, checkpoint, [c for c in found if c.step < wanted])
            return checkpoint
    steps = ", ".join(str(checkpoint.step) for checkpoint in found)
    raise CommandLineError(
        f"--step {step}", f"{run_folder} has no checkpoint of {step} steps.", f"There is: {steps}."
    )


def _best_step(run_folder: Path, found: list[Checkpoint]) -> int:
    by = ""
    for checkpoint in reversed(found):
        with suppress(OSError, ValueError, yaml.YAMLError):
            by = by or checkpoint.recipe()["train"]["keep_best"]
    if chosen := find_best(found, by):
        return chosen.step
    raise CommandLineError(
        "--best",
        f"no checkpoint of {run_folder} has a result to choose by.",
        "A run with train.keep_best=loss evaluates each of its checkpoints; --step N takes any.",
    )


def _check_whole(run_folder: Path, wanted: Checkpoint, before: list[Checkpoint]) -> None:
    damage = wanted.damage()
    if not damage:
        return
    whole = find_whole(before)
    raise CommandLineError(
        str(run_folder),
        f"{FOLDER}/{wanted.folder.name} is not whole: {damage}",
        f"--step {whole.step} takes the checkpoint before it, which is whole."
        if whole
        else "There is no whole one before it.",
    )


def compose_resumed(
    start: Checkpoint, overrides: list[str], config_dir: str | None = None
) -> Recipe:
    """Compose the recipe of the run that wrote the checkpoint `start`, with overrides.

    config_dir: the user's own groups.  Raises RecipeError for a key that must not change.
    """
    _check_recipe(start)
    file = start.folder.parents[1] / RECIPE
    recipe = with_steps(load([f"recipe={file}", *overrides], config_dir))
    _check_same(start, recipe)
    if recipe.train.steps <= start.step:
        raise RecipeError(
            "train.steps",
            f"the checkpoint is already at step {start.step}.",
            f"Write train.steps={2 * start.step} to train as long again.",
        )
    return replace(recipe, weights="")  # the checkpoint has them


def _check_recipe(start: Checkpoint) -> None:
    """The recipe of the run has the keys that its checkpoint has: it was not cut in the middle,
    or they would get their defaults.  Raises RecipeError.
    """
    file, copy = start.folder.parents[1] / RECIPE, start.folder / RECIPE
    try:
        found = dict(flatten_keys(yaml.safe_load(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = f"it cannot be read: {type(error).__name__}."
    else:
        lost = (_defaults().keys() & dict(flatten_keys(start.recipe()))) - found.keys()
        if not lost:
            return
        why = f"it has no {min(lost)}, which it had at step {start.step}."
    raise PlacedError(show_path(file), "", why, f"cp {copy} {file} brings it back.")


def find_continuation(recipe: Recipe, run_folder: Path) -> tuple[Recipe, Checkpoint | None]:
    """Find where the command of a run goes on that is given again: at its newest checkpoint that is
    whole and has steps left, or at the beginning (None) where there is no checkpoint.

    Raises RecipeError where all are damaged, or for a key that must not change.
    """
    before: list[Checkpoint] = []
    while left := [c for c in find_all(run_folder) if c.step < recipe.train.steps]:
        with suppress(FileNotFoundError):  # other hosts train, and remove what they keep no longer
            if start := find_whole(left):
                start.about()  # it stays in memory
                _check_same(start, recipe)
                return replace(recipe, weights=""), start  # the checkpoint has them
        if left == before:
            raise RecipeError(
                "train.resume",
                f"no checkpoint in {run_folder} is whole; the newest: {left[-1].damage()}",
                "To begin a new run, give another folder: hydra.run.dir=…",
            )
        before = left
    return recipe, None


def _check_same(start: Checkpoint, recipe: Recipe) -> None:
    """Refuse a recipe that trains something else than the checkpoint did.  Raises RecipeError."""
    old = _defaults() | dict(flatten_keys(start.recipe()))  # of keys newer than the checkpoint
    new = dict(flatten_keys(yaml.safe_load(recipe.to_yaml())))
    if bool(old["eval.batches"]) == bool(new["eval.batches"]):  # nothing or something is held out
        new["eval.batches"] = old["eval.batches"]
    for tree in (old, new):
        if not old["adapters.modules"] or not new["adapters.modules"]:  # one at most has a rank
            del tree["adapters.rank"], tree["adapters.alpha"]
    for key in {**old, **new}:
        fixed = any(f"{key}.".startswith(f"{each}.") for each in (*FIXED, "eval.batches"))
        if fixed and differ(old.get(key), new.get(key)):
            was = f"it had no {key}" if old.get(key) in (None, []) else f"{key} was {old[key]}"
            kept = f"a resumed run keeps the settings of its training: {was}."
            raise RecipeError(key, kept, train_anew(start))


def _defaults() -> dict[str, Any]:
    """Return the keys that every recipe has, with their defaults."""
    found = flatten_keys(OmegaConf.to_container(schema()))
    return {key: value for key, value in found if value != {}}
