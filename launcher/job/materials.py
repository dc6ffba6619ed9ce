"""Materials: the model, the data and the task that a recipe names, made in this process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from flowrun.engine.capture.capture import Batch, CapturedModule, Task
from flowrun.engine.capture.capture_errors import explain_widened
from flowrun.engine.hardware.hardware import CPU
from flowrun.engine.strategy import Pin, Preparation, Strategy
from flowrun.launcher.data.corpus.documents import DIGESTS
from flowrun.launcher.data.mixture import find_mixture
from flowrun.launcher.data.sampler import Sampler, field_types_of, length
from flowrun.launcher.data.steps import preparation, sample_seconds, unprepared_fields
from flowrun.launcher.job.recipe_strategy import AUTOCAST
from flowrun.launcher.model import build, dataset_checks
from flowrun.launcher.model.initial import Initial, with_values
from flowrun.launcher.model.parallel_plan import find_others, read_plan
from flowrun.launcher.model.targets import note_moved
from flowrun.launcher.model.user_modules import note_hidden
from flowrun.launcher.recipe.checks import check_batch
from flowrun.launcher.recipe.hardware_keys import choose_profile
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import require
from flowrun.launcher.recipe.schema import AUTO, FP32, KEEP_DTYPE, NARROW, PRODUCTS


@dataclass(frozen=True, kw_only=True)
class Materials:
    """The materials of a job: what plans are made from, and what training reads.

    initial: value of every parameter and buffer, by the model's own names, each made when it is
        asked for; empty where there is only to be planned.
    digests: of the documents and the tokenizers that `data` has read, by their names.
    sampler, evaluation_sampler: batches of the samples that are trained on, and held out.
    example: the first micro-batch, or one of its shapes where there is only to be planned.
    notes: what a user should know of the model and of the data.
    plan: pins of the model's own plan (sbp.from_model).
    recipe: that they were made by: the model may need another `precision.param_dtype`.
    """

    recipe: Recipe
    model: nn.Module
    initial: Initial
    data: Any
    digests: Mapping[str, str]
    sampler: Sampler
    evaluation_sampler: Sampler
    example: Batch
    task: Task
    notes: tuple[str, ...]
    plan: tuple[Pin, ...] = ()


def make_materials(recipe: Recipe, values: bool, shared: Materials | None = None) -> Materials:
    """Make the model, the data set and the task of a recipe.  Raises RecipeError.

    values: False: for a plan alone, of any size: weights and samples have shapes and no bytes.
    shared: of another update of the same step, whose data it reads, too.
    """
    torch.set_num_threads(1)  # a pool of threads made here would be dead in forked workers
    torch.manual_seed(recipe.train.seed)
    described = build.describe_model(recipe, draws=values)
    digests: dict[str, str] = {}
    reading = DIGESTS.set(digests)
    try:
        data = shared.data if shared else build.instantiate_data(recipe)
    finally:
        DIGESTS.reset(reading)
    dataset_checks.check_vocabulary(
        recipe.model, described.model, data, recipe.data.get("tokenizer")
    )
    sampler = _sampler(recipe, data)
    with dataset_checks.data_errors():
        example = sampler(0, 0, slice(0, recipe.micro_batch_size if values else 1))
    if not values:  # nothing is written, so that they take no page of memory
        example = {name: _repeat(one, recipe.micro_batch_size) for name, one in example.items()}
    sampler = replace(sampler, field_types=field_types_of(example))
    if not recipe.bucket:
        dataset_checks.check_lengths(data, recipe.buckets, example)
    task = make_task(recipe, described.model, example)
    recipe, kept_dtypes = _keep_dtypes(recipe, task, example)
    if kept_dtypes:
        described = build.describe_model(recipe, draws=values)
        task = make_task(recipe, described.model, example)
    if not recipe.collate:
        dataset_checks.check_labels(described.model, task.inputs, recipe.task.loss, data)
    plan = read_plan(described.model, recipe.plan_axis) if recipe.plan_axis else ()
    others = find_others(described.model) if recipe.plan_axis else []
    left = "what else the model's plan says has no pins, and is inferred: "
    return Materials(
        recipe=recipe,
        model=described.model,
        initial=with_values(described.initial, task.tensors) if values else Initial({}),
        data=data,
        digests=digests,
        sampler=sampler,
        evaluation_sampler=replace(sampler, evaluation=True),
        example=example,
        task=task,
        notes=(
            *described.notes,
            *([kept_dtypes] if kept_dtypes else []),
            *note_moved(recipe.data, "data"),
            *note_moved(recipe.callbacks, "callbacks"),
            *note_hidden(),
            *dataset_checks.notes_of(data),
            *([f"sbp.from_model: {left}{', '.join(others)}"] if others else []),
        ),
        plan=plan,
    )


def _keep_dtypes(recipe: Recipe, task: Task, example: Batch) -> tuple[Recipe, str]:
    """Return the recipe, and a note if it keeps weights as the model makes them since forward fails
    with fp32 ones.  Raises RecipeError where it asks for weights that are rounded at random.
    """
    program = CapturedModule(task, tuple(example), {})
    modes = (False, True) if recipe.eval.batches else (True,)
    found = (explain_widened(program.train(mode), tuple(example.values()), mode) for mode in modes)
    why = next(filter(None, found), "")
    if not why:
        return recipe, ""
    problem = f"with weights in fp32 forward of {type(task.model).__name__} fails: {why}"
    instead = "precision.dtype=bf16 computes in bf16 with weights in fp32"
    key, or_keep = "precision.param_dtype", f"Write precision.param_dtype: {KEEP_DTYPE}. {instead}."
    require(recipe.precision.param_dtype == FP32, key, problem, or_keep)
    text = OmegaConf.create(recipe.to_yaml())
    OmegaConf.update(text, key, KEEP_DTYPE)
    precision = replace(recipe.precision, param_dtype=KEEP_DTYPE)
    kept = replace(recipe, precision=precision, text=OmegaConf.to_yaml(text))
    return kept, f"{key}={KEEP_DTYPE}: {problem}; {instead}"


def _repeat(one: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a batch of one sample (1, …) again and again; arbitrary numbers if it is large."""
    if one.nbytes * rows < 1 << 20:
        return one.expand(rows, *one.shape[1:]).clone(memory_format=torch.contiguous_format)
    return one.new_empty(rows, *one.shape[1:])


