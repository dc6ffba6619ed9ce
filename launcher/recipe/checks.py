"""Check what the keys of a recipe say together.  Each check raises RecipeError with the key, the
facts and what to write instead.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace

from flowrun.engine.ir.placement import BATCH_AXES
from flowrun.engine.strategy import Zero
from flowrun.launcher.recipe import hydra_source
from flowrun.launcher.recipe.hardware_keys import check_hardware
from flowrun.launcher.recipe.placement_keys import FROM_MODEL, parse_pins, parse_plan_axis
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import CommandLineError, did_you_mean, one_of, require
from flowrun.launcher.recipe.schema import (
    BF16,
    KEEPABLE,
    KEPT,
    MIRRORED,
    OBJECTIVES,
    ROLLBACK,
    VALIDATION,
    WEIGHTS,
    Nodes,
    RecipeSchema,
    nodes_of,
    time_limit_s,
)
from flowrun.launcher.recipe.value_ranges import MOST_RANKS, check_values


def zero_of(recipe: RecipeSchema) -> Zero:
    """ZeRO shards over the axis that divides the batch, unless the recipe names another."""
    batch_axis = next((axis for axis in recipe.placement.axes if axis in BATCH_AXES), None)
    return (
        replace(recipe.zero, axis=recipe.zero.axis or batch_axis)
        if recipe.zero.stage
        else recipe.zero
    )


def _check_named(recipe: RecipeSchema) -> None:
    if not recipe.name and not recipe.model:
        raise CommandLineError(
            "recipe",
            "no recipe is named.",
            "Write recipe=NAME or recipe=path/to/file.yaml."
            f"\nThere is: {', '.join(hydra_source.recipe_names())}.",
        )


def _check_targets(recipe: RecipeSchema) -> None:
    examples = {
        "model": "torch.nn.Linear, or model=gpt_tiny",
        "data": "my_package.MyDataset, or data=text",
    }
    targets: dict[str, object] = {"model": recipe.model, "data": recipe.data}
    if recipe.task.loss is not None:
        targets["task.loss"] = recipe.task.loss
    targets |= {f"task.metrics.{name}": metric for name, metric in recipe.task.metrics.items()}
    for where, target in targets.items():
        example = examples.get(where, "flowrun.models.losses.cross_entropy")
        name = target.get("_target_") if isinstance(target, dict) else None
        given = isinstance(name, str) and bool(name)
        require(
            given,
            f"{where}._target_",
            "nothing says what to build.",
            f"Write the dotted path of a class or function, such as {example}.",
        )

    weights = recipe.model.get(WEIGHTS)
    require(
        weights is None or isinstance(weights, str),
        f"model.{WEIGHTS}",
        f"{weights!r} is not a path.",
        "Write a .safetensors file, or a folder of Hugging Face's.",
    )


def _check_train(recipe: RecipeSchema) -> None:
    train = recipe.train
    near = [n for n in range(1, min(train.batch_size, 4096) + 1) if train.batch_size % n == 0]
    require(
        train.batch_size % train.micro_batches == 0,
        "train.micro_batches",
        f"{train.batch_size} samples of a step cannot be divided into {train.micro_batches}"
        " micro-batches.",
        f"batch_size {train.batch_size} can be divided by {', '.join(map(str, near))}.",
    )


def _check_optim(recipe: RecipeSchema) -> None:
    optim = recipe.optim
    betas = optim.betas
    require(
        len(betas) == 2,
        "optim.betas",
        f"betas are two numbers, not {list(betas)}.",
        "Usual are [0.9, 0.95] and [0.9, 0.999].",
    )
    require(
        optim.momentum > 0 or not optim.nesterov,
        "optim.nesterov",
        "nesterov needs momentum, which is 0.",
        "Set optim.momentum, usually 0.9.",
    )


def _check_zero(recipe: RecipeSchema) -> None:
    zero, axes = recipe.zero, recipe.placement.axes
    if zero.axis is not None:
        require(
            zero.axis in axes,
            "zero.axis",
            f"the placement has no axis {zero.axis!r}; its axes: {', '.join(axes) or 'none'}.",
            did_you_mean(zero.axis, axes) if axes else "Add it: placement: {axes: {data: 2}}.",
        )
    require(
        zero_of(recipe).stage == 0 or zero_of(recipe).axis is not None,
        "zero.stage",
        f"ZeRO {zero.stage} needs an axis to shard over.",
        "Set zero.axis, or add an axis that divides the batch: placement: {axes: {data: 2}}.",
    )


def _check_view(recipe: RecipeSchema) -> None:
    if recipe.view != MIRRORED:
        return
    axes = {axis: size for axis, size in recipe.placement.axes.items() if size > 1}
    others = [axis for axis in axes if axis not in BATCH_AXES]
    pins = parse_pins(recipe.sbp, tuple(recipe.placement.axes))
    pinned = next((pin.key for pin in pins if pin.axis in axes), "")
    if parse_plan_axis(recipe.sbp, tuple(recipe.placement.axes)) in axes:
        pinned = f"sbp.{FROM_MODEL}"
    wrong = (
        (others, f"the axis {', '.join(others)} divides them over ranks."),
        (recipe.placement.stages != 1, "placement.stages divides the model over ranks."),
        (pinned, f"{pinned} lays out one logical batch, which this view does not have."),
    )
    for here, problem in wrong:
        require(
            not here,
            "view",
            f"in the mirrored view each rank has a batch and a model of its own, but {problem}",
            f"Use axes named {' or '.join(BATCH_AXES)} alone, or view: consistent.",
        )


def _check_recompute(recipe: RecipeSchema) -> None:
    modules, keep = recipe.recompute.modules, recipe.recompute.keep
    for name in keep:
        require(
            name in KEPT,
            "recompute.keep",
            f"{name!r} is not a class of ops that can be kept.",
            f"Write {one_of(KEPT)}; an empty list keeps only the inputs of the modules.",
        )
    require(
        bool(modules) or not keep,
        "recompute.keep",
        "recompute.modules is empty: nothing is recomputed, so nothing can be kept.",
        'Name modules: recompute: {modules: ["blocks.*"]}.',
    )


def _check_auto(recipe: RecipeSchema) -> None:
    auto = recipe.auto
    require(
        not auto.enabled or recipe.view != MIRRORED,
        "auto.enabled",
        "in the mirrored view every rank computes its whole batch: there is no layout to search.",
        "Write view: consistent, or auto.enabled: false.",
    )


def _check_precision(recipe: RecipeSchema) -> None:
    dtype, scale = recipe.precision.dtype, recipe.precision.loss_scale
    require(
        recipe.precision.accumulate_dtype == "fp32" or recipe.precision.reduce_dtype is None,
        "precision.reduce_dtype",
        "gradients accumulated in the dtype they were computed in are also reduced in it.",
        "Leave it out, or set precision.accumulate_dtype=fp32.",
    )
    _check_kept(recipe)
    if scale is None:
        return
    require(
        dtype == "fp16",
        "precision.loss_scale",
        f"{dtype} has the range of fp32: its gradients need no scale.",
        "Leave it out, or set precision.dtype=fp16.",
    )
    require(
        scale == "dynamic" or not isinstance(scale, str),
        "precision.loss_scale",
        f"a loss scale must be dynamic or a number over 0, not {scale}.",
        "Usual are dynamic, and powers of two such as 1024.",
    )


def _check_kept(recipe: RecipeSchema) -> None:
    """Weights and states that are kept in bf16."""
    precision, optim = recipe.precision, recipe.optim
    kept = [key for key in ("param_dtype", "state_dtype") if getattr(precision, key) == BF16]
    require(
        not optim.ema or precision.param_dtype != BF16,
        "optim.ema",
        "a moving average of weights that are kept in bf16 would hardly move.",
        "Leave it out, or set precision.param_dtype=fp32.",
    )
    require(
        not kept or optim.sparse != "lazy",
        "optim.sparse",
        f"tables are updated whole where precision.{''.join(kept[:1])} is bf16.",
        "Write optim.sparse=exact.",
    )


def _check_keep_best(recipe: RecipeSchema) -> None:
    name, known = recipe.train.keep_best.removeprefix("-"), ["loss", *recipe.task.metrics]
    require(
        not name or name in known,
        "train.keep_best",
        f"{name} is not a result of an evaluation.",
        f"Write {one_of(known)}; -NAME keeps the highest, NAME the lowest.",
    )
    require(
        not name or bool(recipe.eval.batches and recipe.eval.fraction),
        "train.keep_best",
        "checkpoints are compared by evaluations, and no samples are held out.",
        "Set eval.batches and eval.fraction over 0, or leave train.keep_best out.",
    )


def _check_sweep(recipe: RecipeSchema) -> None:
    name = recipe.sweep.objective
    results = [f"{VALIDATION}{metric}" for metric in ("loss", *recipe.task.metrics)]
    require(
        not name or name in (*OBJECTIVES, *results),
        "sweep.objective",
        f"{name} is not a result of a run.",
        f"Write {one_of((*OBJECTIVES, *results))}.",
    )
    require(
        not name.startswith(VALIDATION) or bool(recipe.eval.batches and recipe.eval.fraction),
        "sweep.objective",
        "no samples are held out, so nothing is evaluated.",
        "Set eval.batches and eval.fraction over 0, or write loss.",
    )


def _check_launch(recipe: RecipeSchema) -> None:
    launch, hosts = recipe.launch, _check_nodes(recipe)
    require(
        launch.transport != "shared"
        or (sys.platform == "linux" and launch.num_hosts == 1 and launch.device != "cuda"),
        "launch.transport",
        "shared memory serves only CPU ranks of one host, on Linux.",
        "Write auto: it takes shared memory where possible, else gloo.",
    )
    require(
        hosts.most == 1 or bool(launch.rdzv_endpoint) or launch.name == "slurm",
        "launch.rdzv_endpoint",
        f"{launch.nnodes} hosts need an endpoint for their rendezvous.",
        "Write launch.rdzv_endpoint=host:port, the same on every host.",
    )
    require(
        not launch.rdzv_endpoint or bool(re.fullmatch(r"\S+:\d{1,5}", launch.rdzv_endpoint)),
        "launch.rdzv_endpoint",
        f"an endpoint is HOST:PORT, not {launch.rdzv_endpoint}.",
        "Write a host's name or address and a port that is free there: node0:29500.",
    )
    rank = launch.node_rank
    require(
        rank is None or 0 <= rank < hosts.most,
        "launch.node_rank",
        f"{hosts.most} hosts have node ranks 0 to {hosts.most - 1}, not {rank}.",
    )


def _check_nodes(recipe: RecipeSchema) -> Nodes:
    """Check launch.nnodes, and what hosts that may join and leave exclude."""
    launch = recipe.launch
    try:
        hosts = nodes_of(launch)
    except ValueError:
        hosts = Nodes(0, 0, may_change=False)
    require(
        0 < hosts.most <= MOST_RANKS,
        "launch.nnodes",
        f"it must be a number of hosts or MIN:MAX, not {launch.nnodes!r}.",
        'Write launch.nnodes=2, or launch.nnodes="1:4".',
    )
    fixed = not hosts.may_change
    require(
        fixed or launch.name == "local",
        "launch.nnodes",
        f"hosts join and leave a run only with launch=local, not {launch.name}.",
        f"Write launch.nnodes={hosts.most}.",
    )
    require(
        fixed or launch.node_rank is None,
        "launch.node_rank",
        "hosts that join and leave get new numbers each time.",
        "Leave it out.",
    )
    require(
        fixed or recipe.view != MIRRORED,
        "launch.nnodes",
        "in the mirrored view fewer hosts would train something else: each rank has a batch of"
        " its own.",
        f"Write launch.nnodes={hosts.most}.",
    )
    return hosts


def _check_restarts(recipe: RecipeSchema) -> None:
    launch = recipe.launch
    require(
        not launch.restarts or launch.name != "virtual",
        "launch.restarts",
        "only ranks that are processes are started again.",
        "Write launch.restarts=0.",
    )
    require(
        launch.min_ranks is None or bool(launch.restarts),
        "launch.min_ranks",
        "ranks become fewer where restarts do not help, and launch.restarts is 0.",
        "Write launch.restarts=3, or leave it out.",
    )
    require(
        launch.min_ranks is None or launch.num_hosts == 1,
        "launch.min_ranks",
        f"the ranks of one host may become fewer, and there are {launch.num_hosts} hosts.",
        f'Let hosts leave: launch.nnodes="1:{launch.num_hosts}".',
    )
    require(
        launch.min_ranks is None or recipe.view != MIRRORED,
        "launch.min_ranks",
        "in the mirrored view fewer ranks would train something else: each has a batch of its own.",
        "Write view=consistent, or leave it out.",
    )
    hosts = nodes_of(launch)
    require(
        hosts.most == 1 or not recipe.train.snapshot_every,
        "train.snapshot_every",
        f"train.snapshot_every needs one host, as a host takes its memory with it; launch.nnodes is"
        f" {launch.nnodes}.",
        "Leave it out and set train.save_every: ranks do not wait for the disk.",
    )
    require(
        bool(launch.restarts) or not recipe.train.snapshot_every,
        "train.snapshot_every",
        "snapshots serve restarts, and launch.restarts is 0.",
        "Write launch.restarts=3, or leave it out.",
    )


def _check_rollback(recipe: RecipeSchema) -> None:
    if recipe.train.on_nonfinite != ROLLBACK:
        return
    require(
        recipe.train.save_every > 0,
        "train.on_nonfinite",
        "a rollback takes the weights of a checkpoint, and train.save_every is 0.",
        "Write train.save_every=100, or on_nonfinite: skip.",
    )
    require(
        recipe.launch.num_hosts == 1,
        "train.on_nonfinite",
        "only the ranks of one host are started again, which a rollback does.",
        "Write on_nonfinite: skip, or stop.",
    )


def _check_time_limit(recipe: RecipeSchema) -> None:
    launch = recipe.launch
    try:
        limit = time_limit_s(launch)
    except ValueError:
        limit = 0
    require(
        limit is None or limit > 0,
        "launch.time_limit",
        f"{launch.time_limit!r} is not a time.",
        'Write minutes, such as 90, or "01:30:00".',
    )


def _check_engine(recipe: RecipeSchema) -> None:
    for axis in recipe.engine.blocking:
        require(
            axis in recipe.placement.axes,
            "engine.blocking",
            f"there is no axis {axis!r}.",
            f"The placement has {', '.join(recipe.placement.axes) or 'none'}.",
        )


def _check_placement(recipe: RecipeSchema) -> None:
    for key in recipe.auto.keep:
        require(
            any(key == known or known.startswith(f"{key}.") for known in KEEPABLE),
            "auto.keep",
            f"{key!r} is not chosen by auto.placement.",
            f"Write {one_of(KEEPABLE)}, or a section of these, such as placement.",
        )


def check_batch(recipe: Recipe, samples: int) -> None:
    """A micro-batch holds no sample twice.  samples: to train on.  Raises RecipeError."""
    require(
        recipe.micro_batch_size <= samples,
        "train.batch_size",
        f"a micro-batch of {recipe.micro_batch_size:,} samples is more than the data set has to"
        f" train on: {samples:,}.",
        "Use a smaller train.batch_size, or more train.micro_batches.",
    )


CHECKS = (
    _check_named,
    check_values,
    _check_targets,
    _check_train,
    _check_keep_best,
    _check_sweep,
    _check_optim,
    _check_zero,
    _check_view,
    _check_auto,
    _check_placement,
    _check_recompute,
    _check_precision,
    _check_launch,
    _check_restarts,
    _check_rollback,
    _check_time_limit,
    _check_engine,
    check_hardware,
)
