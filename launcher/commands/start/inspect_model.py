"""What a model and its data show when they are looked at and tried.

The classes in a module, an item of a data set, the arguments of forward, a loss that fits.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.user_code import place_of
from flowrun.launcher.model.targets import find, make_object
from flowrun.launcher.recipe.locate import COMMAND_LINE
from flowrun.launcher.recipe.recipe_errors import CommandLineError

MakerFunction = Callable[..., object]  # a class, or a function that makes a model or a data set
Value = Tensor | float | int  # of a field of an item
OutputName = str | int | None  # of a tensor that a model returns; None: all that it returns

_TARGETS = ("targets", "target", "labels", "label", "y")  # arguments of models with a loss
_METRICS = {"cross_entropy": "accuracy", "binary_cross_entropy": "binary_accuracy"}


def find_model(target: str) -> tuple[str, str]:
    """Return (dotted path of the model, module that it is in).  Raises RecipeError.

    target: a module or a file with one model, or the model: module.Name, file.py:Name.  A module
    without a class of a model may have one function, which makes it.
    """
    file, _, name = target.partition(":")
    dotted = file.removesuffix(".py").strip("./").replace("/", ".") if ".py" in file else file
    dotted = f"{dotted}.{name}" if name else dotted
    module = _import(dotted)
    if module is None:
        return dotted, dotted.rpartition(".")[0]
    whole = _list_models(module, dotted)
    if not whole:
        raise CommandLineError(
            target,
            "this module defines no model: no subclass of torch.nn.Module, and no function.",
            "Name a class or a function that makes a model: flowrun init my_models.Net.",
        )
    if len(whole) > 1:
        raise CommandLineError(
            target,
            f"this module defines {len(whole)} models: {', '.join(whole)}.",
            f"Name one: flowrun init {dotted}.{whole[-1]}.",
        )
    return f"{dotted}.{whole[0]}", dotted


def _list_models(module: ModuleType, dotted: str) -> list[str]:
    """Return the models that a module defines and that are no part of another, by name; its
    functions if it defines no class of a model.
    """
    defined = {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == dotted and not name.startswith("_")
    }
    own = [
        name
        for name, value in defined.items()
        if inspect.isclass(value) and issubclass(value, nn.Module)
    ]
    whole = [name for name in own if not _is_held(module, name, own)]
    return whole or [name for name, value in defined.items() if inspect.isfunction(value)]


def _is_held(module: ModuleType, name: str, own: Sequence[str]) -> bool:
    """True if another model of the module makes this one in its source: a part of it."""
    for other in own:
        if other != name:
            with suppress(OSError, TypeError):
                if re.search(rf"\b{name}\(", inspect.getsource(getattr(module, other))):
                    return True
    return False


def find_data(module: str) -> str | None:
    """Return the data set that the module of the model defines, if it is the only one."""
    found = vars(importlib.import_module(module))
    sets = [
        name
        for name, value in found.items()
        if inspect.isclass(value)
        and value.__module__ == module
        and all(hasattr(value, method) for method in ("__getitem__", "__len__"))
        and not hasattr(value, "forward")
    ]
    return f"{module}.{sets[0]}" if len(sets) == 1 else None


def _import(dotted: str) -> ModuleType | None:
    """Return the module of this name; None if it is no module, but maybe something in one."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
        importlib.invalidate_caches()
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name and (dotted == error.name or dotted.startswith(f"{error.name}.")):
            return None
        raise CommandLineError(dotted, f"importing it failed: {error}.") from error
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise CommandLineError(dotted, f"importing it failed: {why}.") from error


def find_named(path: str) -> MakerFunction:
    """Return the class or function of a dotted path.  Raises RecipeError."""
    try:
        found: MakerFunction = find(path, COMMAND_LINE)
        return found
    except RecipeError as error:
        raise CommandLineError(path, error.problem, error.instead) from error


def call_maker(maker: MakerFunction, path: str, given: Mapping[str, object]) -> object:
    """Return what `maker`, of this dotted path, makes of some arguments.  Raises RecipeError."""
    try:
        return maker(**{name: _make_argument(name, value) for name, value in given.items()})
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error} {place_of(error)}".split())
        raise CommandLineError(path, f"{path}() failed: {why}") from error


def _make_argument(name: str, value: object) -> object:
    """Return an argument as a recipe gives it: what its target makes, if it has one."""
    if isinstance(value, Mapping) and "_target_" in value:
        return make_object(dict(value), name)
    return value


@dataclass(frozen=True, kw_only=True)
class FirstItem:
    """The first item of a data set, by field.

    number: of all items.  names: that its values were given; (): it has its own.
    """

    fields: Mapping[str, Value]
    number: int
    names: Sequence[str]


def read_first_item(
    maker: MakerFunction, path: str, arguments: Mapping[str, bool], given: Mapping[str, object]
) -> FirstItem:
    """Return the first item of a data set.  Raises RecipeError.

    maker: makes the data set.  path: of it.  arguments: of forward, which give the values of a
    tuple their names; what is left of it is the target.  given: to the maker.
    """
    from flowrun.launcher.data.named import NamedFields
    from flowrun.launcher.model.dataset_checks import check_items, check_kind, data_errors

    names: tuple[str, ...] = ()
    data: Any = call_maker(maker, path, given)
    try:
        check_kind(data)
        with data_errors():
            item = data[0]
        if isinstance(item, tuple | list):
            names = name_values(len(item), arguments)
            data = NamedFields(data, names)
        check_items(data)
    except RecipeError as error:
        raise CommandLineError(path, error.problem, error.instead) from error
    return FirstItem(fields=data[0], number=len(data), names=names)


