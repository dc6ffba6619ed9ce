"""A job that continues from a checkpoint: the same data, and all that its plan needs is there."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
import yaml

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import Variable
from flowrun.engine.runtime.drivers.logical_checkpoint import read_contents, read_whole
from flowrun.engine.runtime.rank.shards import name_shard
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.optimizer import newly_trained, trained_of
from flowrun.launcher.recipe.key_schema import flatten_keys
from flowrun.launcher.store.checkpoint import ABOUT, Checkpoint, find_all


def put_at(job: Job, start: Checkpoint, restores: bool = True) -> tuple[str, ...]:
    """Put the job where the checkpoint left it, if it `restores`; return notes for a person.

    Raises RecipeError.
    """
    _check_data(job, start)
    if not restores:
        return ()
    _restore(job, start)
    return tuple(_notes(job, start))


def _check_data(job: Job, start: Checkpoint) -> None:
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
            next(iter(changed)), f"{what}{'; '.join(changed.values())}.", train_anew(start)
        )


def _restore(job: Job, start: Checkpoint) -> None:
    """Check that the checkpoint has all that the plan needs; what forward does not read is read
    here, the rest is each rank's to read.
    """
    plan, there = job.training.plan, read_contents(start.folder)
    new = newly_trained(start, job.materials.task, job.strategy.optimizer)
    for v in plan.variables.values():
        tensor = plan.tensors[v.tensor]
        found = there.get(v.name)
        if found is None and v.kind == "state" and v.of in new:
            continue  # it begins now
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
    decided = job.plans.decided.intersection(there)
    for name, value in read_whole(start.folder, sorted(decided)).items():
        if not torch.equal(value, job.materials.initial[name]):
            raise RecipeError(
                "model",
                f"forward decides by the buffer {name}, whose value in the checkpoint of step "
                f"{start.step} is another than the model's.",
                "Make the model as it was made for that run, with the same model.weights.",
            )
    unused = [name for name in job.unused if name in there]
    initial = job.materials.initial.but(read_whole(start.folder, unused))
    job.materials = replace(job.materials, initial=initial)


def _notes(job: Job, start: Checkpoint) -> Iterator[str]:
    """Yield notes for a person who resumes: the step to go on from, and what has changed."""
    old = dict(flatten_keys(start.recipe()))
    new = dict(flatten_keys(yaml.safe_load(job.recipe.to_yaml())))
    changed = [
        f"{key} {old.get(key, 'not there')} -> {new.get(key, 'not there')}"
        for key in dict.fromkeys((*old, *new))
        if differ(old.get(key), new.get(key))
    ]
    yield f"goes on from step {start.step}" + "".join(f"; {text}" for text in changed)
    for later in find_all(start.folder.parents[1]):
        if later.step > start.step:
            # of one in a store
            unfetched = [file.name for file in later.folder.iterdir()] == [ABOUT]
            damage = "" if unfetched else later.damage()
            why = f"it is not whole: {damage}" if damage else "the next checkpoint replaces it"
            yield f"{later.folder.name} is left out: {why}"
    plan, there = job.training.plan, read_contents(start.folder)
    yield from _note_trained(job, start)
    alone = [v for v in plan.variables.values() if v.own]
    ranks = [
        r for r in range(plan.num_ranks) if any(name_shard(plan, v, r) not in there for v in alone)
    ]
    if ranks:
        yield (
            f"ranks {', '.join(map(str, ranks))} are new: their buffers ({alone[0].name} …) start "
            "as rank 0's"
        )


def _note_trained(job: Job, start: Checkpoint) -> Iterator[str]:
    begin = newly_trained(start, job.materials.task, job.strategy.optimizer)
    if begin:
        yield f"{_list(begin)} train from step {start.step} on: their states begin at their starts"
    then = start.about().trained or {}
    if left := then.keys() - trained_of(job.materials.task, job.strategy.optimizer):
        yield f"{_list(left)} train no more: their states are left out"


def _list(names: Collection[str]) -> str:
    first = ", ".join(sorted(names)[:3])
    return f"{len(names)} parameters ({first}{' …' if len(names) > 3 else ''})"


def _key_of(variable: Variable) -> str:
    """Return the recipe key that a variable comes from; a state of the step itself is fp16's."""
    if variable.kind == "state":
        return "optim" if variable.of else "precision.dtype"
    return "model"


def _shown(shape: tuple[int, ...], dtype: object) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def train_anew(start: Checkpoint) -> str:
    """Advise what to do instead of resuming."""
    return (
        "To train something else from its weights, run: flowrun recipe=… "
        f"model.weights={start.folder.parents[1] / 'weights.safetensors'}"
    )


def differ(old: object, new: object) -> bool:
    """Return whether two values of a key differ; `.nan` is the same as `.nan`."""
    return old != new and not (old != old and new != new)
