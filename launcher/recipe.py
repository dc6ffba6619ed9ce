"""conf/ + recipe + overrides -> Recipe, or an error that names the key.

`compose` is Hydra's work; `to_recipe` resolves and checks what one key alone cannot tell, and
parses the layout.  Neither imports torch.  What a key names (model, data, loss) is looked up in
build.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from flowrun.engine.errors import RecipeError
from flowrun.engine.placement import BATCH_AXES
from flowrun.launcher import hydra_source
from flowrun.launcher.errors import PlacedError, did_you_mean, from_hydra, one_of, unknown_key
from flowrun.launcher.layout import parse_in_flight, parse_pins, parse_stages
from flowrun.launcher.schema import (
    CLUSTERS,
    DEVICES,
    KEPT,
    LAUNCHERS,
    MIRRORED,
    OPTIMIZERS,
    PRECISIONS,
    SPARSE,
    VIEWS,
    Recipe,
    RecipeSchema,
    Zero,
    plain,
)

CONFIG_MODULE, CONFIG_NAME = "flowrun.conf", "config"
_WEIGHTS = "weights"  # the one key of `model` that is no argument of it
GROUPS = ("model", "data", "optim", "launch", "hardware")
_OPEN = re.compile(
    r"(model|data|sbp|task\.(loss|inputs|metrics)|optim\.(update|schedule|groups)|placement\.axes"
    r"|launch\.slurm\.extra)(\..+)?"
)
_SPLIT = re.compile(r"\bS\((\d+)\)")


def compose(overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """The recipe that `recipe=… key=value …` means, typed and merged, not yet resolved.

    config_dir: a folder of the user's own groups, searched first.  Raises RecipeError.
    """
    return regrouped(_composed(overrides, config_dir), overrides, config_dir)


def regrouped(cfg: DictConfig, overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """The same, where a group is chosen beside a resolved recipe, such as the recipe.yaml of a run.

    That says every key, so that it has the last word and the group (launch=virtual) would change
    nothing: here the group takes the place of the whole section.
    """
    chosen = {key: value for key, _, value in (text.partition("=") for text in overrides)}
    file = hydra_source.recipe_file(chosen.get(hydra_source.GROUP, ""))
    if file is None or not hydra_source.is_resolved(file, GROUPS):
        return cfg
    for group in (group for group in GROUPS if chosen.get(group, "{")[:1] != "{"):
        told = [text for text in overrides if re.match(rf"\+*{group}[.=]", text)]
        cfg[group] = _composed(told, config_dir)[group]
    return cfg


def _composed(overrides: list[str], config_dir: str | None) -> DictConfig:
    register()
    arguments = spell(overrides)
    if config_dir is not None:
        arguments.append(f"hydra.searchpath=[file://{Path(config_dir).absolute()}]")
    try:
        with (
            _alone(),
            hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3", job_name="flowrun"),
        ):
            return hydra.compose(CONFIG_NAME, arguments)
    except Exception as error:
        raise from_hydra(error, schema()) from error


@contextmanager
def _alone() -> Iterator[None]:
    """Inside a job of hydra.main: there is one Hydra at a time, so that its own is set aside."""
    held, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = held


def to_recipe(cfg: DictConfig) -> Recipe:
    """The composed recipe, resolved, checked and frozen.  Raises RecipeError where it contradicts
    itself.
    """
    tree = _resolved(cfg)
    betas = cast(tuple[float, float], tuple(tree.optim.betas))  # a list, after Hydra
    slurm = replace(tree.launch.slurm, setup=tuple(tree.launch.slurm.setup))
    optim = replace(
        tree.optim,
        betas=betas,
        schedule=plain(tree.optim.schedule),
        groups=plain(tree.optim.groups),
        update=plain(tree.optim.update),
    )
    recipe = replace(tree, optim=optim, launch=replace(tree.launch, slurm=slurm))
    for check in CHECKS:
        check(recipe)
    axes, stages = parse_stages(recipe.placement)
    pins = parse_pins(recipe.sbp, tuple(recipe.placement.axes))
    return Recipe(
        name=recipe.name or "recipe",
        model={key: value for key, value in plain(recipe.model).items() if key != _WEIGHTS},
        weights=str(recipe.model.get(_WEIGHTS) or ""),
        task=recipe.task,
        data=plain(recipe.data),
        eval=recipe.eval,
        optim=recipe.optim,
        axes=axes,
        stages=stages,
        in_flight=parse_in_flight(recipe.placement.in_flight),
        pins=tuple(pin for pin in pins if pin.axis in axes),
        view=recipe.view,
        zero=_zero(recipe),
        recompute=recipe.recompute,
        precision=recipe.precision,
        train=recipe.train,
        launch=recipe.launch,
        engine=recipe.engine,
        hardware=recipe.hardware,
        text=OmegaConf.to_yaml(cfg, resolve=True),
    )


def _zero(recipe: RecipeSchema) -> Zero:
    """ZeRO shards over the axis that divides the batch, unless the recipe names another."""
    batch_axis = next((axis for axis in recipe.placement.axes if axis in BATCH_AXES), None)
    return (
        replace(recipe.zero, axis=recipe.zero.axis or batch_axis)
        if recipe.zero.stage
        else recipe.zero
    )


def load(overrides: list[str], config_dir: str | None = None) -> Recipe:
    """compose, then to_recipe."""
    return to_recipe(compose(overrides, config_dir))


@cache
def schema() -> DictConfig:
    """RecipeSchema as a config that recipes can be merged into: OmegaConf makes frozen dataclasses
    read-only, which is undone.
    """
    return _thaw(OmegaConf.structured(RecipeSchema))


def _thaw(node: DictConfig) -> DictConfig:
    node._set_flag("readonly", None)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            _thaw(child)
    return node


def register() -> None:
    """Make Hydra know the schema and the recipes."""
    ConfigStore.instance().store(name="schema", node=schema())
    hydra_source.register()


def spell(overrides: list[str]) -> list[str]:
    """Arguments as Hydra reads them.

    Keys that a recipe may invent (a model's arguments, axes, pins) can be set without Hydra's `+`;
    an SBP may be written S(0), which Hydra would take for a function; a pattern with `*` becomes a
    dict, as Hydra's keys know no `*`.
    """
    spelled = [_spell(override) for override in overrides]
    pins = [text for text in spelled if text.startswith("++sbp={") and "},{" not in text]
    if len(pins) < 2:
        return spelled
    inner = ", ".join(text.removeprefix("++sbp={").removesuffix("}") for text in pins)
    return [text for text in spelled if text not in pins] + [f"++sbp={{{inner}}}"]


def _spell(override: str) -> str:
    key, equals, value = override.partition("=")
    bare = key.lstrip("+")
    if not equals or key.startswith("~") or not _OPEN.fullmatch(bare):
        return override
    if not bare.startswith("sbp"):
        return f"++{bare}={value}" if "." in bare or value.startswith("{") else override
    value = _SPLIT.sub(r"S\1", value)
    if "*" not in bare and "[" not in bare and "?" not in bare:
        return f"++{bare}={value}"
    *names, axis = bare.split(".")[1:]
    side = f"{names.pop()}: {{" if names[-1] in ("in", "out") else ""
    choices = (
        f"{{{'.'.join(names)}: {{{side}{axis}: {one}}}{'}' if side else ''}}}"
        for one in value.split(",")
    )
    return f"++sbp={','.join(choices)}"


def _resolved(cfg: DictConfig) -> RecipeSchema:
    try:
        _check_keys(cfg)
        tree = OmegaConf.to_object(cfg)
    except Exception as error:
        raise from_hydra(error, schema()) from error
    assert isinstance(tree, RecipeSchema), "compose() merges into the schema"
    return tree


def _check_keys(cfg: DictConfig) -> None:
    """Refuse what `+key=value` added beside the schema."""
    for path in _paths(cfg, schema()):
        raise unknown_key(path, schema())


def _paths(node: DictConfig, known: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in map(str, node):
        child, typed = node._get_node(key), known._get_node(key)
        if typed is None:
            yield f"{prefix}{key}"
        elif isinstance(child, DictConfig) and isinstance(typed, DictConfig) and len(typed):
            yield from _paths(child, typed, f"{prefix}{key}.")


def _require(holds: bool, where: str, problem: str, instead: str = "") -> None:
    if not holds:
        raise RecipeError(where, problem, instead)


def _check_named(recipe: RecipeSchema) -> None:
    if not recipe.name and not recipe.model:
        raise PlacedError(
            "command line",
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
    targets: dict[str, Any] = {"model": recipe.model, "data": recipe.data}
    if recipe.task.loss is not None:
        targets["task.loss"] = recipe.task.loss
    targets |= {f"task.metrics.{name}": metric for name, metric in recipe.task.metrics.items()}
    for where, target in targets.items():
        example = examples.get(where, "flowrun.models.losses.cross_entropy")
        given = isinstance(target, dict) and bool(target.get("_target_"))
        _require(
            given,
            f"{where}._target_",
            "nothing says what to build.",
            f"Write the dotted path of a class or function, such as {example}.",
        )


def _check_train(recipe: RecipeSchema) -> None:
    train = recipe.train
    for name in ("batch_size", "micro_batches", "steps"):
        value = getattr(train, name)
        _require(value >= 1, f"train.{name}", f"{name} is at least 1, not {value}.")
    for name in ("save_every", "keep"):
        value = getattr(train, name)
        _require(value >= 0, f"train.{name}", f"{name} is 0 or more, not {value}.")
    _require(train.seed >= 0, "train.seed", f"a seed is 0 or more, not {train.seed}.")
    near = [n for n in range(1, train.batch_size + 1) if train.batch_size % n == 0]
    _require(
        train.batch_size % train.micro_batches == 0,
        "train.micro_batches",
        f"{train.batch_size} samples of a step cannot be divided into {train.micro_batches}"
        " micro-batches.",
        f"batch_size {train.batch_size} can be divided by {', '.join(map(str, near))}.",
    )


def _check_optim(recipe: RecipeSchema) -> None:
    optim = recipe.optim
    _require(
        optim.name in OPTIMIZERS,
        "optim.name",
        f"there is no optimizer {optim.name!r}.",
        f"{did_you_mean(optim.name, OPTIMIZERS)}",
    )
    _require(optim.lr > 0, "optim.lr", f"a learning rate is over 0, not {optim.lr}.")
    _require(optim.eps > 0, "optim.eps", f"eps is over 0, not {optim.eps}.")
    for name in ("weight_decay", "clip_norm", "clip_value", "warmup_steps"):
        value = getattr(optim, name)
        _require(value >= 0, f"optim.{name}", f"{name} is 0 (off) or more, not {value}.")
    _require(
        optim.sparse in SPARSE,
        "optim.sparse",
        f"{optim.sparse!r} is no way to update tables.",
        f"Write {one_of(SPARSE)}.",
    )
    _require(0 <= optim.ema < 1, "optim.ema", f"a decay is 0 (off) to below 1, not {optim.ema}.")
    _require(
        0 <= optim.momentum < 1,
        "optim.momentum",
        f"momentum is from 0 to below 1, not {optim.momentum}.",
    )
    betas = optim.betas
    _require(
        len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        "optim.betas",
        f"betas are two numbers from 0 to below 1, not {list(betas)}.",
        "Usual are [0.9, 0.95] and [0.9, 0.999].",
    )
    _require(
        optim.momentum > 0 or not optim.nesterov,
        "optim.nesterov",
        "nesterov needs momentum, which is 0.",
        "Set optim.momentum, usually 0.9.",
    )


def _check_zero(recipe: RecipeSchema) -> None:
    zero, axes = recipe.zero, recipe.placement.axes
    _require(
        zero.stage in range(4), "zero.stage", f"ZeRO has stages 0 (off) to 3, not {zero.stage}."
    )
    _require(
        zero.min_size >= 0,
        "zero.min_size",
        f"a number of elements is 0 or more, not {zero.min_size}.",
    )
    if zero.axis is not None:
        _require(
            zero.axis in axes,
            "zero.axis",
            f"{zero.axis!r} is no axis of the placement, which has {', '.join(axes) or 'none'}.",
            did_you_mean(zero.axis, axes) if axes else "Add it: placement: {axes: {data: 2}}.",
        )
    _require(
        _zero(recipe).stage == 0 or _zero(recipe).axis is not None,
        "zero.stage",
        f"ZeRO {zero.stage} needs an axis to shard over.",
        "Set zero.axis, or add an axis that divides the batch: placement: {axes: {data: 2}}.",
    )


def _check_view(recipe: RecipeSchema) -> None:
    _require(
        recipe.view in VIEWS,
        "view",
        f"{recipe.view!r} is no view: a recipe has {' or '.join(VIEWS)}.",
    )
    if recipe.view != MIRRORED:
        return
    axes = {axis: size for axis, size in recipe.placement.axes.items() if size > 1}
    others = [axis for axis in axes if axis not in BATCH_AXES]
    pins = parse_pins(recipe.sbp, tuple(recipe.placement.axes))
    pinned = next((pin.key for pin in pins if pin.axis in axes), "")
    wrong = (
        (others, f"the axis {', '.join(others)} divides what each rank would have for itself."),
        (recipe.placement.stages != 1, "placement.stages divides the model over ranks."),
        (pinned, f"{pinned} lays out one logical batch, and here there is none."),
    )
    for here, problem in wrong:
        _require(
            not here,
            "view",
            f"in the mirrored view each rank has a batch and a model of its own, but {problem}",
            f"Use axes named {' or '.join(BATCH_AXES)} alone, or view: consistent.",
        )


def _check_recompute(recipe: RecipeSchema) -> None:
    modules, keep = recipe.recompute.modules, recipe.recompute.keep
    for name in keep:
        _require(
            name in KEPT,
            "recompute.keep",
            f"there is no class of ops {name!r}.",
            f"Write {one_of(KEPT)}; empty keeps what enters the modules, and no more.",
        )
    _require(
        bool(modules) or not keep,
        "recompute.keep",
        "nothing is recomputed, so there is nothing to keep of it.",
        'Name modules: recompute: {modules: ["blocks.*"]}.',
    )


def _check_precision(recipe: RecipeSchema) -> None:
    dtype, scale = recipe.precision.dtype, recipe.precision.loss_scale
    _require(
        dtype in PRECISIONS,
        "precision.dtype",
        f"there is no precision {dtype!r}.",
        f"Write {one_of(PRECISIONS)}.",
    )
    if scale is None:
        return
    _require(
        dtype == "fp16",
        "precision.loss_scale",
        f"{dtype} has the range of fp32: its gradients need no scale.",
        "Leave it out, or set precision.dtype=fp16.",
    )
    _require(
        scale == "dynamic" or (not isinstance(scale, str) and scale > 0),
        "precision.loss_scale",
        f"a loss scale is dynamic or a number over 0, not {scale}.",
        "Usual are dynamic, and powers of two such as 1024.",
    )


def _check_launch(recipe: RecipeSchema) -> None:
    launch = recipe.launch
    _require(
        launch.name in LAUNCHERS,
        "launch.name",
        f"there is no launcher {launch.name!r}.",
        f"Write {one_of(LAUNCHERS)}.",
    )
    _require(
        launch.device in DEVICES,
        "launch.device",
        f"there is no device {launch.device!r}.",
        f"Write {one_of(DEVICES)}.",
    )
    for name in ("nnodes", "threads"):
        value = getattr(launch, name)
        _require(value >= 1, f"launch.{name}", f"{name} is at least 1, not {value}.")
    slurm = launch.slurm
    _require(
        slurm.cluster in CLUSTERS,
        "launch.slurm.cluster",
        f"there is no cluster {slurm.cluster!r}.",
        f"Write {one_of(CLUSTERS)}.",
    )
    _require(
        slurm.minutes >= 1,
        "launch.slurm.minutes",
        f"a job lasts at least 1 minute, not {slurm.minutes}.",
    )
    _require(
        launch.nnodes == 1 or bool(launch.rdzv_endpoint) or launch.name == "slurm",
        "launch.rdzv_endpoint",
        f"{launch.nnodes} hosts need a place to meet.",
        "Write launch.rdzv_endpoint=host:port, the same on every host.",
    )
    rank = launch.node_rank
    _require(
        rank is None or 0 <= rank < launch.nnodes,
        "launch.node_rank",
        f"{launch.nnodes} hosts have node ranks 0 to {launch.nnodes - 1}, not {rank}.",
    )


def _check_rest(recipe: RecipeSchema) -> None:
    fraction, slots = recipe.eval.fraction, recipe.engine.register_slots
    _require(
        0 <= fraction < 1,
        "eval.fraction",
        f"a fraction of the data set is from 0 to below 1, not {fraction}.",
    )
    for name in ("batches", "every"):
        value = getattr(recipe.eval, name)
        _require(value >= 0, f"eval.{name}", f"{name} is 0 or more, not {value}.")
    _require(slots >= 1, "engine.register_slots", f"a register has at least 1 slot, not {slots}.")
    for name in ("flops", "memory_bytes_per_s", "link.bytes_per_s"):
        value = OmegaConf.select(OmegaConf.structured(recipe.hardware), name)
        _require(value > 0, f"hardware.{name}", f"{name} is over 0, not {value}.")
    for name in ("bf16_flops", "fp16_flops"):
        value = getattr(recipe.hardware, name)
        _require(value >= 0, f"hardware.{name}", f"{name} is 0 or more, not {value}.")


CHECKS = (
    _check_named,
    _check_targets,
    _check_train,
    _check_optim,
    _check_zero,
    _check_view,
    _check_recompute,
    _check_precision,
    _check_launch,
    _check_rest,
)
