"""Make what a recipe names: model, data set, loss and metrics.

Each mistake is a RecipeError at the key that names it.  The working directory is importable, so
that a recipe may name the user's own files.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.utils.data import Dataset

from flowrun.engine.capture.joint_graph import LOSS
from flowrun.engine.errors import ArgumentError, RecipeError
from flowrun.launcher.model.adapters import add_adapters
from flowrun.launcher.model.dataset_checks import check_items, check_kind, check_labels
from flowrun.launcher.model.deferred import LEAST_BYTES, Unrecordable, defer
from flowrun.launcher.model.hugging_face.convert_models import import_transformers
from flowrun.launcher.model.initial import Initial, initial_of, named_tensors
from flowrun.launcher.model.packed_inputs import packed_inputs
from flowrun.launcher.model.pretrained import weights_of
from flowrun.launcher.model.vocabulary import check_vocabulary
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import did_you_mean
from flowrun.launcher.recipe.schema import FP32, KEEP_DTYPE, Target
from flowrun.launcher.terminal import doing
from flowrun.launcher.terminal.units import size
from flowrun.models.data.transforms import import_torchvision
from flowrun.models.losses import part_of

_WITH_TORCHVISION = ("torchvision", "timm", "transformers")  # these import it
_NARROW = (torch.bfloat16, torch.float16)  # where an update rounded to nearest is often lost
_FULL_KEY = re.compile(r"^full_key: (.+)$", re.MULTILINE)  # in Hydra's error
LossFunction = Callable[[Any, Mapping[str, Tensor]], Tensor]  # (output, batch) -> scalar mean


@dataclass(frozen=True, kw_only=True)
class RecipeParts:
    """Everything that a recipe names.  inputs: model argument -> batch field, never empty."""

    model: nn.Module
    data: Dataset[dict[str, Tensor]]
    inputs: dict[str, str]
    loss: LossFunction | None
    metrics: dict[str, LossFunction]


@dataclass(frozen=True)
class Described:
    """A model whose larger weights have no memory, and the values that they begin with.

    notes: what went otherwise than a user expects.
    """

    model: nn.Module
    initial: Initial
    notes: tuple[str, ...]


def build(recipe: Recipe) -> RecipeParts:
    """All parts, made and checked against each other.  Raises RecipeError."""
    data = instantiate_data(recipe)
    model = instantiate_model(recipe)
    check_vocabulary(recipe, model, data)
    inputs = task_inputs(recipe, model, data[0])
    check_labels(model, inputs, recipe.task.loss, data)
    return RecipeParts(
        model=model,
        data=data,
        inputs=inputs,
        loss=instantiate_loss(recipe),
        metrics=instantiate_metrics(recipe),
    )


def instantiate_model(recipe: Recipe, notes: list[str] | None = None) -> nn.Module:
    """The model as plain torch makes it, whole: its weights drawn from `train.seed`, or read from
    `model.weights`.  notes: where to say what went otherwise than a user expects.
    """
    with _keep_random_state(recipe):
        model = _make_model(recipe, notes)
    if recipe.weights:
        tensors = named_tensors(model)
        with torch.no_grad():
            for name, value in weights_of(model, recipe.weights).items():
                tensors[name].copy_(value)
    return model


def describe_model(recipe: Recipe, draws: bool = True) -> Described:
    """The same model without memory for what it holds, where its constructor can be followed
    (deferred.py), and whole where it cannot.

    draws: False is for a plan alone: nothing random is drawn, and initial values are any.
    """
    notes: list[str] = []
    try:
        with _keep_random_state(recipe):
            model, initial = defer(lambda: _make_model(recipe, notes), draws=draws)
    except Exception as error:  # our doing, or it comes again
        if isinstance(error, RecipeError) and error.__cause__ is None:
            raise  # a key is wrong, whatever the constructor does
        model = instantiate_model(recipe, notes)
        return Described(model, initial_of(model), (*notes, _note_whole(model, error, recipe)))
    read = weights_of(model, recipe.weights) if recipe.weights else {}
    held = {name: initial.held_bytes(name) for name in initial if name not in read}
    large = [name for name, num_bytes in held.items() if num_bytes >= LEAST_BYTES]
    if large:
        more = f" and {len(large) - 1} more" if large[1:] else ""
        notes.append(
            f"the launcher holds {sum(held[name] for name in large) / 1e6:.1f} MB of weights and "
            f"buffers whose values are no torch op's (a file, an array): {large[0]}{more}"
        )
    return Described(model, initial.but(read), tuple(notes))


def _note_whole(model: nn.Module, error: Exception, recipe: Recipe) -> str:
    """Note that a constructor could not be followed.  error: of the attempt."""
    found = error.__cause__.__cause__ if error.__cause__ else None
    why = " ".join(str(found if isinstance(found, Unrecordable) else error).split())
    held = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    name = str(recipe.model["_target_"])
    return (
        f"{name} cannot be followed ({why}), so the launcher holds the whole model, {size(held)}, "
        "and ranks take their weights from it; for one that is larger than a host, name its class "
        "and model.weights (docs/how_to/any_model.md)"
    )


@contextmanager
def _keep_random_state(recipe: Recipe) -> Iterator[None]:
    """Leave the global random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.train.seed)
        yield


