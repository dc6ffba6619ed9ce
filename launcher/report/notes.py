"""Note what a person should know of a run before it starts: work that is done twice, what the step
waits for, and keys that change nothing.  `flowrun plan`, the screen and plan.txt show these notes.

A key that changes nothing is a row of NO_EFFECT; a fact that only the plan knows is a function in
FACTS.
"""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import cast

from omegaconf import DictConfig, ListConfig, OmegaConf

from flowrun.engine.actors.plan import Actor, BoxWork
from flowrun.engine.hardware.hardware import CPU
from flowrun.engine.lowering.idle_axes import IdleAxis, idle_axes
from flowrun.engine.passes.update.sparse_ops import sparse_tables
from flowrun.engine.rehearsal.rehearsal import rehearse
from flowrun.engine.runtime.kernels.packed_attention import has_flash_3
from flowrun.engine.runtime.rank.shards import written_bytes
from flowrun.launcher.data.sampler import length
from flowrun.launcher.job.job import Job
from flowrun.launcher.listeners.make import lacks_default
from flowrun.launcher.recipe.hydra_source import CONF
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.schema import BF16, EAGER, MIRRORED, RecipeSchema
from flowrun.launcher.report.group_equal import spans
from flowrun.launcher.report.report import READING_SHARE
from flowrun.launcher.terminal.units import seconds, size
from flowrun.models.reference import WithReference

NOTED_COPY = 10**8  # bytes of a copy that are named


def notes(job: Job) -> tuple[str, ...]:
    """All notes of a compiled job, in the order of its parts."""
    found = [note for fact in FACTS for note in fact(job)]
    return (*job.recipe.seat.notes, *job.notes, *found, *_without_effect(job))


# ---- facts of the plan ---------------------------------------------------------------------------


def _note_shared_cores(job: Job) -> Iterator[str]:
    """Note more ranks than cores: the numbers are right, and fewer ranks are as fast."""
    launch, cores = job.recipe.launch, os.cpu_count() or 1
    ranks = math.ceil(job.recipe.num_ranks / launch.num_hosts)
    here = launch.name == "local" and job.device_type == CPU == job.strategy.hardware.device
    if here and ranks * launch.threads > cores:
        threads = f" of {launch.threads} threads" if launch.threads > 1 else ""
        yield f"{ranks} ranks{threads} share {cores} core{'s' if cores > 1 else ''} of this host"


def _note_idle_axes(job: Job) -> Iterator[str]:
    for axis in idle_axes(job.training.plan) if job.recipe.view != MIRRORED else ():
        some = f" on stage{'s' * (len(axis.stages) > 1)} {spans(axis.stages)}"
        where = some if axis.others else ""
        yield f"axis {axis.name} divides nothing{where}: {_instead(axis, job.recipe)}"


def _instead(axis: IdleAxis, recipe: Recipe) -> str:
    same = f"its {axis.ranks} ranks do the same work"
    if recipe.auto.enabled:
        return f"{same}, which parallel=auto foresees to be fastest; drop the axis, or pin with sbp"
    if str(recipe.model.get("_target_")).startswith("transformers."):
        plan = f"write sbp.from_model={axis.name} for the plan that most such models carry"
        return f"{same}; {plan}, or pins of sbp, or parallel=auto"
    return f"{same}; pin with sbp (docs/how_to/recipe.md), or parallel=auto"