def make_task(recipe: Recipe, model: nn.Module, example: Batch) -> Task:
    """Make what a run computes with a model, of which there may be several: the one that ranks
    train, and one that a command loads.

    example: a batch that the model is to read.  The model is made ready for such batches: one of
    transformers attends within packed documents.  Raises RecipeError.
    """
    attention = recipe.precision.attention
    if attention == AUTO:  # the profile says, not this host: a plan is the same on every machine
        attention = FP32 if choose_profile(recipe).device == CPU else NARROW
    return Task(
        model,
        build.task_inputs(recipe, model, example),
        build.instantiate_loss(recipe),
        build.instantiate_metrics(recipe),
        autocast=AUTOCAST[recipe.precision.dtype],
        narrow_residual=recipe.precision.residual == NARROW,
        decomposed_attention=recipe.engine.attention == PRODUCTS,
        low_precision_attention=attention == NARROW,
        seed=recipe.train.seed,
        keep_logits=recipe.engine.keeps_logits,
        run_checks=recipe.engine.check,
    )


def add_materials(strategy: Strategy, materials: Materials, workers: int) -> Strategy:
    """Add how the data set makes its samples (launcher/data/steps.py), and the pins of the model's
    own plan, before those of the recipe, which replace them.

    strategy: of the recipe.  materials: with the data set and the plan.  workers: processes of a
    rank that make whole samples, each another batch.
    """
    data, auto = materials.data, strategy.auto
    steps = preparation(data)
    sample_s = sample_seconds(data)
    if workers:
        sample_s = (sample_s or sum(step.seconds for step in steps)) / workers
        steps = ()
    plan = () if auto.enabled and auto.ignore_user_sbp else materials.plan
    return replace(
        strategy,
        pins=(*plan, *strategy.pins),
        preparation=tuple(Preparation(step.name, step.seconds, step.num_bytes) for step in steps),
        unprepared=() if materials.sampler.own_collate else tuple(unprepared_fields(data)),
        sample_s=sample_s,
    )


def with_steps(recipe: Recipe) -> Recipe:
    """Return the recipe with the number of steps that train.epochs are, for which its data set is
    made once more.
    """
    train = recipe.train
    if not train.epochs:
        return recipe
    samples = length(data := build.instantiate_data(recipe)) - _held_out(recipe, data)
    steps = max(1, math.ceil(train.epochs * samples / train.batch_size))
    return replace(recipe, train=replace(train, steps=steps))


def _held_out(recipe: Recipe, data: Any) -> int:
    """Return how many samples are held out.  Raise RecipeError for a mixture that holds out others:
    samples that are evaluated would be trained on as well.
    """
    held_out = int(length(data) * recipe.eval.fraction) if recipe.eval.batches else 0
    if held_out and (found := find_mixture(data)):
        place, mixture = found
        require(
            held_out == mixture.order.held_out,
            f"{place}.held_out",
            f"the mixture holds out {mixture.order.held_out:,} of {length(mixture):,} samples, and "
            f"eval.fraction={recipe.eval.fraction} holds out {held_out:,}: some that are evaluated "
            "would be trained on.",
            f"Write {place}.held_out=${{eval.fraction}}.",
        )
    return held_out


def _sampler(recipe: Recipe, data: Any) -> Sampler:
    """The samples that are trained on; raises RecipeError where they fill no batch."""
    held_out = _held_out(recipe, data)
    check_batch(recipe, length(data) - held_out)
    return Sampler(
        order=build.instantiate_order(recipe, data, length(data) - held_out),
        own_collate=build.instantiate_collate(recipe),
        data=data,
        seed=recipe.train.seed,
        batch_size=recipe.train.batch_size,
        micro_batches=recipe.train.micro_batches,
        held_out=held_out,
        buckets=recipe.buckets,
        bucket=recipe.bucket,
    )
