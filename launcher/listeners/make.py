"""Make the loggers and the callbacks that a recipe names."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from flowrun.engine.errors import RecipeError
from flowrun.launcher.listeners.trackers import MLflow, TensorBoard, Trackio, WandB
from flowrun.launcher.model.targets import check_arguments, make_object
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import did_you_mean

# what a recipe that names no logger has; without it there are no curves, which a note says
DEFAULT = "tensorboard"
EVENTS = ("on_start", "on_step", "on_evaluation", "on_save", "on_end")
TARGET = "_target_"


# loggers that a recipe may name, as the module is called that each imports, and its extra of pip
LOGGERS: Mapping[str, Callable[..., Any]] = {
    DEFAULT: TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


@dataclass(frozen=True)
class NamedListener:
    """A listener, and its name in messages.  may_end: a callback, whose error ends the run."""

    name: str
    listener: object
    may_end: bool


def make_listeners(recipe: Recipe) -> list[NamedListener]:
    """Return the loggers and the callbacks of a recipe.  Raises RecipeError."""
    named = () if lacks_default(recipe) else recipe.log
    loggers = [_make_logger(entry, f"log.{k}") for k, entry in enumerate(named)]
    callbacks = [
        _make_own(entry, f"callbacks.{k}", may_end=True) for k, entry in enumerate(recipe.callbacks)
    ]
    for k, callback in enumerate(callbacks):
        _check(callback.listener, f"callbacks.{k}", recipe)
    return [*loggers, *callbacks]


def lacks_default(recipe: Recipe) -> bool:
    """True if a recipe logs to TensorBoard alone, as by default, and it is not installed."""
    return recipe.log == [DEFAULT] and importlib.util.find_spec(DEFAULT) is None


def _check(callback: Any, where: str, recipe: Recipe) -> None:
    """Ask a callback that has a method `check` what is wrong of the recipe.  Raises RecipeError at
    the first thing, a key of the recipe or an argument of the callback.
    """
    if not callable(getattr(callback, "check", None)):
        return
    arguments = inspect.signature(type(callback)).parameters
    for key, problem in callback.check(yaml.safe_load(recipe.to_yaml())).items():
        raise RecipeError(f"{where}.{key}" if key in arguments else key, problem)


def _make_logger(entry: Any, where: str) -> NamedListener:
    if isinstance(entry, Mapping) and TARGET in entry:
        return _make_own(entry, where, may_end=False)
    options = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in LOGGERS:
        raise RecipeError(
            where,
            f"{name!r} is not a logger.",
            f"{did_you_mean(str(name), LOGGERS)} Of your own: {{_target_: my_module.MyLogger}}.",
        )
    if importlib.util.find_spec(name) is None:
        raise RecipeError(where, f"{name} is not installed.", f"pip install 'flowrun[{name}]'")
    check_arguments(LOGGERS[name], options, where)
    return NamedListener(name, LOGGERS[name](**options), may_end=False)


def _make_own(entry: object, where: str, may_end: bool) -> NamedListener:
    if not isinstance(entry, Mapping) or not isinstance(entry.get(TARGET), str):
        raise RecipeError(
            where,
            f"{entry!r} does not say what to make.",
            "Write {_target_: flowrun.launcher.listeners.early_stopping.EarlyStopping, "
            "patience: 3}.",
        )
    made = make_object(dict(entry), where)
    if not any(callable(getattr(made, event, None)) for event in EVENTS):
        raise RecipeError(
            f"{where}.{TARGET}",
            f"{entry[TARGET]} has none of the methods {', '.join(EVENTS)}.",
            "docs/how_to/follow.md shows one.",
        )
    return NamedListener(str(entry[TARGET]).rpartition(".")[2], made, may_end)