def _make_model(recipe: Recipe, notes: list[str] | None = None) -> nn.Module:
    """Make the model that a recipe names.  notes: where to say what went otherwise
    than a user expects.
    """
    model = make_object(recipe.model, "model")
    if not isinstance(model, nn.Module):
        raise RecipeError(
            "model._target_", f"this makes a {type(model).__name__}, not a torch.nn.Module."
        )
    narrow = _widen_trained(model, recipe)  # before adapters freeze what they are added to
    add_adapters(model, recipe.adapters)
    _freeze(model, "", recipe.optim.groups)
    narrow |= _widen_trained(model, recipe)  # what a group trains again
    if notes is not None and narrow:
        notes[:] = _note_narrow(narrow.values(), recipe.precision.param_dtype)
    return model


def _widen_trained(module: nn.Module, recipe: Recipe) -> dict[int, nn.Parameter]:
    """Make the parameters that train fp32 where the module made them in bf16 or fp16, with the
    buffers of the same module, unless `precision.param_dtype` says that they stay; return each
    once, by its id.

    What the constructor froze (a quantised base), and every wider dtype, is left as it is.
    """
    found: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        own = owner.parameters(recurse=False)
        trained = {id(p): p for p in own if p.requires_grad and p.dtype in _NARROW}
        found |= trained
        if recipe.precision.param_dtype == KEEP_DTYPE or not trained:
            continue
        narrow = (b for b in owner.buffers(recurse=False) if b.dtype in _NARROW)
        for tensor in (*trained.values(), *narrow):
            tensor.data = tensor.data.float()
    return found


def _note_narrow(narrow: Collection[nn.Parameter], kept: str) -> list[str]:
    """Note what becomes of the parameters that the model makes in bf16 or fp16.

    narrow: these.  kept: `precision.param_dtype`.
    """
    elements = sum(parameter.numel() for parameter in narrow)
    made = f"the model makes {len(narrow)} parameters in bf16 or fp16 ({elements:,} elements)"
    if kept == FP32:
        return [
            f"{made}: they are kept in fp32, {size(4 * elements)} (precision.param_dtype=bf16 "
            "keeps them in bf16, with updates rounded at random)"
        ]
    if kept == KEEP_DTYPE:
        return [
            f"{made}: they stay so, and each update is rounded to nearest, which loses small ones "
            f"(precision.param_dtype={KEEP_DTYPE})"
        ]
    return []


def _freeze(module: nn.Module, prefix: str, groups: Mapping[str, Any]) -> None:
    """No gradient for parameters that a group of `optim.groups` has frozen; the later pattern wins.
    One that says frozen: false gives those that were frozen before a gradient again.

    prefix: of the names, LOSS for a loss that is a module.  A pattern that begins with LOSS is of
    the loss alone.  Raises RecipeError for a value that is neither true nor false, and for a
    pattern that matches no parameter.
    """
    asked = {pattern: keys["frozen"] for pattern, keys in groups.items() if is_freezing(keys)}
    frozen: dict[str, bool] = {}
    held = module.named_parameters(remove_duplicate=False)
    names = {prefix + name: parameter for name, parameter in held}
    for pattern, value in asked.items():
        where = f"optim.groups.{pattern}"
        if not isinstance(value, bool):
            raise RecipeError(f"{where}.frozen", f"{value!r} is not true or false.")
        found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not found and pattern.startswith(LOSS) == bool(prefix):
            raise RecipeError(
                where,
                f"{pattern!r} matches no parameter of this {'loss' if prefix else 'model'}.",
                f"Names look like: {', '.join([*names][:3])}",
            )
        frozen.update(dict.fromkeys(found, value))
    for name, value in frozen.items():
        parameter = names[name]
        trains = parameter.is_floating_point() or parameter.is_complex()
        parameter.requires_grad_(trains and not value)


