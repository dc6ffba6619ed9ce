"""Go on with a run from one of its checkpoints, in the same folder, maybe in another layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass, replace
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from flowrun.engine.errors import RecipeError
from flowrun.launcher.job.materials import with_steps
from flowrun.launcher.job.resumed import differ, train_anew
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.key_schema import schema
from flowrun.launcher.recipe.key_trees import flatten_keys
from flowrun.launcher.recipe.locate import show_path
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import CommandLineError, PlacedError
from flowrun.launcher.store.checkpoint import FOLDER, RECIPE, Checkpoint, find_all, find_best

# What makes it the same training, by section of the recipe; none named: all.  The rest may change.
FIXED: Mapping[str, tuple[str, ...]] = {
    "view": (),
    "model": (),
    "adapters": ("rank", "alpha", "modules"),
    "data": (),
    "train": ("seed", "batch_size"),
    "eval": ("fraction",),
}


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
    whole = next((c for c in reversed(before) if not c.damage()), None)
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
    file = f"recipe={start.folder.parents[1] / RECIPE}"
    before, after = load([file]), with_steps(load([file, *overrides], config_dir))
    if changed := _first_change(before, after):
        raise _keeps(start, *changed)
    if after.train.steps <= start.step:
        raise RecipeError(
            "train.steps",
            f"the checkpoint is already at step {start.step}.",
            f"Write train.steps={2 * start.step} to train as long again.",
        )
    return replace(after, weights="")  # the checkpoint has them


def _check_recipe(start: Checkpoint) -> None:
    """The recipe of the run has the keys that its checkpoint has: it was not cut in the middle,
    or they would get their defaults.  Raises RecipeError.
    """
    file, copy = start.folder.parents[1] / RECIPE, start.folder / RECIPE
    try:
        found = set(_paths(yaml.safe_load(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, yaml.YAMLError) as error:
        found, why = set(), f"it cannot be read: {type(error).__name__}."
    else:
        known = set(_paths(OmegaConf.to_container(schema())))
        lost = [key for key in _paths(start.recipe()) if key in known and key not in found]
        if not lost:
            return
        why = f"it has no {lost[0]}, which it had at step {start.step}."
    raise PlacedError(show_path(file), "", why, f"cp {copy} {file} brings it back.")


def find_continuation(recipe: Recipe, run_folder: Path) -> tuple[Recipe, Checkpoint | None]:
    """Find where the command of a run goes on that is given again: at its newest checkpoint that is
    whole and has steps left, or at the beginning (None) where there is no checkpoint.

    Raises RecipeError where all are damaged, or for a key that must not change.
    """
    left = [c for c in reversed(find_all(run_folder)) if c.step < recipe.train.steps]
    start = next((c for c in left if not c.damage()), None)
    if start is None and left:
        raise RecipeError(
            "train.resume",
            f"no checkpoint in {run_folder} is whole; the newest: {left[0].damage()}",
            "To begin anew, give another folder: hydra.run.dir=…",
        )
    if start is None:
        return recipe, None
    defaults = OmegaConf.to_container(schema())  # of sections that are newer than the checkpoint
    assert isinstance(defaults, dict)
    old, new = {**defaults, **start.recipe()}, yaml.safe_load(recipe.to_yaml())
    for section, names in FIXED.items():
        before, after = (dict(flatten_keys(tree.get(section))) for tree in (old, new))
        for name in names or {**before, **after}:
            if differ(before.get(name), after.get(name)):
                key = f"{section}.{name}".rstrip(".")
                raise _keeps(start, key, before.get(name, "not there"))
    return replace(recipe, weights=""), start  # the checkpoint has them


def _keeps(start: Checkpoint, key: str, old: object) -> RecipeError:
    """Return the error for a key that must not change."""
    return RecipeError(
        key,
        f"a resumed run keeps the settings of its training: {key} was {old}.",
        train_anew(start),
    )


def _paths(node: object, prefix: str = "") -> Iterator[str]:
    """Dotted key of all that a tree holds, mappings too."""
    for key, value in node.items() if isinstance(node, Mapping) else ():
        yield f"{prefix}{key}"
        yield from _paths(value, f"{prefix}{key}.")


def _first_change(before: Recipe, after: Recipe) -> tuple[str, object] | None:
    """Key and former value of the first thing that may not differ and does."""
    for section, names in FIXED.items():
        old, new = (_keys_of(getattr(recipe, section)) for recipe in (before, after))
        for name in names or {**old, **new}:
            if differ(old.get(name), new.get(name)):
                return f"{section}.{name}".rstrip("."), old.get(name, "not there")
    if before.weights != after.weights:
        return "model.weights", before.weights or "not there"
    if bool(before.eval.batches) != bool(after.eval.batches):  # nothing or something is held out
        return "eval.batches", before.eval.batches
    return None


def _keys_of(section: object) -> Mapping[str, object]:
    """Return the keys of a section; one that is a single value has the key ""."""
    if isinstance(section, Mapping):
        return section
    return vars(section) if is_dataclass(section) else {"": section}