def _slow_readers(job: Job) -> Iterator[str]:
    plan, step_s = job.training.plan, job.training.rehearsal.step_s
    readers = [actor for actor in plan.actors if actor.makes_batches]

    def a_step(actor: Actor) -> float:
        return actor.seconds * plan.acts_per_step(actor)

    busiest = max(readers, key=a_step, default=None)
    most = max((sum(a_step(a) for a in readers if a.stage == r.stage) for r in readers), default=0)
    if busiest is None or most < READING_SHARE * step_s:
        return
    rest = rehearse(plan, lambda actor: 0.0 if actor.makes_batches else actor.seconds).step_s
    if step_s > rest * (1 + READING_SHARE):
        step = busiest.name.partition(".")[2]
        what = f"The step {step!r} of the data set" if step else "Reading"
        instead = ""
        if a_step(busiest) > step_s * (1 - READING_SHARE):  # else it shares cores with compute
            instead = (
                ", let processes make them (launch.data_workers), or cut this into several steps, "
                "each with a thread"
            )
        yield (
            f"samples bound the step: {seconds(step_s)}, {seconds(rest)} if they were ready. {what}"
            f" takes a rank {seconds(a_step(busiest))} of one core; prepare samples beforehand"
            f"{instead} (docs/how_to/data.md)"
        )


def _no_validation(job: Job) -> Iterator[str]:
    asked, samples = job.recipe.eval, length(job.materials.data)
    if asked.batches and asked.fraction and not job.materials.sampler.held_out:
        share = f"{asked.fraction:.0%} of {samples} samples"
        yield f"no validation: {share} is less than one sample (eval.fraction)"


def _note_repeats(job: Job) -> Iterator[str]:
    for note in job.materials.sampler.notes(job.eval_steps):
        yield f"validation: {note}"


def _zero_of_one_rank(job: Job) -> Iterator[str]:
    zero = job.recipe.zero
    if zero.stage > job.strategy.zero.stage:
        yield f"zero.stage={zero.stage} shards nothing: its axis, {zero.axis}, has one rank."


def _no_curves(job: Job) -> Iterator[str]:
    if lacks_default(job.recipe):
        yield "no curves are drawn: pip install 'flowrun[tensorboard]', or name a logger in log"


def _note_unchecked_capture(job: Job) -> Iterator[str]:
    if job.plans.check and job.plans.check.why_none:
        yield f"what was captured was not compared with the model: {job.plans.check.why_none}"


def _note_copies(job: Job) -> Iterator[str]:
    train, plan = job.recipe.train, job.training.plan
    if not (train.save_every and train.save_aside) or job.recipe.launch.name == "virtual":
        return
    most = max(written_bytes(plan, placement.ranks[0]) for placement in plan.placements)
    if most >= NOTED_COPY:
        yield (
            f"a checkpoint is written from a copy: {size(most)} more on a rank, of the host's"
            " memory (train.save_aside)"
        )


def _note_wide_weights(job: Job) -> Iterator[str]:
    """Note weights that are kept in bf16 and computed with in fp32: each is there twice."""
    precision = job.recipe.precision
    if precision.param_dtype == BF16 and precision.dtype != BF16:
        yield (
            f"weights are kept in bf16 and read in fp32 (precision.dtype={precision.dtype}): each "
            "is widened once a step and stays so until its last reader; with "
            "precision.dtype=bf16 it is read without a copy"
        )


def _note_random_base(job: Job) -> Iterator[str]:
    """Note adapters, and a reference, of weights that nobody has trained."""
    recipe = job.recipe
    made_by = str(recipe.model["_target_"])
    if recipe.adapters.modules and not recipe.weights and not made_by.endswith("from_pretrained"):
        yield (
            "adapters train on a frozen base that begins as its constructor makes it, which is "
            "random unless that reads a file: model.weights is empty"
        )
    beside = recipe.model.get("reference") or recipe.model.get("model")
    reads = recipe.weights or recipe.model.get("file") or "from_pretrained" in str(beside)
    if isinstance(job.materials.model, WithReference) and not reads:
        yield (
            "the reference is as its constructor makes it, random unless that reads a file: "
            "model.file is empty"
        )


