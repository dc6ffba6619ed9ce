"""What a model and its data show when they are looked at and tried.

The classes in a module, an item of a data set, the arguments of forward, a loss that fits.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from flowrun.engine.errors import RecipeError
from flowrun.launcher.recipe.recipe_errors import PlacedError

COMMAND_LINE = "command line"
_LOSSES = "flowrun.models.losses"
_METRICS = {"cross_entropy": "accuracy", "binary_cross_entropy": "binary_accuracy"}


def find_model(target: str) -> tuple[str, str]:
    """Return (dotted path of the model, module that it is in).  Raises RecipeError."""
    from torch import nn

    dotted = target.removesuffix(".py").replace("/", ".") if target.endswith(".py") else target
    module = _import(dotted)
    if module is None:
        return dotted, dotted.rpartition(".")[0]
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == dotted
    ]
    held = {name for name in own if _is_held(module, name, own)}
    whole = [name for name in own if name not in held]
    if len(whole) != 1:
        raise PlacedError(
            COMMAND_LINE,
            target,
            f"this module defines {len(whole) or 'no'} models: {', '.join(whole) or 'none'}.",
            f"Name one: flowrun init {dotted}.{whole[-1] if whole else 'Net'}.",
        )
    return f"{dotted}.{whole[0]}", dotted


def _is_held(module: Any, name: str, own: Sequence[str]) -> bool:
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


def _import(dotted: str) -> Any:
    """Return the module of this name; None if it is no module, but maybe something in one."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
        importlib.invalidate_caches()
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name and (dotted == error.name or dotted.startswith(f"{error.name}.")):
            return None
        raise RecipeError(COMMAND_LINE, f"importing {dotted!r} failed: {error}.") from error
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise RecipeError(COMMAND_LINE, f"importing {dotted!r} failed: {why}.") from error


def call_maker(maker: Any, path: str) -> Any:
    try:
        return maker()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise RecipeError(COMMAND_LINE, f"{path}() failed: {why}") from error


def read_first_item(maker: Any, path: str) -> tuple[Mapping[str, Any], int]:
    """Return an item of a data set and their number.  Raises RecipeError."""
    from flowrun.launcher.model.dataset_checks import check_items, check_kind

    data = call_maker(maker, path)
    check_kind(data)
    check_items(data)
    return data[0], len(data)


def describe_field(value: Any) -> str:
    """Return the dtype and the shape of a field: "float32 3 x 32 x 32"."""
    import torch

    tensor = torch.as_tensor(value)
    shape = " x ".join(map(str, tensor.shape)) or "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"


def arguments_of_forward(model: Any) -> dict[str, bool]:
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


def find_loss(
    model: Any, item: Mapping[str, Any], inputs: Mapping[str, str], targets: Sequence[str]
) -> tuple[str, str]:
    """Return loss and metrics as YAML, by what the model returns for two samples; no loss where it
    returns one itself.

    model: None: it could not be made.  item: of the data set.  inputs: argument of forward ->
    field.  targets: fields that a loss may compare with, in order.  Raises NoLoss.
    """
    import torch

    if model is None:
        raise NoLoss("the model could not be tried, as its arguments are missing")
    batch = {name: torch.stack([torch.as_tensor(value)] * 2) for name, value in item.items()}
    try:
        with torch.no_grad():
            output = model.eval()(**{argument: batch[field] for argument, field in inputs.items()})
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise NoLoss(f"forward fails on two samples: {why}") from error
    if getattr(output, "loss", None) is not None or getattr(output, "shape", None) == ():
        return "", ""
    logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    for target in targets if logits is not None else ():
        if kind := _kind(logits, batch[target]):
            end = "}" if target == "targets" else f", target: {target}}}"
            metric = _METRICS.get(kind)
            metrics = (
                f"{{{metric}: {{_target_: flowrun.models.metrics.{metric}{end}}}" if metric else ""
            )
            return f"{{_target_: {_LOSSES}.{kind}{end}", metrics
    shape = "" if logits is None else f", {' x '.join(map(str, logits.shape))} for two samples"
    raise NoLoss(f"no loss of flowrun fits the output{shape}: write loss(output, batch) -> scalar")


def _kind(logits: Any, target: Any) -> str:
    """Return the loss that fits an output and a field; empty if none does."""
    classes = not target.dtype.is_floating_point and logits.dtype.is_floating_point
    if classes and logits.shape[:-1] == target.shape and logits.shape[-1] > int(target.max()):
        return "cross_entropy"
    if logits.shape != target.shape:
        return ""
    return "binary_cross_entropy" if set(target.unique().tolist()) <= {0, 1} else "squared_error"
