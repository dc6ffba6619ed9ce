"""Check what the keys of a recipe say together: a table of what cannot be."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.placement import BATCH_AXES, LENGTH_AXES
from flowrun.engine.strategy import Zero
from flowrun.launcher.recipe import hydra_source, schema
from flowrun.launcher.recipe.hardware_keys import check_hardware
from flowrun.launcher.recipe.placement_keys import FROM_MODEL, check_axis, parse_pins
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import CommandLineError, one_of, require
from flowrun.launcher.recipe.schema import Nodes, RecipeSchema
from flowrun.launcher.recipe.value_ranges import MOST_RANKS, check_values
from flowrun.launcher.urls.object_store import is_url


@dataclass(frozen=True)
class Contradiction:
    """Keys that cannot stand together.

    where: the key that the error names.  holds: whether a recipe has it, or what of it is wrong.
    problem: the facts; {launch.nnodes} stands for the value of a key, and {0} for what `holds`
    returned.  instead: what to write, with {0}, too.
    """

    where: str
    holds: Callable[[RecipeSchema], object]
    problem: str
    instead: str


def _hosts(r: RecipeSchema) -> Nodes:
    try:
        return schema.nodes_of(r.launch)
    except ValueError:
        return Nodes(0, 0, may_change=False)


def _has_bad_time(r: RecipeSchema) -> bool:
    try:
        limit = schema.time_limit_s(r.launch)
    except ValueError:
        return True
    return limit is not None and limit <= 0


def _has_bad_monitor(r: RecipeSchema) -> bool:
    try:
        schema.monitor_address(r.launch)
    except ValueError:
        return True
    return False


def _holds_out(r: RecipeSchema) -> bool:
    return bool(r.eval.batches and r.eval.fraction)


def _others(name: str, names: Iterable[str]) -> str:
    """Return the names that may stand where a name stands that is none of them; "" if it is one."""
    known = tuple(names)
    return one_of(known) if name and name not in known else ""


def _axes_of_many(r: RecipeSchema) -> list[str]:
    return [axis for axis, size in r.placement.axes.items() if size > 1]


def _axes_of_length(r: RecipeSchema) -> str:
    return ", ".join(axis for axis in _axes_of_many(r) if axis in LENGTH_AXES)


def _find_pin_key(r: RecipeSchema) -> str:
    """Return a key of `sbp` for an axis of several ranks; "" if there is none."""
    axes, own = _axes_of_many(r), f"sbp.{FROM_MODEL}"
    pins = parse_pins(r.sbp, tuple(r.placement.axes))
    return (
        own
        if r.sbp.get(FROM_MODEL) in axes
        else next((pin.key for pin in pins if pin.axis in axes), "")
    )


def _kept_narrow(r: RecipeSchema) -> str:
    keys = ("param_dtype", "state_dtype")
    return next((key for key in keys if getattr(r.precision, key) == schema.BF16), "")


def _find_single(r: RecipeSchema) -> str:
    """Return what several plans of a run cannot have; "" if there is nothing, or one plan."""
    several = r.updates or r.data.get(schema.BUCKETS)
    found = {
        "data.buckets": r.updates and r.data.get(schema.BUCKETS),
        "auto.placement=true": r.auto.placement,
        "parallel=auto": r.auto.enabled,
        "view=mirrored": r.view == schema.MIRRORED,
        "placement.chunks over 1": r.placement.chunks > 1,
        "placement.states=host": r.placement.states == schema.HOST,
        "launch.data_workers": r.launch.data_workers,
        "engine.trace": r.engine.trace,
    }
    return next((key for key, there in found.items() if there), "") if several else ""


_OWN_BATCH = "in the mirrored view each rank has a batch and a model of its own, but "
_ONE_BATCH = "Use axes named {} alone, or view: consistent.".format(" or ".join(BATCH_AXES))
_NOT_FEWER = "in the mirrored view fewer ranks would train something else: each has its own batch."

CONTRADICTIONS = (
    Contradiction(
        "train.keep_best",
        lambda r: _others(r.train.keep_best.removeprefix("-"), ("loss", *r.task.metrics)),
        "{train.keep_best} is not a result of an evaluation.",
        "Write {0}; -NAME keeps the highest, NAME the lowest.",
    ),
    Contradiction(
        "train.keep_best",
        lambda r: r.train.keep_best and not _holds_out(r),
        "checkpoints are compared by evaluations, and no samples are held out.",
        "Set eval.batches and eval.fraction over 0, or leave train.keep_best out.",
    ),
    Contradiction(
        schema.STORE,
        lambda r: r.train.store and not is_url(r.train.store),
        "{train.store} is not a URL.",
        "Write s3://BUCKET/FOLDER; hydra.run.dir names the folder on the disk.",
    ),
    Contradiction(
        "sweep.objective",
        lambda r: _others(
            r.sweep.objective,
            (*schema.OBJECTIVES, *(schema.VALIDATION + name for name in ("loss", *r.task.metrics))),
        ),
        "{sweep.objective} is not a result of a run.",
        "Write {0}.",
    ),
    Contradiction(
        "sweep.objective",
        lambda r: r.sweep.objective.startswith(schema.VALIDATION) and not _holds_out(r),
        "no samples are held out, so nothing is evaluated.",
        "Set eval.batches and eval.fraction over 0, or write loss.",
    ),
    Contradiction(
        "optim.betas",
        lambda r: len(r.optim.betas) != 2,
        "betas are two numbers, not {optim.betas}.",
        "Usual are [0.9, 0.95] and [0.9, 0.999].",
    ),
    Contradiction(
        "optim.nesterov",
        lambda r: r.optim.nesterov and not r.optim.momentum,
        "nesterov needs momentum, which is 0.",
        "Set optim.momentum, usually 0.9.",
    ),
    Contradiction(
        "zero.stage",
        lambda r: zero_of(r).stage and zero_of(r).axis is None,
        "ZeRO {zero.stage} needs an axis to shard over.",
        "Set zero.axis, or add an axis that divides the batch: placement: {axes: {data: 2}}.",
    ),
    Contradiction(
        "view",
        lambda r: r.view == schema.MIRRORED and ", ".join({*_axes_of_many(r)} - {*BATCH_AXES}),
        f"{_OWN_BATCH}the axis {{0}} divides them over ranks.",
        _ONE_BATCH,
    ),
    Contradiction(
        "view",
        lambda r: r.view == schema.MIRRORED and r.placement.stages != 1,
        f"{_OWN_BATCH}placement.stages divides the model over ranks.",
        _ONE_BATCH,
    ),
    Contradiction(
        "view",
        lambda r: r.view == schema.MIRRORED and _find_pin_key(r),
        f"{_OWN_BATCH}{{0}} lays out one logical batch, which this view does not have.",
        _ONE_BATCH,
    ),
    Contradiction(
        "auto.enabled",
        lambda r: r.auto.enabled and r.view == schema.MIRRORED,
        "in the mirrored view every rank computes its whole batch: there is no layout to search.",
        "Write view: consistent, or auto.enabled: false.",
    ),
    Contradiction(
        "auto.seconds",
        lambda r: r.auto.seconds is not None and _hosts(r).most > 1,
        "each host searches for itself, and in the same seconds not all would get as far.",
        "Leave it out, or search on one host: flowrun plan … --save-recipe FILE.",
    ),
    Contradiction(
        "recompute.keep",
        lambda r: r.recompute.keep and not r.recompute.modules,
        "recompute.modules is empty: nothing is recomputed, so nothing can be kept.",
        'Name modules: recompute: {modules: ["blocks.*"]}.',
    ),
    Contradiction(
        "precision.reduce_dtype",
        lambda r: r.precision.reduce_dtype and not r.precision.accumulate_dtype,
        "gradients accumulated in the dtype they were computed in are also reduced in it.",
        "Leave it out, or set precision.accumulate_dtype=fp32.",
    ),
    Contradiction(
        "precision.loss_scale",
        lambda r: r.precision.loss_scale is not None and r.precision.dtype != "fp16",
        "{precision.dtype} has the range of fp32: its gradients need no scale.",
        "Leave it out, or set precision.dtype=fp16.",
    ),
    Contradiction(
        "optim.ema",
        lambda r: r.optim.ema and r.precision.param_dtype == schema.BF16,
        "a moving average of weights that are kept in bf16 would hardly move.",
        "Leave it out, or set precision.param_dtype=fp32.",
    ),
    Contradiction(
        "optim.sparse",
        lambda r: r.optim.sparse == "lazy" and _kept_narrow(r),
        "tables are updated whole where precision.{0} is bf16.",
        "Write optim.sparse=exact.",
    ),
    Contradiction(
        "launch.nnodes",
        lambda r: not 0 < _hosts(r).most <= MOST_RANKS,
        "it must be a number of hosts or MIN:MAX, not {launch.nnodes!r}.",
        'Write launch.nnodes=2, or launch.nnodes="1:4".',
    ),
    Contradiction(
        "launch.nnodes",
        lambda r: _hosts(r).may_change and r.launch.name not in ("local", "ray"),
        "hosts join and leave a run only with launch=local or ray, not {launch.name}.",
        "Write launch.nnodes=2, a number of hosts that stay.",
    ),
    Contradiction(
        "launch.nnodes",
        lambda r: _hosts(r).may_change and r.view == schema.MIRRORED,
        _NOT_FEWER,
        "Write launch.nnodes=2, a number of hosts that stay.",
    ),
    Contradiction(
        "launch.node_rank",
        lambda r: _hosts(r).may_change and r.launch.node_rank is not None,
        "hosts that join and leave get new numbers each time.",
        "Leave it out.",
    ),
    Contradiction(
        "launch.node_rank",
        lambda r: not 0 <= (r.launch.node_rank or 0) < _hosts(r).most,
        "it is the number of a host, from 0 to launch.nnodes - 1, not {launch.node_rank}.",
        "Leave it out where launch.rdzv_endpoint is given: hosts number themselves.",
    ),
    Contradiction(
        "launch.transport",
        lambda r: (
            r.launch.transport == "shared"
            and (sys.platform != "linux" or _hosts(r).most > 1 or r.launch.device == "cuda")
        ),
        "shared memory serves only CPU ranks of one host, on Linux.",
        "Write auto: it takes shared memory where possible, else gloo.",
    ),
    Contradiction(
        "launch.rdzv_endpoint",
        lambda r: (
            _hosts(r).most > 1
            and not r.launch.rdzv_endpoint
            and r.launch.name not in ("slurm", "ray")
        ),
        "{launch.nnodes} hosts need an endpoint for their rendezvous.",
        "Write launch.rdzv_endpoint=host:port, the same on every host.",
    ),
    Contradiction(
        "launch.rdzv_endpoint",
        lambda r: not re.fullmatch(r"(\S+:\d{1,5}([ ,]+\S+:\d{1,5})*)?", r.launch.rdzv_endpoint),
        "an endpoint is HOST:PORT, or several with spaces between, not {launch.rdzv_endpoint}.",
        "Write a host's name or address and a port that is free there: node0:29500.",
    ),
    Contradiction(
        "launch.restarts",
        lambda r: r.launch.restarts and r.launch.name == "virtual",
        "only ranks that are processes are started again.",
        "Write launch.restarts=0.",
    ),
    Contradiction(
        "launch.min_ranks",
        lambda r: r.launch.min_ranks is not None and not r.launch.restarts,
        "ranks become fewer where restarts do not help, and launch.restarts is 0.",
        "Write launch.restarts=3, or leave it out.",
    ),
    Contradiction(
        "launch.min_ranks",
        lambda r: r.launch.min_ranks is not None and _hosts(r).most > 1,
        "the ranks of one host may become fewer, and launch.nnodes is {launch.nnodes}.",
        'Let hosts leave: launch.nnodes="1:2".',
    ),
    Contradiction(
        "launch.min_ranks",
        lambda r: r.launch.min_ranks is not None and r.view == schema.MIRRORED,
        _NOT_FEWER,
        "Write view=consistent, or leave it out.",
    ),
    Contradiction(
        "train.snapshot_every",
        lambda r: r.train.snapshot_every and _hosts(r).most > 1,
        "train.snapshot_every needs one host, as a host takes its memory with it; launch.nnodes is"
        " {launch.nnodes}.",
        "Leave it out and set train.save_every: ranks do not wait for the disk.",
    ),
    Contradiction(
        "train.snapshot_every",
        lambda r: r.train.snapshot_every and not r.launch.restarts,
        "snapshots serve restarts, and launch.restarts is 0.",
        "Write launch.restarts=3, or leave it out.",
    ),
    Contradiction(
        "train.on_nonfinite",
        lambda r: r.train.on_nonfinite == schema.ROLLBACK and not r.train.save_every,
        "a rollback takes the weights of a checkpoint, and train.save_every is 0.",
        "Write train.save_every=100, or on_nonfinite: skip.",
    ),
    Contradiction(
        "train.on_nonfinite",
        lambda r: r.train.on_nonfinite == schema.ROLLBACK and _hosts(r).most > 1,
        "only the ranks of one host are started again, which a rollback does.",
        "Write on_nonfinite: skip, or stop.",
    ),
    Contradiction(
        "placement.schedule",
        lambda r: r.placement.schedule and r.placement.in_flight is not None,
        "placement.in_flight={placement.in_flight} names a schedule, too.",
        "Leave one of both out.",
    ),
    Contradiction(
        "placement.schedule",
        lambda r: r.placement.schedule and r.auto.placement,
        "auto.placement searches among the schedules of placement.in_flight.",
        "Leave placement.schedule out, or write auto.placement=false.",
    ),
    Contradiction(
        "placement.chunks",
        lambda r: str(r.placement.in_flight).startswith("v_") and r.placement.chunks != 2,
        "{placement.in_flight} goes down the stages and up again, which makes 2 chunks of each, and"
        " placement.chunks is {placement.chunks}.",
        "Write placement.chunks=2, or another placement.in_flight.",
    ),
    Contradiction(
        "engine.loss_chunks",
        lambda r: r.engine.loss_chunks > 1 and _holds_out(r) and ", ".join(r.task.metrics),
        "no whole logits are made, which the metric {0} reads.",
        "Leave the metric out, as task.metrics.{0}=null does, or write engine.loss_chunks=1.",
    ),
    Contradiction(
        "engine.long_attention",
        lambda r: r.engine.long_attention != schema.AUTO and not _axes_of_length(r),
        "no axis of the placement divides lengths.",
        "Add one, as in placement: {axes: {context: 2}}, or leave the key out.",
    ),
    Contradiction(
        "updates",
        lambda r: r.updates and _find_single(r),
        "several updates of a step cannot be combined with {0}.",
        "Leave {0} out, or make one update of a sum of losses.",
    ),
    Contradiction(
        f"data.{schema.BUCKETS}",
        lambda r: not r.updates and _find_single(r),
        "batches of several lengths cannot be combined with {0}.",
        "Leave {0} out, or pad all samples to one length.",
    ),
    Contradiction(
        "launch.time_limit",
        _has_bad_time,
        "{launch.time_limit!r} is not a time.",
        'Write minutes, such as 90, or "01:30:00".',
    ),
    Contradiction(
        "launch.monitor",
        _has_bad_monitor,
        "{launch.monitor!r} is not an address.",
        "Write a port, such as 9400, 0.0.0.0:9400 or unix:run.sock.",
    ),
)


def check(recipe: RecipeSchema) -> None:
    """Check the values of all keys, and what they say together.  Raises RecipeError with the key,
    the facts and what to write instead.
    """
    if not recipe.name and not recipe.model:
        raise CommandLineError(
            "recipe",
            "no recipe is named.",
            "Write recipe=NAME or recipe=path/to/file.yaml."
            f"\nThere is: {', '.join(hydra_source.recipe_names())}.",
        )
    check_values(recipe)
    _check_targets(recipe)
    _check_micro_batches(recipe.train.batch_size, recipe.train.micro_batches)
    axes = recipe.placement.axes
    for where, named in (
        ("zero.axis", [recipe.zero.axis]),
        ("engine.blocking", recipe.engine.blocking),
    ):
        for axis in filter(None, named):
            check_axis(where, axis, axes)
    for each in CONTRADICTIONS:
        if found := each.holds(recipe):
            raise RecipeError(
                each.where,
                each.problem.format(found, **vars(recipe)),
                each.instead.replace("{0}", str(found)),
            )
    check_hardware(recipe)


def zero_of(recipe: RecipeSchema) -> Zero:
    """ZeRO shards over the axis that divides the batch, unless the recipe names another."""
    zero = recipe.zero
    batch_axis = next((axis for axis in recipe.placement.axes if axis in BATCH_AXES), None)
    return replace(zero, axis=zero.axis or batch_axis) if zero.stage else zero


def _check_targets(recipe: RecipeSchema) -> None:
    targets: dict[str, object] = {"model": recipe.model, "data": recipe.data}
    if recipe.task.loss is not None:
        targets["task.loss"] = recipe.task.loss
    targets |= {f"task.metrics.{name}": metric for name, metric in recipe.task.metrics.items()}
    for where, target in targets.items():
        name = target.get("_target_") if isinstance(target, dict) else None
        require(
            isinstance(name, str) and bool(name),
            f"{where}._target_",
            "nothing says what to build.",
            "Write the dotted path of a class or function, such as torch.nn.Linear"
            + (f", or a choice: {where}=NAME." if where in ("model", "data") else "."),
        )
    for key in schema.OF_BATCHES:
        if (given := recipe.data.get(key)) is not None:
            written = isinstance(given, dict) and isinstance(given.get(schema.TARGET), str)
            instead = f"Write data.{key}: {{_target_: my_data.{key}}}."
            require(written, f"data.{key}", f"{given!r} names no function.", instead)
    _check_buckets(recipe.data.get(schema.BUCKETS) or [])
    weights = recipe.model.get(schema.WEIGHTS)
    require(
        weights is None or isinstance(weights, str),
        f"model.{schema.WEIGHTS}",
        f"{weights!r} is not a path.",
        "Write a .safetensors file, or a folder of Hugging Face's.",
    )


def _check_buckets(buckets: object) -> None:
    right = (
        isinstance(buckets, list)
        and all(type(n) is int and n > 0 for n in buckets)
        and buckets == sorted({*buckets})
    )
    what = f"{buckets!r} are not lengths, the smallest first."
    require(right, f"data.{schema.BUCKETS}", what, "Write [128, 256, 512].")


def _check_micro_batches(samples: int, parts: int) -> None:
    near = [str(n) for n in range(1, min(samples, 4096) + 1) if samples % n == 0]
    require(
        samples % parts == 0,
        "train.micro_batches",
        f"{samples} samples of a step cannot be divided into {parts} micro-batches.",
        f"batch_size {samples} can be divided by {', '.join(near)}.",
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