def _note_packed_attention(job: Job) -> Iterator[str]:
    graph = job.training.plan.graph
    attend = [op for op in graph.ops if op.target == "flowrun.document_attention.default"]
    if attend:
        yield (
            "attention is foreseen as if one document filled each packed sample: with several a "
            "step takes less"
        )
    if job.device_type != CPU and any(
        graph.tensors[op.inputs[0]].dtype.itemsize == 2 for op in attend
    ):
        yield (
            "FlashAttention 3 attends within documents on Hopper, where it agrees with 2"
            if has_flash_3()
            else "FlashAttention 2 attends within documents; on Hopper 3 is faster (flash_attn_3)"
        )


def _note_updates(job: Job) -> Iterator[str]:
    """Note the updates of a step, in their order."""
    named = job.recipe.updates if job.others else ()
    steps = (1, *(update.every for update, _ in job.others))
    jobs = (job, *(other for _, other in job.others))
    for given, every, each in zip(named, steps, jobs, strict=False):
        often = "step" if every == 1 else f"{every} steps"
        optim = each.strategy.optimizer.name
        yield f"update {given['name']}, every {often}: {len(each.trained)} parameters, {optim}"
    for longest, each in zip(job.recipe.buckets[::-1], jobs, strict=False):
        foreseen = each.training.rehearsal
        most = size(max(foreseen.peak_bytes))
        yield f"a step of bucket {longest}: {seconds(foreseen.first_step_s)}, a rank {most}"


def _note_groups(job: Job) -> Iterator[str]:
    """Note groups of an update without a parameter of it, and those that are frozen to the end."""
    jobs = (job, *(other for _, other in job.others))
    for k, (given, each) in enumerate(zip(job.recipe.updates or ({},), jobs, strict=False)):
        for pattern in OmegaConf.select(OmegaConf.create(given), "optim.groups") or {}:
            if not fnmatch.filter(each.trained, str(pattern)):
                nothing = f"{given['name']} trains no parameter of that name"
                yield f"updates.{k}.optim.groups.{pattern} has no effect: {nothing}"
        for group in each.strategy.optimizer.groups:
            if (group.frozen_until or 0) >= (steps := each.recipe.train.steps):
                until = f"frozen_until={group.frozen_until}"
                yield f"optim.groups.{group.pattern}.{until}: the run ends before, after {steps}"


FACTS: tuple[Callable[[Job], Iterator[str]], ...] = (
    _note_shared_cores,
    _note_idle_axes,
    _zero_of_one_rank,
    _no_curves,
    _slow_readers,
    _no_validation,
    _note_repeats,
    _note_unchecked_capture,
    _note_copies,
    _note_wide_weights,
    _note_random_base,
    _note_packed_attention,
    _note_updates,
    _note_groups,
)


# ---- keys without effect -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Keys of one section that change nothing, and why, unless a job has what they are about.

    why: a function may return "": they change something.
    """

    section: str
    keys: str
    why: str | Callable[[Job], str]
    unless: Callable[[Job], object] = lambda job: False


def _unread(key: str) -> Callable[[Job], str]:
    """The optimizer has no such number."""
    number = "beta1" if key == "betas" else key

    def why(job: Job) -> str:
        read, own = dict(job.strategy.optimizer.arguments), job.recipe.optim.update
        if own:
            name = own.get("_target_") or own["name"]
            return f"optim.update, {name}, takes its numbers from optim.update"
        return "" if number in read else f"{job.recipe.optim.name} does not read it"

    return why


def _narrow(job: Job) -> bool:
    """Something of the gradients is in another type than fp32."""
    tensors = job.training.plan.graph.tensors.values()
    return any(t.dtype.is_floating_point and t.dtype.itemsize < 4 for t in tensors)


def _blocks_nothing(job: Job) -> str:
    plan, asked = job.training.plan, job.recipe.engine.blocking
    used = {plan.axes[a.work.step.axis] for a in plan.actors if isinstance(a.work, BoxWork)}
    idle = [axis for axis in asked if axis not in used]
    return f"there are no collectives over {', '.join(idle)}" if idle else ""


def _has(key: str) -> Callable[[Job], object]:
    """The recipe's value: nothing, 0 or false leaves the other keys without effect."""
    return attrgetter(f"recipe.{key}")