def name_values(count: int, arguments: Mapping[str, bool]) -> tuple[str, ...]:
    """Return names for the values of a tuple: arguments of forward, then targets.

    count: of the values.  arguments: of forward, and whether each must be given; one that may be
    left out gives its name where it is one of a target.
    """
    needed = [name for name, must in arguments.items() if must][:count]
    computing = [name for name in arguments if name in _TARGETS and name not in needed]
    left = count - len(needed)
    targets = computing[:1] or ["targets"]
    more = [f"{targets[0]}_{k}" for k in range(2, left + 1)]
    return (*needed, *[*targets, *more][:left])


def describe_field(value: Value) -> str:
    """Return the dtype and the shape of a field: "float32 3 x 32 x 32"."""
    tensor = torch.as_tensor(value)
    shape = " x ".join(map(str, tensor.shape)) or "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"


def arguments_of_forward(model: object) -> dict[str, bool]:
    """Return the arguments of forward, of a model or its class, and whether each must be given."""
    forward = getattr(model, "forward", None)
    if forward is None:  # a function makes the model, and it could not be called
        return {}
    named = [
        parameter
        for parameter in inspect.signature(forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.name != "self"
    ]
    return {parameter.name: parameter.default is parameter.empty for parameter in named}


class NoLoss(Exception):
    """No loss is known; its text says why."""


@dataclass(frozen=True, kw_only=True)
class LossDraft:
    """Loss and metrics as YAML in a line each, or empty.  note: for the user, or empty."""

    loss: str = ""
    metrics: str = ""
    note: str = ""


def find_loss(
    model: nn.Module | None,
    item: Mapping[str, Value],
    inputs: Mapping[str, str],
    left: Sequence[str],
) -> LossDraft:
    """Return a loss by what the model returns for two samples; none where it returns one itself.

    model: None: it could not be made.  item: of the data set.  inputs: argument of forward ->
    field.  left: fields that no argument takes.  Raises NoLoss.
    """
    if model is None:
        raise NoLoss("the model could not be tried, as its arguments are missing")
    batch = {name: torch.stack([torch.as_tensor(value)] * 2) for name, value in item.items()}
    output = _call_model(model, {argument: batch[field] for argument, field in inputs.items()})
    parts = _parts_of(output)
    scalars = [name for name, value in parts.items() if value.shape == ()]
    if scalars and not _compare(parts, batch, left).loss:
        known = [
            field
            for field in inputs.values()
            if batch[field].dim() == 1 or isinstance(output, tuple)
        ]
        metrics = _compare(parts, batch, known).metrics
        own = "" if scalars[0] in (None, "loss") else _target("model_loss", {"part": scalars[0]})
        return LossDraft(loss=own, metrics=metrics)
    found = _compare(parts, batch, [*left, *inputs.values()])
    if found.loss:
        return found
    shapes = ", ".join(" x ".join(map(str, value.shape)) for value in parts.values())
    shown = f", {shapes} for two samples" if shapes else f", a {type(output).__name__}"
    raise NoLoss(f"no loss of flowrun fits the output{shown}: write loss(output, batch) -> scalar")


def _call_model(model: nn.Module, arguments: Mapping[str, Tensor]) -> object:
    """Return what a model makes of two samples.  Raises NoLoss."""
    try:
        with torch.no_grad():
            return model.eval()(**arguments)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error} {place_of(error)}".split())
        raise NoLoss(f"forward fails on two samples: {why}") from error


def _parts_of(output: object) -> dict[OutputName, Tensor]:
    """Return the tensors that an output holds, by number or name; None is the name of it whole."""
    if isinstance(output, Tensor):
        return {None: output}
    if isinstance(output, tuple | list):
        found: Iterable[tuple[OutputName, object]] = enumerate(output)
    elif isinstance(output, Mapping):
        found = output.items()
    else:
        found = ((name, getattr(output, name, None)) for name in ("loss", "logits"))
    return {name: value for name, value in found if isinstance(value, Tensor)}


def _compare(
    parts: Mapping[OutputName, Tensor], batch: Mapping[str, Tensor], targets: Sequence[str]
) -> LossDraft:
    """Return the loss that compares a part of an output with a field; an empty one if none does.

    targets: the fields, in order.
    """
    for name, value in parts.items():
        for field in targets:
            if kind := _kind(value, batch[field]):
                where: dict[str, OutputName] = {"target": field, "part": name}
                metric = _METRICS.get(kind)
                return LossDraft(
                    loss=_target(kind, where),
                    metrics=f"{{{metric}: {_target(metric, where, 'metrics')}}}" if metric else "",
                    note=f"the loss reads value {name} of what the model returns, and no other: a "
                    "loss of yours, loss(output, batch), can add them"
                    if isinstance(name, int)
                    else "",
                )
    return LossDraft()


def _target(name: str, arguments: Mapping[str, OutputName], module: str = "losses") -> str:
    """Return the YAML of a loss or a metric of flowrun's, without what is the default."""
    known = (("target", "targets"), ("part", None), ("part", "logits"))
    shown = [f", {key}: {value}" for key, value in arguments.items() if (key, value) not in known]
    return f"{{_target_: flowrun.models.{module}.{name}{''.join(shown)}}}"


def _kind(logits: Tensor, target: Tensor) -> str:
    """Return the loss that fits an output and a field; empty if none does."""
    numbers = not target.dtype.is_floating_point and target.dtype != torch.bool
    classes = numbers and logits.dtype.is_floating_point
    if classes and logits.shape[:-1] == target.shape and logits.shape[-1] > int(target.max()):
        return "cross_entropy"
    if logits.shape != target.shape:
        return ""
    return "binary_cross_entropy" if set(target.unique().tolist()) <= {0, 1} else "squared_error"
