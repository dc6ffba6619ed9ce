"""optim -> Optimizer: what the recipe says of the update, checked against the update itself."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from flowrun.engine.capture.update_trace import keywords_of
from flowrun.engine.errors import RecipeError
from flowrun.engine.strategy import Optimizer, ParameterGroup, Settings
from flowrun.launcher.job.lr_schedule import rates
from flowrun.launcher.model.build import is_freezing
from flowrun.launcher.model.targets import find
from flowrun.launcher.recipe.recipe_errors import did_you_mean, require
from flowrun.launcher.recipe.schema import Optim
from flowrun.launcher.recipe.value_ranges import check_number
from flowrun.models import optimizers

FUSED = {  # the engine's own ops, and their numbers
    "adamw": ("beta1", "beta2", "eps", "weight_decay"),
    "sgd": ("momentum", "weight_decay", "nesterov"),
}
TRACED: Mapping[str, Callable[..., object]] = {
    "adagrad": optimizers.adagrad,
    "lamb": optimizers.lamb,
    "lion": optimizers.lion,
}


def optimizer_of(optim: Optim, steps: int) -> Optimizer:
    """Raises RecipeError at the key of optim that is wrong.  steps: of the run."""
    function: Callable[..., object] | None
    if optim.update:
        name, function, numbers = _own(optim.update)
    else:
        name, function = optim.name, TRACED.get(optim.name)
        known = tuple(keywords_of(function)) if function else FUSED[name]
        numbers = {key: _value(optim, key) for key in known}
    groups = tuple(
        ParameterGroup(pattern, _settings(pattern, given, numbers))
        for pattern, given in optim.groups.items()
        if not is_freezing(given) or (len(given) > 1 and not given["frozen"])  # build.py froze it
    )
    lrs = [optim.lr, *(float(value) for g in groups for key, value in g.settings if key == "lr")]
    return Optimizer(
        name,
        (("lr", optim.lr), *numbers.items()),
        optim.clip_norm,
        optim.clip_value,
        groups=groups,
        rates=rates(optim, lrs, steps),
        ema=optim.ema,
        sparse=optim.sparse,
        function=function,
    )


def _value(optim: Optim, key: str) -> float | bool:
    if key in ("beta1", "beta2"):
        return float(optim.betas[key == "beta2"])
    return getattr(optim, key)  # type: ignore[no-any-return]


def _own(
    update: Mapping[str, object],
) -> tuple[str, Callable[..., object], dict[str, float | bool]]:
    """The user's function and its numbers: those given, its defaults for the rest."""
    require(
        bool(update.get("_target_")),
        "optim.update._target_",
        "nothing says which function updates the weights.",
        "Write the dotted path of a function (param, grad, states …, *, lr, numbers …).",
    )
    function = find(str(update["_target_"]), "optim.update._target_")
    given = {str(key): value for key, value in update.items() if key != "_target_"}
    numbers = dict(keywords_of(function))
    for key, value in given.items():
        where = f"optim.update.{key}"
        problem = f"{function.__name__} takes no number {key!r}."
        require(key in numbers, where, problem, did_you_mean(key, numbers))
        _check_number(value, where)
    numbers.update(given)
    for key, value in numbers.items():
        require(
            value is not inspect.Parameter.empty,
            "optim.update",
            f"{function.__name__} needs the number {key!r}.",
            f"Write optim: {{update: {{_target_: …, {key}: …}}}}.",
        )
    return function.__name__, function, numbers


def _settings(pattern: str, given: Any, numbers: Mapping[str, float | bool]) -> Settings:
    """Return the settings that a group replaces; betas stand for beta1 and beta2."""
    where = f"optim.groups.{pattern}"
    if not isinstance(given, Mapping) or not given:
        raise RecipeError(where, "only a mapping of keys can stand here.", "{weight_decay: 0}.")
    settings: dict[str, float | bool] = {}
    for key, value in given.items():
        if key == "frozen":
            continue
        if key == "betas" and "beta1" in numbers:
            settings |= _betas(value, f"{where}.betas")
            continue
        known, problem = ("lr", *numbers), f"the update takes no {key!r}."
        require(key in known, f"{where}.{key}", problem, did_you_mean(key, known))
        _check_number(value, f"{where}.{key}", f"optim.{key}")
        settings[key] = value if isinstance(value, bool) else float(value)
    return tuple(settings.items())


def _betas(value: Any, where: str) -> dict[str, float]:
    two = isinstance(value, list | tuple) and len(value) == 2
    require(two, where, f"betas must be two numbers, not {value!r}.", "Usual are [0.9, 0.95].")
    for beta in value:
        _check_number(beta, where, "optim.betas.*")
    return {"beta1": float(value[0]), "beta2": float(value[1])}


def _check_number(value: object, where: str, row: str = "") -> None:
    """row: the key of which it is; of a function's own numbers, none."""
    if not isinstance(value, bool | int | float):
        raise RecipeError(where, f"{value!r} is not a number.", "Write a number, true or false.")
    if row:
        check_number(value, row, where)
    elif not math.isfinite(value):
        raise RecipeError(where, f"{value} is not a finite number.")