def _is_virtual(job: Job) -> bool:
    return job.recipe.launch.name == "virtual"


NO_EFFECT = (
    *(NoEffect("optim", key, _unread(key)) for key in ("betas", "eps", "momentum", "weight_decay")),
    NoEffect(
        "optim",
        "sparse",
        "no table is updated by rows",
        lambda job: sparse_tables(job.training.plan.graph),
    ),
    NoEffect("optim", "ema_eval", "optim.ema is off", _has("optim.ema")),
    NoEffect("zero", "axis min_size", "stage is 0", _has("zero.stage")),
    NoEffect(
        "adapters", "rank alpha dropout", "adapters.modules is empty", _has("adapters.modules")
    ),
    NoEffect("recompute", "whole", "no modules", _has("recompute.modules")),
    NoEffect(
        "precision",
        "reduce_dtype accumulate_dtype attention",
        "everything is computed in fp32",
        _narrow,
    ),
    NoEffect(
        "precision",
        "keep_fp32",
        "nothing is kept in bf16",
        lambda job: job.strategy.kept.weights or job.strategy.kept.states,
    ),
    NoEffect(
        "eval",
        "every",
        "no samples are held out (eval.fraction, eval.batches)",
        lambda job: job.materials.sampler.held_out,
    ),
    NoEffect(
        "auto",
        "ignore_user_sbp computation_cost_ratio wait_time trunk sbp_collector memory",
        "auto.enabled is false (parallel=auto)",
        _has("auto.enabled"),
    ),
    NoEffect("auto", "ranks keep plans", "auto.placement is false", _has("auto.placement")),
    NoEffect(
        "auto",
        "seconds",
        "nothing is searched",
        lambda job: job.recipe.auto.enabled or job.recipe.auto.placement,
    ),
    NoEffect("auto", "enabled", "no axis has two ranks", _has("axes")),
    NoEffect("train", "keep keep_best save_aside", "save_every is 0", _has("train.save_every")),
    NoEffect("launch", "message_order_seed", "only launch=virtual reads it", _is_virtual),
    NoEffect(
        "launch",
        "threads data_workers transport nnodes",
        "launch=virtual is one process",
        lambda job: not _is_virtual(job),
    ),
    NoEffect(
        "launch",
        "node_rank rdzv_endpoint",
        "there is one host",
        lambda job: job.recipe.launch.num_hosts > 1,
    ),
    NoEffect("engine", "blocking", _blocks_nothing),
    NoEffect(
        "engine",
        "overwrites",
        "the compiler does this itself",
        lambda job: job.recipe.engine.compiler == EAGER,
    ),
)


def _without_effect(job: Job) -> Iterator[str]:
    for row in NO_EFFECT:
        keys = [key for key in row.keys.split() if _is_asked(job.recipe, row.section, key)]
        if keys and not row.unless(job):
            why = row.why if isinstance(row.why, str) else row.why(job)
            if why:
                yield f"{', '.join(f'{row.section}.{key}' for key in keys)} has no effect: {why}"


def _is_asked(recipe: Recipe, section: str, key: str) -> bool:
    """Return True if the value is not one that a recipe gets by default: the schema's, or of an
    optimizer that of its group, or of the default group.
    """
    groups = ("adamw", recipe.optim.name) if section == "optim" else ()
    given = [_group(section, name).get(key) for name in groups]
    defaults = (tuple(value) if isinstance(value, ListConfig) else value for value in given)
    value = attrgetter(f"{section}.{key}")
    return value(recipe) not in (value(RecipeSchema()), *defaults)


@cache
def _group(section: str, name: str) -> Mapping[str, object]:
    return cast(DictConfig, OmegaConf.load(CONF / section / f"{name}.yaml"))
