"""optim.schedule -> the learning rate of every step, by torch's own schedulers.

A schedule is {_target_: f, …}, a function of the step that returns the factor of the rate, or a
class that is like those of torch.optim.lr_scheduler; {name: CosineAnnealingLR, T_max: 200} names
one of these; or a list of such, one after another, where each but the last says how many `steps` it
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
from flowrun.launcher.model.targets import check_arguments, find, make_function
from flowrun.launcher.recipe.recipe_errors import did_you_mean, require
from flowrun.launcher.recipe.schema import TARGET, Optim

SCHEDULES: Mapping[str, type[lr_scheduler.LRScheduler]] = {  # torch's, or classes of the same form
    kind.__name__: kind
    for kind in (
        lr_scheduler.ConstantLR,
        lr_scheduler.CosineAnnealingLR,
        lr_scheduler.CosineAnnealingWarmRestarts,
        lr_scheduler.CyclicLR,
        lr_scheduler.ExponentialLR,
        lr_scheduler.LambdaLR,
        lr_scheduler.LinearLR,
        lr_scheduler.MultiplicativeLR,
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


_PLATEAU = (
    "End the run by the callback flowrun.launcher.listeners.early_stopping.EarlyStopping, with "
    "train.keep_best=loss, and go on from its best: flowrun resume FOLDER --best optim.lr=…"
)
_TOO_SHORT = "Let total_steps and T_max be train.steps, or leave them out."


@contextmanager
def _refusing(where: str, what: str, instead: str = "") -> Iterator[None]:
    """Raise RecipeError for what torch's own arithmetic raises of arguments of the recipe."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise RecipeError(where, f"{what}: {type(e).__name__}: {e}", instead) from e


def _check_rate(rate: object, step: int) -> float:
    rate = rate.item() if isinstance(rate, torch.Tensor) and rate.numel() == 1 else rate
    if not isinstance(rate, int | float) or not math.isfinite(rate) or rate < 0:
        problem = f"the rate of step {step} is {rate!r}."
        raise RecipeError("optim.schedule", problem, "A rate is a finite number of 0 or more.")
    return float(rate)


@dataclass(frozen=True, slots=True)
class SchedulePart:
    """A schedule and the steps that it lasts.  where: its key."""

    where: str
    kind: type[lr_scheduler.LRScheduler]
    arguments: Mapping[str, object]
    lasts: int

    @property
    def name(self) -> str:
        """Of the class."""
        return self.kind.__name__


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
        parts.append(SchedulePart("optim.warmup_steps", lr_scheduler.LinearLR, linear, rise))
    for k, entry in enumerate(entries):
        where = f"optim.schedule.{k}" if listed else "optim.schedule"
        kind, arguments = _read(entry, where)
        lasts = arguments.pop("steps", None)
        require(
            k == len(entries) - 1 or (isinstance(lasts, int) and lasts > 0),
            f"{where}.steps",
            f"nothing says how long {kind.__name__} lasts before the next begins.",
            "Write steps: a number of steps, 1 or more.",
        )
        left = max(1, steps - sum(part.lasts for part in parts))
        parts.append(SchedulePart(where, kind, arguments, int(lasts or left)))
    if rise and not entries:
        constant = {"factor": 1.0}
        parts.append(SchedulePart("optim.schedule", lr_scheduler.ConstantLR, constant, steps))
    for part in parts:
        require(
            part.name not in _ALONE or len(parts) == 1,
            f"{part.where}.name",
            f"{part.name} rises and falls by itself; it follows no other schedule.",
            "Leave out warmup_steps and the other schedules, or use LinearLR and "
            "CosineAnnealingLR.",
        )
    return parts


def _read(entry: object, where: str) -> tuple[type[lr_scheduler.LRScheduler], dict[str, Any]]:
    if not isinstance(entry, Mapping) or (TARGET in entry) == ("name" in entry):
        instead = (
            "Write {name: CosineAnnealingLR, T_max: 200}, or {_target_: a function of a step}."
        )
        raise RecipeError(where, "nothing names the schedule.", instead)
    name = str(entry.get("name") or entry[TARGET])
    if name.rpartition(".")[2] == "ReduceLROnPlateau":
        problem = "ReduceLROnPlateau waits for evaluations, and rates are known before the run."
        raise RecipeError(where, problem, _PLATEAU)
    given = {key: value for key, value in entry.items() if key not in ("name", TARGET)}
    if "name" in entry:
        instead = did_you_mean(name, SCHEDULES)
        require(name in SCHEDULES, f"{where}.name", f"there is no schedule {name!r}.", instead)
        return SCHEDULES[name], given
    made = find(name, f"{where}.{TARGET}")
    if isinstance(made, type) and issubclass(made, lr_scheduler.LRScheduler):
        return made, given
    lasts = {"steps": given.pop("steps")} if "steps" in given else {}
    return lr_scheduler.LambdaLR, {**lasts, "lr_lambda": {TARGET: name, **given}}


def _sequence(optimizer: SGD, parts: list[SchedulePart]) -> lr_scheduler.LRScheduler:
    made = [_make_scheduler(optimizer, part) for part in parts]
    if len(made) == 1:
        return made[0]
    ends = itertools.accumulate(part.lasts for part in parts[:-1])
    return lr_scheduler.SequentialLR(optimizer, made, list(ends))


def _make_scheduler(optimizer: SGD, part: SchedulePart) -> lr_scheduler.LRScheduler:
    kind, given = part.kind, dict(part.arguments)
    if part.name in _LASTS:
        given.setdefault(_LASTS[part.name], part.lasts)
    if part.name == "OneCycleLR":
        given.setdefault("max_lr", [group["lr"] for group in optimizer.param_groups])
    if part.name in _ALONE and given.setdefault("cycle_momentum", False):
        raise RecipeError(f"{part.where}.cycle_momentum", "only the learning rate is scheduled.")
    check_arguments(kind, given, part.where, positional=1)
    for key, value in given.items():
        if isinstance(value, Mapping) and TARGET in value:
            given[key] = make_function(dict(value), part.where, positional=1)
    with _refusing(part.where, f"{part.name} refused its arguments"):
        return kind(optimizer, **given)  # type: ignore[arg-type]