def is_freezing(keys: Any) -> bool:
    """Return True if a group of `optim.groups` says whether its parameters are frozen."""
    return isinstance(keys, Mapping) and "frozen" in keys


def instantiate_data(recipe: Recipe) -> Dataset[dict[str, Tensor]]:
    """The data set: map-style, items are dicts of tensors."""
    with doing.show_log("flowrun.models.data"):
        data = make_object(recipe.data, "data")
    check_kind(data)
    check_items(data)
    return data  # type: ignore[no-any-return]


def instantiate_loss(recipe: Recipe) -> LossFunction | None:
    """loss(output, batch) -> scalar, or None where the model's output is or holds the loss."""
    loss = None if recipe.task.loss is None else _partial(recipe.task.loss, "task.loss")
    if isinstance(loss, nn.Module):
        _freeze(loss, LOSS, recipe.optim.groups)
        _widen_trained(loss, recipe)
    return loss


def loss_of(loss: LossFunction | None, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of a batch.

    loss: computes it; None: it is the output itself, or its `loss`.  output: of the model.  batch:
    that it was called with.
    """
    if loss is not None:
        return loss(output, batch)
    return output if isinstance(output, Tensor) else part_of(output, "loss")


def instantiate_metrics(recipe: Recipe) -> dict[str, LossFunction]:
    """name -> metric(output, batch) -> scalar."""
    return {
        name: _partial(metric, f"task.metrics.{name}")
        for name, metric in recipe.task.metrics.items()
    }


def task_inputs(recipe: Recipe, model: nn.Module, item: Mapping[str, Tensor]) -> dict[str, str]:
    """Map arguments of the model to batch fields, by the recipe's `task.inputs` or by equal names;
    documents of packed data go in by themselves.

    item: one of the data set.  Raises RecipeError for a field that it lacks.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    inputs = dict(recipe.task.inputs) or {p.name: p.name for p in named if p.name in item}
    inputs |= packed_inputs(model, item, inputs)
    for argument, field in inputs.items():
        where = f"task.inputs.{argument}"
        if field not in item:
            raise RecipeError(
                where, f"items of the data set have no field {field!r}.", did_you_mean(field, item)
            )
        if not anything and argument not in {p.name for p in named}:
            known = [p.name for p in named]
            raise RecipeError(
                where, f"forward of the model takes no {argument!r}.", did_you_mean(argument, known)
            )
    missing = [p.name for p in named if p.default is p.empty and p.name not in inputs]
    if missing or not inputs:
        raise RecipeError(
            "task.inputs",
            f"nothing feeds the model's argument {missing[0] if missing else 'list'!r}.",
            f"Map it to a field of the items: {', '.join(item)}.",
        )
    return inputs


def make_object(target: Target, where: str) -> Any:
    """The object that `_target_` and its arguments describe; an argument may be such an object."""
    made_by = find(str(target["_target_"]), f"{where}._target_")
    arguments = {key: value for key, value in target.items() if not _is_hydra_word(key)}
    if "_args_" not in target:
        check_arguments(made_by, arguments, where)
    _check_targets_within(arguments, where)
    return _instantiate(target, str(target["_target_"]), where)


def _check_targets_within(arguments: Mapping[str, Any], where: str) -> None:
    """Check the paths alone: a config of transformers takes more than its signature shows."""
    for key, value in arguments.items():
        if isinstance(value, Mapping):
            if "_target_" in value:
                find(str(value["_target_"]), f"{where}.{key}._target_")
            _check_targets_within(value, f"{where}.{key}")
        if isinstance(value, list):
            within = {f"{key}[{k}]": each for k, each in enumerate(value)}
            _check_targets_within(within, where)


def _partial(target: Target, where: str) -> LossFunction:
    """The callable that `_target_` names, with the arguments that the recipe gives after (output,
    batch).
    """
    function = find(str(target["_target_"]), f"{where}._target_")
    arguments = {key: value for key, value in target.items() if not _is_hydra_word(key)}
    if inspect.isclass(function) and issubclass(
        function, nn.Module
    ):  # a loss module: made once, then called
        return make_object(target, where)  # type: ignore[no-any-return]
    check_arguments(function, arguments, where, positional=2)
    made = _instantiate({"arguments": arguments}, str(target["_target_"]), where)["arguments"]
    return functools.partial(function, **made) if made else function  # type: ignore[no-any-return]


def _instantiate(target: Target, name: str, where: str) -> Any:
    try:
        return instantiate(target, _convert_="all")
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, ArgumentError):
            within = _FULL_KEY.search(str(error))  # of a target among the arguments of another
            place = f"{where}.{within[1]}" if within else where
            raise RecipeError(f"{place}.{cause.argument}", cause.problem, cause.instead) from error
        reason = " ".join(str(cause).split()) or type(cause).__name__
        raise RecipeError(
            where, f"{name} refused its arguments: {type(cause).__name__}: {reason}"
        ) from error


