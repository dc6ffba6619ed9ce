"""optim.schedule -> the learning rate of every step, by torch's own schedulers.

A schedule is {name: CosineAnnealingLR, T_max: 200}: a class of torch.optim.lr_scheduler and its
arguments; or a list of such, one after another, where each but the last says how many `steps` it
lasts (torch's SequentialLR).  optim.warmup_steps puts a linear rise in front: step k of n has
(k + 1) / n of the rate.  A T_max or total_steps that is left out is the number of steps that the
schedule lasts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import SGD, lr_scheduler

from flowrun.engine.errors import RecipeError
from flowrun.launcher.model.targets import check_arguments
from flowrun.launcher.recipe.recipe_errors import did_you_mean
from flowrun.launcher.recipe.schema import Optim

SCHEDULES: Mapping[str, type[lr_scheduler.LRScheduler]] = {  # torch's, or classes of the same form
    kind.__name__: kind
    for kind in (
        lr_scheduler.ConstantLR,
        lr_scheduler.CosineAnnealingLR,
        lr_scheduler.CosineAnnealingWarmRestarts,
        lr_scheduler.CyclicLR,
        lr_scheduler.ExponentialLR,
        lr_scheduler.LinearLR,
        lr_scheduler.MultiStepLR,
        lr_scheduler.OneCycleLR,
        lr_scheduler.PolynomialLR,
        lr_scheduler.StepLR,
    )
}
# what torch's own arithmetic raises of arguments that the recipe gives
_REFUSALS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_LASTS = {"CosineAnnealingLR": "T_max", "OneCycleLR": "total_steps"}
_ALONE = ("OneCycleLR", "CyclicLR")  # they set the rate themselves, whatever came before
Rates = tuple[tuple[float, tuple[float, ...]], ...]


def rates(optim: Optim, lrs: Iterable[float], steps: int) -> Rates:
    """Compute (lr, rate of each of `steps` steps) for every learning rate in `lrs`.

    optim: its schedule and warmup; without either the result is empty.  Raises RecipeError at the
    part of optim.schedule that is wrong.
    """
    parts = _parts(optim, steps)
    if not parts:
        return ()
    distinct = sorted(set(lrs))
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in distinct]
    optimizer = SGD(groups, lr=optim.lr)
    columns: list[list[float]] = [[] for _ in distinct]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls what torch itself calls deprecated
        scheduler = _sequence(optimizer, parts)
        for step in range(steps):
            if step:
                optimizer.step()
                _advance(scheduler, step)
            for column, group in zip(columns, optimizer.param_groups, strict=True):
                column.append(_check_rate(group["lr"], step))
    return tuple((lr, tuple(column)) for lr, column in zip(distinct, columns, strict=True))


def _advance(scheduler: lr_scheduler.LRScheduler, step: int) -> None:
    try:
        scheduler.step()
    except _REFUSALS as error:
        raise RecipeError(
            "optim.schedule",
            f"it has no rate of step {step}: {type(error).__name__}: {error}",
            "Let total_steps and T_max be train.steps, or leave them out.",
        ) from error


def _check_rate(rate: object, step: int) -> float:
    if not isinstance(rate, int | float) or not math.isfinite(rate) or rate < 0:
        raise RecipeError(
            "optim.schedule",
            f"the rate of step {step} is {rate}.",
            "A rate is a finite number of 0 or more.",
        )
    return float(rate)


SchedulePart = tuple[str, dict[str, Any], int]  # (where, name and arguments, steps that it lasts)


def _parts(optim: Optim, steps: int) -> list[SchedulePart]:
    """The schedules in order, with the steps that each lasts."""
    given = optim.schedule
    listed = isinstance(given, list | tuple)
    entries = list(given) if listed else [given] if given else []
    parts: list[SchedulePart] = []
    if optim.warmup_steps:
        rise = {
            "name": "LinearLR",
            "start_factor": 1.0 / optim.warmup_steps,
            "total_iters": max(1, optim.warmup_steps - 1),
        }
        parts.append(("optim.warmup_steps", rise, optim.warmup_steps))
    for k, entry in enumerate(entries):
        where = f"optim.schedule.{k}" if listed else "optim.schedule"
        _check(entry, where)
        arguments = dict(entry)
        left = max(1, steps - sum(lasts for _, _, lasts in parts))
        lasts = arguments.pop("steps", None)
        if k < len(entries) - 1 and (not isinstance(lasts, int) or lasts < 1):
            raise RecipeError(
                f"{where}.steps",
                f"nothing says how long {arguments['name']} lasts before the next begins.",
                "Write steps: a number of steps, 1 or more.",
            )
        parts.append((where, arguments, int(lasts or left)))
    if parts and parts[-1][0] == "optim.warmup_steps":
        parts.append(("optim.schedule", {"name": "ConstantLR", "factor": 1.0}, steps))
    _check_alone(parts)
    return parts


def _check_alone(parts: list[SchedulePart]) -> None:
    for where, arguments, _ in parts:
        if arguments["name"] in _ALONE and len(parts) > 1:
            raise RecipeError(
                f"{where}.name",
                f"{arguments['name']} rises and falls by itself; it follows no other schedule.",
                "Leave out warmup_steps and the other schedules, or use LinearLR and "
                "CosineAnnealingLR.",
            )


def _check(entry: object, where: str) -> None:
    if not isinstance(entry, Mapping) or "name" not in entry:
        raise RecipeError(
            where, "nothing names the schedule.", "Write {name: CosineAnnealingLR, T_max: 200}."
        )
    if entry["name"] not in SCHEDULES:
        why = "It waits for a measurement. " if entry["name"] == "ReduceLROnPlateau" else ""
        raise RecipeError(
            f"{where}.name",
            f"there is no schedule {entry['name']!r}.",
            f"{why}{did_you_mean(str(entry['name']), SCHEDULES)}",
        )


def _sequence(optimizer: SGD, parts: list[SchedulePart]) -> lr_scheduler.LRScheduler:
    made = [_make_scheduler(optimizer, *part) for part in parts]
    if len(made) == 1:
        return made[0]
    ends = [sum(lasts for _, _, lasts in parts[: k + 1]) for k in range(len(parts) - 1)]
    return lr_scheduler.SequentialLR(optimizer, made, ends)


def _make_scheduler(
    optimizer: SGD, where: str, arguments: dict[str, Any], lasts: int
) -> lr_scheduler.LRScheduler:
    scheduler: Any = SCHEDULES[arguments["name"]]
    given = {key: value for key, value in arguments.items() if key != "name"}
    if arguments["name"] in _LASTS:
        given.setdefault(_LASTS[arguments["name"]], lasts)
    if arguments["name"] == "OneCycleLR":
        given.setdefault("max_lr", [group["lr"] for group in optimizer.param_groups])
    if arguments["name"] in _ALONE and given.setdefault("cycle_momentum", False):
        raise RecipeError(f"{where}.cycle_momentum", "only the learning rate is scheduled.")
    check_arguments(scheduler, given, where, positional=1)
    try:
        return scheduler(optimizer, **given)  # type: ignore[no-any-return]
    except _REFUSALS as error:
        raise RecipeError(
            where, f"{arguments['name']} refused its arguments: {type(error).__name__}: {error}"
        ) from error
