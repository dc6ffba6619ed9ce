"""Turn a recipe into the compiler's Strategy."""

from __future__ import annotations

from dataclasses import fields

import torch

from flowrun.engine.actors.schedules import Schedule
from flowrun.engine.errors import RecipeError, refuse_as
from flowrun.engine.hardware.hardware import CPU
from flowrun.engine.runtime.inductor.inductor import settings_of
from flowrun.engine.strategy import Kept, LossScale, OwnSchedule, Strategy, Zero
from flowrun.engine.torch_internals import inductor_config
from flowrun.launcher.job.optimizer import optimizer_of
from flowrun.launcher.job.plan_cache import found_rows_file
from flowrun.launcher.model.signatures import tables_of
from flowrun.launcher.model.targets import find
from flowrun.launcher.recipe import schema
from flowrun.launcher.recipe.hardware_keys import rank_hardware, shares_memory
from flowrun.launcher.recipe.key_schema import flatten_keys
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import did_you_mean, find_near, require

_FUSIONS = {schema.EAGER: "", schema.INDUCTOR: "compiled", schema.HANDWRITTEN: "handwritten"}
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

_OWN_SCHEDULE = "Name a frozen dataclass derived from flowrun.engine.actors.schedules.Schedule."


def strategy_of(recipe: Recipe) -> Strategy:
    auto, hardware, pads = recipe.auto, rank_hardware(recipe), recipe.engine.pad_classes
    built_on_gpu = hardware.device != CPU and recipe.engine.compiler == schema.INDUCTOR
    return Strategy(
        axes=recipe.axes,
        placements=recipe.placements,
        chunks=recipe.chunks,
        stage_modules=recipe.stage_modules,
        pins=() if auto.enabled and auto.ignore_user_sbp else recipe.pins,
        zero=recipe.zero if recipe.zero.axis in recipe.axes else Zero(),
        recompute=recipe.recompute,
        auto=auto,
        optimizer=optimizer_of(recipe.optim, recipe.train.steps),
        kept=_read_kept(recipe),
        states_on_host=recipe.placement.states == schema.HOST,
        loss_scale=loss_scale_of(recipe),
        skips_nonfinite=recipe.train.on_nonfinite != schema.IGNORE,
        # snapshots in memory are taken as updates come: a restart could begin at half a step
        skips_alike=recipe.train.on_nonfinite == schema.SKIP or recipe.launch.restarts > 0,
        reduce_in_fp32=recipe.precision.reduce_dtype == "fp32",
        accumulate_in_fp32=recipe.precision.accumulate_dtype == "fp32",
        micro_batches=recipe.train.micro_batches,
        mirrored=recipe.view == schema.MIRRORED,
        counts_step=recipe.train.loss_mean == schema.STEP,
        in_flight=own_schedule(recipe) or recipe.in_flight,
        long_attention=recipe.engine.long_attention,
        expert_room=recipe.engine.expert_room,
        loss_chunks=recipe.engine.loss_chunks,
        pads_classes=pads == schema.ALWAYS or (pads == schema.AUTO and built_on_gpu),
        register_slots=recipe.engine.register_slots,
        blocking=tuple(axis for axis in recipe.axes if axis in recipe.engine.blocking),
        overwrites=recipe.engine.compiler == schema.EAGER and recipe.engine.overwrites,
        fusion=_FUSIONS[recipe.engine.compiler],
        hardware=hardware,
        shared_memory=shares_memory(recipe),
        shares_weights=not recipe.trained,
        signatures=tables_of(recipe.signatures),
        kept_rows=found_rows_file(recipe.engine.cache),
        check=recipe.engine.check,
    )


def inductor_options(recipe: Recipe) -> tuple[tuple[str, object], ...]:
    """Return the settings of `engine.inductor`.  Raises RecipeError for one that torch lacks."""
    if not recipe.engine.inductor:
        return ()
    built = recipe.engine.compiler == schema.INDUCTOR
    require(built, "engine.inductor", "nothing is built.", "Set engine.compiler=inductor.")
    known, own = inductor_config().get_config_copy(), settings_of(threads=1)
    for name, _ in (given := tuple(flatten_keys(recipe.engine.inductor))):
        where, near = f"engine.inductor.{name}", find_near(name, sorted(known))
        require(name in known, where, "torch._inductor.config has no such setting.", near)
        require(name not in own, where, "flowrun sets it by itself.", "Leave it out.")
    return given


def own_schedule(recipe: Recipe) -> OwnSchedule | None:
    """Return the schedule that `placement.schedule` names, if it does.  Raises RecipeError where it
    is none for the recipe's stages, chunks and micro-batches.
    """
    where, settings = "placement.schedule", dict(recipe.placement.schedule)
    if not settings:
        return None
    target = settings.pop("_target_", None)
    require(bool(target), f"{where}._target_", "nothing says which class it is.", _OWN_SCHEDULE)
    kind = find(str(target), f"{where}._target_")
    if not (isinstance(kind, type) and issubclass(kind, Schedule)):
        raise RecipeError(f"{where}._target_", f"{kind!r} is not a schedule.", _OWN_SCHEDULE)
    own = {each.name for each in fields(kind)} - {each.name for each in fields(Schedule)}
    for name in settings:
        problem = f"{kind.__name__} has no field {name!r}."
        require(name in own, f"{where}.{name}", problem, did_you_mean(name, sorted(own)))

    def refuse(error: Exception) -> RecipeError:
        return RecipeError(where, f"{kind.__name__} failed: {type(error).__name__}: {error}")

    with refuse_as(refuse):
        made = kind(len(recipe.stages), recipe.chunks, recipe.train.micro_batches, **settings)
        said = made.table()
    for name, value in said.items():
        right = isinstance(value, int) and (value > 0 or not name.startswith("held"))
        kinds = "a whole number, 1 or more" if name.startswith("held") else "a whole number"
        require(right, where, f"{kind.__name__}.{name} is {value!r}.", f"Return {kinds}.")
    back = made.turns_back and recipe.chunks != 2
    problem = f"{kind.__name__} turns back, which makes 2 chunks of each stage."
    require(not back, "placement.chunks", problem, "Write placement.chunks=2.")
    return OwnSchedule(kind, tuple(settings.items()))


def _read_kept(recipe: Recipe) -> Kept:
    precision = recipe.precision
    weights, states = (precision.param_dtype == schema.BF16), (precision.state_dtype == schema.BF16)
    if not (weights or states):
        return Kept()  # a seed that nothing reads makes no other plan
    return Kept(weights=weights, states=states, wide=precision.keep_fp32, seed=recipe.train.seed)


def loss_scale_of(recipe: Recipe) -> LossScale | None:
    """fp16 alone has one."""
    if recipe.precision.dtype != "fp16":
        return None
    scale = recipe.precision.loss_scale
    if scale is None or isinstance(scale, str):
        return LossScale()
    return LossScale(float(scale), dynamic=False)


def data_workers(recipe: Recipe) -> int:
    """Return the number of processes that make the samples of a rank; 0: it makes them itself."""
    return 0 if recipe.launch.name == "virtual" else recipe.launch.data_workers