def _is_hydra_word(key: str) -> bool:
    return key.startswith("_") and key.endswith("_")


def check_arguments(
    made_by: Any, arguments: Mapping[str, Any], where: str, positional: int = 0
) -> None:
    """Compare the names of `arguments` with the signature of `made_by`, not their values.

    where: the key of the recipe.  positional: how many arguments are given by position.  Raises
    RecipeError for one that is unknown or missing.
    """
    try:
        parameters = list(inspect.signature(made_by).parameters.values())[positional:]
    except (TypeError, ValueError):
        return
    known = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    name = getattr(made_by, "__name__", str(made_by))
    for key in arguments:
        if key not in known and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise RecipeError(
                f"{where}.{key}", f"{name} takes no argument {key!r}.", did_you_mean(key, known)
            )
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in arguments:
            raise RecipeError(
                where,
                f"{name} needs the argument {key!r}.",
                f"Its arguments are {', '.join(known)}.",
            )


def find(path: str, where: str) -> Any:
    """The class or function at a dotted path; a RecipeError says which part is missing."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
        importlib.invalidate_caches()
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        raise RecipeError(where, f"{path!r} is no dotted path.", "Write package.module.Name.")
    if parts[0] in _WITH_TORCHVISION and find_spec("torchvision"):
        import_torchvision()
    found, depth = _deepest_module(parts, where)
    if parts[0] == "transformers":
        import_transformers()  # the lines of a run are no place for its bars
    for part in parts[depth:]:
        if not hasattr(found, part):
            owner = getattr(found, "__name__", str(found))
            known = [name for name in dir(found) if not name.startswith("_")] + _submodules(found)
            near = did_you_mean(part, known) if len(known) < 12 else _near(part, known)
            raise RecipeError(where, f"{owner!r} has no {part!r}.", near)
        found = getattr(found, part)
    if not callable(found):
        raise RecipeError(
            where, f"{path!r} is a {type(found).__name__}, which cannot be called.", "Name a class."
        )
    return found


def _deepest_module(parts: list[str], where: str) -> tuple[Any, int]:
    """The longest leading part of a dotted path that is a module, imported."""
    module: Any = None
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and not (name == error.name or name.startswith(f"{error.name}.")):
                raise RecipeError(where, f"importing {name!r} failed: {error}.") from error
            if module is None:
                tops = [m.name for m in pkgutil.iter_modules()]
                raise RecipeError(
                    where,
                    f"there is no module {name!r}.",
                    _near(name, tops)
                    or "The working directory and installed packages are searched.",
                ) from error
            return module, depth - 1
        except Exception as error:
            raise RecipeError(
                where, f"importing {name!r} failed: {type(error).__name__}: {error}."
            ) from error
    return module, len(parts)


def _submodules(module: Any) -> list[str]:
    return [m.name for m in pkgutil.iter_modules(getattr(module, "__path__", []))]


def _near(word: str, known: list[str]) -> str:
    guess = did_you_mean(word, known)
    return guess if guess.startswith("Did you mean") else ""
