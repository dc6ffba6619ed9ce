"""Go on with a run from one of its checkpoints, in the same folder, maybe in another layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from flowrun.engine.errors import RecipeError
from flowrun.engine.graph import Variable
from flowrun.engine.runtime.checkpoint import contents, read_whole
from flowrun.engine.runtime.shards import name_of
from flowrun.launcher.checkpoint import FOLDER, Checkpoint, find_all
from flowrun.launcher.errors import PlacedError
from flowrun.launcher.job import Job
from flowrun.launcher.recipe import load
from flowrun.launcher.schema import Recipe

# What makes it the same training, by section of the recipe; none named: all.  The rest may change.
FIXED: Mapping[str, tuple[str, ...]] = {
    "view": (),
    "model": (),
    "data": (),
    "train": ("seed", "batch_size"),
    "eval": ("fraction",),
}
_COMMAND_LINE = "command line"


def checkpoint_of(run_folder: Path, step: int | None = None) -> Checkpoint:
    """The last complete checkpoint of a run, or that of a step.  Raises RecipeError."""
    found = find_all(run_folder)
    if not found:
        raise PlacedError(
            _COMMAND_LINE,
            str(run_folder),
            f"there is no complete checkpoint in {run_folder / FOLDER}.",
            "A run saves them with train.save_every=N, every N steps.",
        )
    if step is None:
        return found[-1]
    for checkpoint in found:
        if checkpoint.step == step:
            return checkpoint
    steps = ", ".join(str(checkpoint.step) for checkpoint in found)
    raise PlacedError(
        _COMMAND_LINE,
        f"--step {step}",
        f"{run_folder} has no checkpoint of {step} steps.",
        f"There is: {steps}.",
    )


def resumed(start: Checkpoint, overrides: list[str], config_dir: str | None = None) -> Recipe:
    """The recipe of the run, with overrides.  Raises RecipeError for what cannot change."""
    file = f"recipe={start.folder.parents[1] / 'recipe.yaml'}"
    before, after = load([file]), load([file, *overrides], config_dir)
    if changed := _first_change(before, after):
        key, old = changed
        raise RecipeError(
            key,
            f"a run is resumed as the training that it was, with {key} = {old}.",
            "To train something else from its weights: flowrun recipe=… "
            f"model.weights={start.folder.parents[1] / 'weights.safetensors'}",
        )
    if after.train.steps <= start.step:
        raise RecipeError(
            "train.steps",
            f"the checkpoint has {start.step} steps already.",
            f"Write train.steps={2 * start.step} to train as long again.",
        )
    return replace(after, weights="")  # the checkpoint has them


def continued(recipe: Recipe, run_folder: Path) -> tuple[Recipe, Checkpoint | None]:
    """What a run does that was put back into the queue: go on from its newest checkpoint that has
    steps left, or begin.
    """
    left = [c for c in find_all(run_folder) if c.step < recipe.train.steps]
    return (replace(recipe, weights=""), left[-1]) if left else (recipe, None)


def restore(job: Job, start: Checkpoint) -> None:
    """Check that the checkpoint has all that the plan needs; what forward does not read is read
    here, the rest is each rank's to read.
    """
    graph, there = job.training.plan.graph, contents(start.folder)
    for v in graph.variables:
        tensor = graph.tensors[v.tensor]
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
    job.initial = job.initial.but(read_whole(start.folder, unused))


def notes(job: Job, start: Checkpoint) -> Iterator[str]:
    """What a person should know who goes on: from where, and what is not as it was."""
    old = dict(_leaves(yaml.safe_load((start.folder / "recipe.yaml").read_text())))
    new = dict(_leaves(yaml.safe_load(job.recipe.to_yaml())))
    changed = [
        f"{key} {old.get(key, 'not there')} -> {new.get(key, 'not there')}"
        for key in dict.fromkeys((*old, *new))
        if old.get(key) != new.get(key)
    ]
    yield f"goes on from step {start.step}" + "".join(f"; {text}" for text in changed)
    plan, there = job.training.plan, contents(start.folder)
    alone = [v for v in plan.graph.variables if v.own]
    ranks = [
        r for r in range(plan.num_ranks) if any(name_of(plan, v, r) not in there for v in alone)
    ]
    if ranks:
        yield (
            f"ranks {', '.join(map(str, ranks))} are new: their buffers ({alone[0].name} …) start "
            "as rank 0's"
        )


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of all that is no mapping."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def _key_of(variable: Variable) -> str:
    """Of the recipe: what a variable comes from.  A state of the step itself is fp16's."""
    if variable.kind == "state":
        return "optim" if variable.of else "precision.dtype"
    return "model"


def _shown(shape: tuple[int, ...], dtype: Any) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def _first_change(before: Recipe, after: Recipe) -> tuple[str, Any] | None:
    """Key and former value of the first thing that may not differ and does."""
    for section, names in FIXED.items():
        old, new = (_named(getattr(recipe, section)) for recipe in (before, after))
        for name in names or {**old, **new}:
            if old.get(name) != new.get(name):
                return f"{section}.{name}".rstrip("."), old.get(name, "not there")
    if before.weights != after.weights:
        return "model.weights", before.weights or "not there"
    if bool(before.eval.batches) != bool(after.eval.batches):  # nothing or something is held out
        return "eval.batches", before.eval.batches
    return None


def _named(section: Any) -> Mapping[str, Any]:
    """Its keys; a section that is one value has the key ""."""
    if isinstance(section, Mapping):
        return section
    return vars(section) if is_dataclass(section) else {"": section}
