"""optim.schedule -> the learning rate of every step, by torch's own schedulers.

A schedule is {name: CosineAnnealingLR, T_max: 200}: a class of torch.optim.lr_scheduler and its
arguments; or a list of such, one after another, where each but the last says how many `steps` it
lasts (torch's SequentialLR).  optim.warmup_steps puts a linear rise in front: step k of n has
(k + 1) / n of the rate.  A T_max or total_steps that is left out is the number of steps that the
schedule lasts.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, lr_scheduler

from flowrun.engine.errors import RecipeError
from flowrun.launcher.model.targets import check_arguments
from flowrun.launcher.recipe.recipe_errors import did_you_mean, require
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
                with _refusing("optim.schedule", f"it has no rate of step {step}", _TOO_SHORT):
                    scheduler.step()
            for column, group in zip(columns, optimizer.param_groups, strict=True):
                column.append(_check_rate(group["lr"], step))
    return tuple((lr, tuple(column)) for lr, column in zip(distinct, columns, strict=True))


_TOO_SHORT = "Let total_steps and T_max be train.steps, or leave them out."


@contextmanager
def _refusing(where: str, what: str, instead: str = "") -> Iterator[None]:
    """Raise RecipeError for what torch's own arithmetic raises of arguments of the recipe."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise RecipeError(where, f"{what}: {type(e).__name__}: {e}", instead) from e


def _check_rate(rate: object, step: int) -> float:
    if not isinstance(rate, int | float) or not math.isfinite(rate) or rate < 0:
        problem = f"the rate of step {step} is {rate}."
        raise RecipeError("optim.schedule", problem, "A rate is a finite number of 0 or more.")
    return float(rate)


@dataclass(frozen=True, slots=True)
class SchedulePart:
    """A schedule and the steps that it lasts.  where: its key."""

    where: str
    name: str
    arguments: Mapping[str, object]
    lasts: int


def _parts(optim: Optim, steps: int) -> list[SchedulePart]:
    """The schedules in order.  Raises RecipeError for one that is not there, does not end, or
    follows none.
    """
    given, rise = optim.schedule, optim.warmup_steps
    listed = isinstance(given, list | tuple)
    entries = list(given) if listed else [given] if given else []
    parts: list[SchedulePart] = []
    if rise:
        linear = {"start_factor": 1.0 / rise, "total_iters": max(1, rise - 1)}
        parts.append(SchedulePart("optim.warmup_steps", "LinearLR", linear, rise))
    for k, entry in enumerate(entries):
        where = f"optim.schedule.{k}" if listed else "optim.schedule"
        name, arguments = _read(entry, where)
        lasts = arguments.pop("steps", None)
        require(
            k == len(entries) - 1 or (isinstance(lasts, int) and lasts > 0),
            f"{where}.steps",
            f"nothing says how long {name} lasts before the next begins.",
            "Write steps: a number of steps, 1 or more.",
        )
        left = max(1, steps - sum(part.lasts for part in parts))
        parts.append(SchedulePart(where, name, arguments, int(lasts or left)))
    if rise and not entries:
        parts.append(SchedulePart("optim.schedule", "ConstantLR", {"factor": 1.0}, steps))
    for part in parts:
        require(
            part.name not in _ALONE or len(parts) == 1,
            f"{part.where}.name",
            f"{part.name} rises and falls by itself; it follows no other schedule.",
            "Leave out warmup_steps and the other schedules, or use LinearLR and "
            "CosineAnnealingLR.",
        )
    return parts


def _read(entry: object, where: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(entry, Mapping) or "name" not in entry:
        instead = "Write {name: CosineAnnealingLR, T_max: 200}."
        raise RecipeError(where, "nothing names the schedule.", instead)
    name, known = str(entry["name"]), SCHEDULES
    why = "It waits for a measurement. " if name == "ReduceLROnPlateau" else ""
    instead = f"{why}{did_you_mean(name, known)}"
    require(name in known, f"{where}.name", f"there is no schedule {name!r}.", instead)
    return name, {key: value for key, value in entry.items() if key != "name"}


def _sequence(optimizer: SGD, parts: list[SchedulePart]) -> lr_scheduler.LRScheduler:
    made = [_make_scheduler(optimizer, part) for part in parts]
    if len(made) == 1:
        return made[0]
    ends = itertools.accumulate(part.lasts for part in parts[:-1])
    return lr_scheduler.SequentialLR(optimizer, made, list(ends))


def _make_scheduler(optimizer: SGD, part: SchedulePart) -> lr_scheduler.LRScheduler:
    kind, given = SCHEDULES[part.name], dict(part.arguments)
    if part.name in _LASTS:
        given.setdefault(_LASTS[part.name], part.lasts)
    if part.name == "OneCycleLR":
        given.setdefault("max_lr", [group["lr"] for group in optimizer.param_groups])
    if part.name in _ALONE and given.setdefault("cycle_momentum", False):
        raise RecipeError(f"{part.where}.cycle_momentum", "only the learning rate is scheduled.")
    check_arguments(kind, given, part.where, positional=1)
    with _refusing(part.where, f"{part.name} refused its arguments"):
        return kind(optimizer, **given)  # type: ignore[arg-type]
