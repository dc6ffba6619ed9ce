"""Go on with a run from one of its checkpoints, in the same folder, maybe in another layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass, replace
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import Variable
from flowrun.engine.runtime.drivers.logical_checkpoint import read_contents, read_whole
from flowrun.engine.runtime.rank.shards import name_shard
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.materials import with_steps
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
            if _differ(before.get(name), after.get(name)):
                key = f"{section}.{name}".rstrip(".")
                raise _keeps(start, key, before.get(name, "not there"))
    return replace(recipe, weights=""), start  # the checkpoint has them


def _keeps(start: Checkpoint, key: str, old: object) -> RecipeError:
    """Return the error for a key that must not change."""
    return RecipeError(
        key,
        f"a resumed run keeps the settings of its training: {key} was {old}.",
        _train_anew(start),
    )


def _train_anew(start: Checkpoint) -> str:
    return (
        "To train something else from its weights, run: flowrun recipe=… "
        f"model.weights={start.folder.parents[1] / 'weights.safetensors'}"
    )


def check_data(job: Job, start: Checkpoint) -> None:
    """Check that the data set is that of the checkpoint, as far as the checkpoint says it: the
    number of samples, the documents and the tokenizers.  Raises RecipeError.
    """
    then, now = start.about(), job.about(start.step)
    keys = {str(value): f"data.{key}" for key, value in flatten_keys(job.recipe.data)}
    changed = {
        keys.get(name, "data"): f"{name} was {digest[:12]} (sha256), and is {found[:12]}"
        for name, digest in then.digests.items()
        if (found := now.digests.get(name, digest)) != digest
    }
    if then.samples not in (None, now.samples):
        changed.setdefault("data", f"there were {then.samples:,} samples, and are {now.samples:,}")
    if changed:
        what = "a resumed run keeps the data of its training, whose content has changed: "
        raise RecipeError(
            next(iter(changed)), f"{what}{'; '.join(changed.values())}.", _train_anew(start)
        )


def restore(job: Job, start: Checkpoint) -> None:
    """Check that the checkpoint has all that the plan needs; what forward does not read is read
    here, the rest is each rank's to read.
    """
    plan, there = job.training.plan, read_contents(start.folder)
    for v in plan.variables.values():
        tensor = plan.tensors[v.tensor]
        found = there.get(v.name)
        if found is None:
            raise RecipeError(
                _key_of(v),
                f"the checkpoint of step {start.step} has no {v.kind} {v.name}.",
                "Resume with the model, the optimizer and the precision that the run had.",
            )
        if found != (tensor.shape, tensor.dtype):
            raise RecipeError(
                _key_of(v),
                f"{v.kind} {v.name} is {_shown(*found)} in the checkpoint of step {start.step}, "
                f"and {_shown(tensor.shape, tensor.dtype)} here.",
            )
    unused = [name for name in job.unused if name in there]
    initial = job.materials.initial.but(read_whole(start.folder, unused))
    job.materials = replace(job.materials, initial=initial)


def notes(job: Job, start: Checkpoint) -> Iterator[str]:
    """Yield notes for a person who resumes: the step to go on from, and what has changed."""
    old = dict(flatten_keys(start.recipe()))
    new = dict(flatten_keys(yaml.safe_load(job.recipe.to_yaml())))
    changed = [
        f"{key} {old.get(key, 'not there')} -> {new.get(key, 'not there')}"
        for key in dict.fromkeys((*old, *new))
        if _differ(old.get(key), new.get(key))
    ]
    yield f"goes on from step {start.step}" + "".join(f"; {text}" for text in changed)
    for later in find_all(start.folder.parents[1]):
        if later.step > start.step:
            damage = later.damage()
            why = f"it is not whole: {damage}" if damage else "the next checkpoint replaces it"
            yield f"{later.folder.name} is left out: {why}"
    plan, there = job.training.plan, read_contents(start.folder)
    alone = [v for v in plan.variables.values() if v.own]
    ranks = [
        r for r in range(plan.num_ranks) if any(name_shard(plan, v, r) not in there for v in alone)
    ]
    if ranks:
        yield (
            f"ranks {', '.join(map(str, ranks))} are new: their buffers ({alone[0].name} …) start "
            "as rank 0's"
        )


def _paths(node: object, prefix: str = "") -> Iterator[str]:
    """Dotted key of all that a tree holds, mappings too."""
    for key, value in node.items() if isinstance(node, Mapping) else ():
        yield f"{prefix}{key}"
        yield from _paths(value, f"{prefix}{key}.")


def _key_of(variable: Variable) -> str:
    """Return the recipe key that a variable comes from; a state of the step itself is fp16's."""
    if variable.kind == "state":
        return "optim" if variable.of else "precision.dtype"
    return "model"


def _shown(shape: tuple[int, ...], dtype: object) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def _first_change(before: Recipe, after: Recipe) -> tuple[str, object] | None:
    """Key and former value of the first thing that may not differ and does."""
    for section, names in FIXED.items():
        old, new = (_keys_of(getattr(recipe, section)) for recipe in (before, after))
        for name in names or {**old, **new}:
            if _differ(old.get(name), new.get(name)):
                return f"{section}.{name}".rstrip("."), old.get(name, "not there")
    if before.weights != after.weights:
        return "model.weights", before.weights or "not there"
    if bool(before.eval.batches) != bool(after.eval.batches):  # nothing or something is held out
        return "eval.batches", before.eval.batches
    return None


def _differ(old: object, new: object) -> bool:
    """Return whether two values of a key differ; `.nan` is the same as `.nan`."""
    return old != new and not (old != old and new != new)


def _keys_of(section: object) -> Mapping[str, object]:
    """Return the keys of a section; one that is a single value has the key ""."""
    if isinstance(section, Mapping):
        return section
    return vars(section) if is_dataclass(section) else {"": section}
