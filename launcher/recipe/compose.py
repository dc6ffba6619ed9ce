"""conf/ + recipe + overrides -> Recipe, or an error that names the key.

`compose` is Hydra's work; `to_recipe` resolves and checks what keys say together, and parses the
layout.  Neither imports torch.  What a key names (model, data, loss) is looked up in
build.py.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args, get_origin

import hydra
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf

from flowrun.engine.errors import RecipeError
from flowrun.launcher.platforms.platform import decide, read_platform
from flowrun.launcher.recipe import hydra_source, placement_keys, recipe_errors
from flowrun.launcher.recipe.checks import check, zero_of
from flowrun.launcher.recipe.hydra_source import COMPOSING_ERRORS, CONF
from flowrun.launcher.recipe.key_schema import Keys, flatten_keys, plain, schema
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.schema import (
    ARGUMENTS,
    BUCKETS,
    OF_BATCHES,
    TARGET,
    WEIGHTS,
    RecipeSchema,
    Target,
)
from flowrun.launcher.recipe.value_ranges import hints_of

GROUPS = ("model", "data", "optim", "launch", "hardware")
_SECTIONS = {"parallel": "auto"}  # of groups that are not called as what they set
_OPEN = re.compile(
    r"(model|data|sbp|signatures|task\.(loss|inputs|metrics)|optim\.(update|schedule|groups)|placement\.(axes|schedule)"
    r"|launch\.(slurm\.extra|ray\.resources)|engine\.inductor|updates)(\..+)?"
)
_MEANT_AXIS = re.compile(r"\+placement\.axes\.(\w+)=")  # Hydra's own sign for a new key
_CHOICE = "_dummy_"  # so Hydra calls a group whose choice it cannot find out
_NAME = re.compile(r"\+*(optim|hardware)\.name=([\w,]+)")  # files of launch hold the name alone
_ARGUMENT = re.compile(r"^\+*optim\.(\w+)=")
_PLAIN = re.compile(r"[\w./:-]*")
_SPLIT = re.compile(r"\bS\((\d+)\)")


def compose(overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """The recipe that `recipe=… key=value …` means, typed and merged, not yet resolved.

    config_dir: a folder of the user's own groups, searched first.  Raises RecipeError.
    """
    cfg = regroup(_compose_once(overrides, config_dir), overrides, config_dir)
    _give_arguments(cfg, overrides, config_dir)
    return cfg


def _give_arguments(cfg: DictConfig, overrides: list[str], config_dir: str | None) -> None:
    """Let numbers of the command line be arguments of optim._target_, if there is one.  Raises
    RecipeError for a key of optim that is unknown where there is none.
    """
    update = cfg.optim["update"]
    if update and not {TARGET, "name"} & update.keys():
        raise recipe_errors.unknown_key(f"optim.{next(iter(update))}", schema())
    asked = {text.partition("=")[0].lstrip("+") for text in overrides}
    if asked & {"optim", "optim.name"} and not asked & {"optim.update", f"optim.{TARGET}"}:
        word = [text for text in overrides if re.match(r"\+*optim[.=]", text)]
        # a word, also one of the user's own groups, takes the place of the recipe's own
        cfg.optim["update"] = _compose_once(word, config_dir).optim["update"] if config_dir else {}
    for key in ARGUMENTS if TARGET in cfg.optim["update"] else ():
        if f"optim.{key}" in asked:
            cfg.optim["update"] = {**cfg.optim["update"], key: cfg.optim[key]}
            cfg.optim[key] = schema().optim[key]


def regroup(cfg: DictConfig, overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """Let a chosen group take effect on a resolved recipe, such as the recipe.yaml of a run.

    Such a recipe sets every key, so that a group of the command line (launch=virtual) would change
    nothing: here the group replaces the whole section.  cfg: what `overrides` composed to, with the
    groups of `config_dir`.  Raises RecipeError.
    """
    overrides = spell(overrides)
    try:
        _check_missing(cfg)
        _check_references(cfg, schema())
    except COMPOSING_ERRORS as error:
        raise recipe_errors.from_hydra(error, schema()) from error
    chosen = {key: value for key, _, value in (text.partition("=") for text in overrides)}
    file = hydra_source.recipe_file(chosen.get(hydra_source.GROUP, "").strip("'"))
    resolved_file = file if file and hydra_source.is_resolved(file, GROUPS) else None
    _check_axes(cfg, overrides, resolved_file)
    if not resolved_file:
        return cfg
    for group in (g for g in (*GROUPS, *_SECTIONS) if chosen.get(g, "{")[:1] != "{"):
        section = _SECTIONS.get(group, group)
        words = [text for text in overrides if re.match(rf"\+*({group}|{section})[.=]", text)]
        cfg[section] = _compose_once(words, config_dir)[section]
    return cfg


def _check_axes(cfg: DictConfig, overrides: list[str], resolved_file: Path | None) -> None:
    """Refuse an axis whose name is spelled almost like a known one, and not meant otherwise."""
    meant = [m[1] for text in overrides if (m := _MEANT_AXIS.match(text))]
    if resolved_file:  # its names were checked when it was composed
        meant += list(OmegaConf.select(OmegaConf.load(resolved_file), "placement.axes") or ())
    meant += [str(cfg.zero.axis)] if cfg.zero.axis else []
    sbp = cast("dict[str, object]", OmegaConf.to_container(cfg.sbp))
    placement_keys.check_axis_names(map(str, cfg.placement.axes), sbp, meant)


def _compose_once(overrides: list[str], config_dir: str | None) -> DictConfig:
    try:
        return _hydra_compose(overrides, config_dir)
    except COMPOSING_ERRORS as error:
        raise _blame(recipe_errors.from_hydra(error, schema()), overrides, config_dir) from error


def _blame(error: RecipeError, overrides: list[str], config_dir: str | None) -> RecipeError:
    """Find the argument without which an error that names no key would not be."""
    if isinstance(error, recipe_errors.PlacedError) or error.where not in (
        hydra_source.GROUP,
        _CHOICE,
    ):
        return error
    for guilty in overrides:
        if not guilty.startswith(f"{hydra_source.GROUP}="):
            with suppress(*COMPOSING_ERRORS):
                _hydra_compose([text for text in overrides if text != guilty], config_dir)
                return recipe_errors.CommandLineError(guilty, error.problem, error.instead)
    return error


def _refuse_hidden(config_dir: str | None) -> None:
    """Raise RecipeError for a file of the user's groups that has the name of a shipped one, which
    Hydra reads in its place.
    """
    for shipped in sorted(CONF.rglob("*/*.yaml")) if config_dir else ():
        inside = shipped.relative_to(CONF)
        file = Path(str(config_dir)) / inside
        if file.is_file() and not file.samefile(shipped):
            raise RecipeError(
                inside.parent.as_posix().replace("/", "."),
                f"{file} has the name of a shipped file, which would be read in its place.",
                f"Give it another name, such as my_{inside.name}.",
            )


def _hydra_compose(overrides: list[str], config_dir: str | None) -> DictConfig:
    _refuse_hidden(config_dir)
    arguments = [*spell(overrides), *hydra_source.search_path(config_dir)]
    with hydra_source.open_hydra():
        return hydra.compose(hydra_source.CONFIG_NAME, arguments)


def to_recipe(cfg: DictConfig) -> Recipe:
    """The composed recipe, resolved, checked, frozen.  Raises RecipeError for a contradiction."""
    return freeze(resolve(cfg), OmegaConf.to_yaml(cfg, resolve=True))


def freeze(tree: RecipeSchema, text: str = "") -> Recipe:
    """Check the keys and make a Recipe of them.  Raises RecipeError.

    text: the same as YAML; empty for candidates of a search, whose text nobody reads.
    """
    recipe = _with_tuples(tree)
    metrics = {name: metric for name, metric in recipe.task.metrics.items() if metric is not None}
    first = recipe.updates[0] if recipe.updates else None  # evaluation computes its loss
    loss = recipe.task.loss or (first.get("loss") if isinstance(first, dict) else None)
    launch = recipe.launch  # `text` keeps what was given by hand: another job has other hosts
    platform = read_platform(os.environ) if launch.name == "local" else None
    seat = decide(platform, launch.nnodes, launch.node_rank, launch.rdzv_endpoint)
    launch = replace(launch, nnodes=seat.nnodes, node_rank=seat.node_rank)
    launch = replace(launch, rdzv_endpoint=seat.endpoint)
    recipe = replace(recipe, task=replace(recipe.task, metrics=metrics, loss=loss), launch=launch)
    check(recipe)
    axes, stages = placement_keys.parse_stages(recipe.placement)
    plan_axis = recipe.sbp.get(placement_keys.FROM_MODEL) or ""
    return Recipe(
        **vars(recipe)
        | {
            "name": recipe.name or "recipe",
            "model": {key: value for key, value in recipe.model.items() if key != WEIGHTS},
            "weights": str(recipe.model.get(WEIGHTS) or ""),
            **_split_data(recipe.data),
            "axes": axes,
            "stages": stages,
            "chunks": recipe.placement.chunks,
            "in_flight": "auto" if (count := recipe.placement.in_flight) is None else count,
            "pins": placement_keys.parse_pins(recipe.sbp, tuple(recipe.placement.axes)),
            "plan_axis": plan_axis if plan_axis in axes else "",
            "zero": zero_of(recipe),
            "seat": seat,
            "text": text,
        }
    )


def _split_data(data: Target) -> Target:
    """Return what says how batches are made, and the rest, the data set."""
    found: Target = {key: data.get(key) or {} for key in OF_BATCHES}
    found[BUCKETS] = tuple(data.get(BUCKETS) or ())
    return {**found, "data": {key: value for key, value in data.items() if key not in found}}


def _with_tuples(section: Keys) -> Keys:
    """Return a section of keys with tuples where the schema says so, and plain dicts: OmegaConf
    makes lists.
    """
    given = {}
    kind: type = type(section)
    for name, hint in hints_of(kind):
        value = getattr(section, name)
        if is_dataclass(value):
            value = _with_tuples(value)
        elif get_origin(hint) is tuple:
            value = tuple(value)
        elif Any in (hint, *get_args(hint)):
            value = plain(value)
        given[name] = value
    return replace(section, **given)


def load(overrides: list[str], config_dir: str | None = None) -> Recipe:
    """compose, then to_recipe."""
    return to_recipe(compose(overrides, config_dir))


def change(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Return a recipe composed again with overrides."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{recipe.name or 'recipe'}.yaml"
        file.write_text(recipe.to_yaml(), encoding="utf-8")
        found = load([f"recipe={file}", *overrides])
    if recipe.train.epochs:  # whose steps are counted (with_steps)
        found = replace(found, train=replace(found.train, steps=recipe.train.steps))
    return found


def spell(overrides: list[str]) -> list[str]:
    """Arguments as Hydra reads them.

    Keys that a recipe may invent (a model's arguments, axes, pins) can be set without Hydra's `+`;
    an SBP may be written S(0), which Hydra would take for a function; a pattern with `*` becomes a
    dict, as Hydra's keys know no `*`; optim.name=sgd becomes optim=sgd; an argument of
    optim._target_ stands in optim.update; the path of a recipe may
    hold what Hydra gives a meaning.
    """
    spelled = [_spell(_ARGUMENT.sub(_give_to_update, override)) for override in overrides]
    pins = [text for text in spelled if text.startswith("++sbp={") and "},{" not in text]
    if len(pins) < 2:
        return spelled
    inner = ", ".join(text.removeprefix("++sbp={").removesuffix("}") for text in pins)
    return [text for text in spelled if text not in pins] + [f"++sbp={{{inner}}}"]


def _give_to_update(key: re.Match[str]) -> str:
    return key[0] if key[1] in schema().optim else f"++optim.update.{key[1]}="


def _spell(override: str) -> str:
    if (named := _NAME.fullmatch(override)) and all(
        hydra_source.is_choice(named[1], name) for name in named[2].split(",")
    ):
        return f"{named[1]}={named[2]}"
    key, equals, value = override.partition("=")
    bare = key.lstrip("+")
    if bare == hydra_source.GROUP and not _PLAIN.fullmatch(value) and Path(value).is_file():
        return f"{key}='{value}'"  # a folder may be called lr=0.1,wd=0
    if not equals or key.startswith("~") or not _OPEN.fullmatch(bare):
        return override
    if _MEANT_AXIS.match(override):
        return override
    if bare.startswith("sbp"):
        return _spell_pin(bare, _SPLIT.sub(r"S\1", value))
    return f"++{bare}={value}" if "." in bare or value.startswith("{") else override


def _spell_pin(bare: str, value: str) -> str:
    """bare: sbp, or sbp.PATTERN.AXIS."""
    if "*" not in bare and "[" not in bare and "?" not in bare:
        return f"++{bare}={value}"
    *names, axis = bare.split(".")[1:]
    if not names or value.startswith("{"):  # what the pattern holds: parameters, or axes
        return f"++sbp={{{'.'.join((*names, axis))}: {value}}}"
    side = f"{names.pop()}: {{" if names[-1] in ("in", "out") else ""
    choices = (
        f"{{{'.'.join(names)}: {{{side}{axis}: {one}}}{'}' if side else ''}}}"
        for one in value.split(",")
    )
    return f"++sbp={','.join(choices)}"


def resolve(cfg: DictConfig) -> RecipeSchema:
    """Turn the keys into typed objects, not yet checked.  Raises RecipeError for a key that is
    unknown or of another type.
    """
    try:
        _check_keys(cfg)
        tree = OmegaConf.to_object(cfg)
    except COMPOSING_ERRORS as error:
        raise recipe_errors.from_hydra(error, schema()) from error
    assert isinstance(tree, RecipeSchema), "compose() merges into the schema"
    return tree


def _check_missing(cfg: DictConfig) -> None:
    """Refuse keys that have no value yet, by the names of all."""
    if not OmegaConf.missing_keys(cfg):
        return
    tree = flatten_keys(OmegaConf.to_container(cfg, resolve=False))
    keys = [key for key, value in tree if value == MISSING]
    raise RecipeError(
        keys[0],
        f"no value yet ({MISSING}): {', '.join(keys)}.",
        "Write one in the recipe or on the command line.",
    )


def _check_references(node: DictConfig, known: DictConfig, prefix: str = "") -> None:
    """Refuse ${…} that stands for nothing, or for no list or keys where the schema has those.

    node, known: the section `prefix` of a recipe and of the schema.
    """
    for key in map(str, known):
        child, typed = node._get_node(key), known._get_node(key)
        if child is not None and child._is_interpolation():
            found = node[key]
            if isinstance(typed, ListConfig) and not isinstance(found, ListConfig):
                raise RecipeError(f"{prefix}{key}", "only a list can stand here.", "Write a list.")
            kind = OmegaConf.get_type(typed)
            if isinstance(typed, DictConfig) and OmegaConf.get_type(found) is not kind:
                raise recipe_errors.no_mapping(f"{prefix}{key}", schema())
        elif isinstance(typed, DictConfig) and isinstance(child, DictConfig):
            _check_references(child, typed, f"{prefix}{key}.")


def _check_keys(cfg: DictConfig) -> None:
    """Refuse keys that `+key=value` added and the schema does not have."""
    for path in _paths(cfg, schema()):
        raise recipe_errors.unknown_key(path, schema())


def _paths(node: DictConfig, known: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in map(str, node):
        child, typed = node._get_node(key), known._get_node(key)
        if typed is None:
            yield f"{prefix}{key}"
        elif isinstance(child, DictConfig) and isinstance(typed, DictConfig) and len(typed):
            yield from _paths(child, typed, f"{prefix}{key}.")
