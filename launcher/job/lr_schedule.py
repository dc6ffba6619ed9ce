"""optim.schedule -> the learning rate of every step, by torch's own schedulers.

A schedule is {_target_: f, …}, a function of the step that returns the factor of the rate, or a
class that is like those of torch.optim.lr_scheduler; {name: CosineAnnealingLR, T_max: 200} names
one of these; or a list of such, one after another, where each but the last says how many `steps` it
lasts (torch's SequentialLR).  optim.warmup_steps puts a linear rise in front: step k of n has
(k + 1) / n of the rate.  A T_max or total_steps that is left out is the number of steps that the
schedule lasts.  ReduceLROnPlateau waits for evaluations: these rates are what it is a share of.
"""

from __future__ import annotations

import inspect
import itertools
import math
import warnings
from bisect import bisect
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.optim import SGD, lr_scheduler

from flowrun.engine.errors import RecipeError, refuse_as
from flowrun.engine.strategy import Optimizer
from flowrun.launcher.model.targets import check_arguments, find, make_function
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import did_you_mean, one_of, require
from flowrun.launcher.recipe.schema import TARGET, Optim

_NAMES = """ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR LambdaLR
LinearLR MultiplicativeLR MultiStepLR OneCycleLR PolynomialLR ReduceLROnPlateau StepLR"""
SCHEDULES: Mapping[str, type[lr_scheduler.LRScheduler]] = {  # torch's, or classes of the same form
    name: getattr(lr_scheduler, name) for name in _NAMES.split()
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


def _refusing(where: str, what: str, instead: str = "") -> AbstractContextManager[None]:
    """Raise RecipeError for what torch or a user's class raises of arguments of the recipe."""
    return refuse_as(lambda e: RecipeError(where, f"{what}: {type(e).__name__}: {e}", instead))


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

    @property
    def waits(self) -> bool:
        """True of one that waits for evaluations."""
        return issubclass(self.kind, lr_scheduler.ReduceLROnPlateau)


def _parts(optim: Optim, steps: int) -> list[SchedulePart]:
    """The schedules in order.  Raises RecipeError for one that is not there, does not end, or
    follows none.
    """
    given, rise = optim.schedule, optim.warmup_steps
    listed = isinstance(given, list | tuple)
    entries = list(given) if listed else [given] if given else []
    parts: list[SchedulePart] = []
    if rise:
        entries = entries or [{"name": "ConstantLR", "factor": 1.0}]
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
    for part in parts:
        require(
            part.name not in _ALONE or len(parts) == 1,
            f"{part.where}.name",
            f"{part.name} rises and falls by itself; it follows no other schedule.",
            "Leave out warmup_steps and the other schedules, or use LinearLR and "
            "CosineAnnealingLR.",
        )
        require(
            not part.waits or part is parts[-1],
            f"{part.where}.name",
            f"{part.name} follows evaluations until the run ends.",
            "Write it as the last one.",
        )
    return parts


def _read(entry: object, where: str) -> tuple[type[lr_scheduler.LRScheduler], dict[str, Any]]:
    if not isinstance(entry, Mapping) or (TARGET in entry) == ("name" in entry):
        instead = "Write {name: CosineAnnealingLR, T_max: 200} or {_target_: function of a step}."
        raise RecipeError(where, "nothing names the schedule.", instead)
    name = str(entry.get("name") or entry[TARGET])
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
    made = [
        lr_scheduler.ConstantLR(optimizer, 1.0) if part.waits else _make_scheduler(optimizer, part)
        for part in parts
    ]
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
    for key, value in given.items():
        if isinstance(value, Mapping) and TARGET in value:
            given[key] = make_function(dict(value), part.where, positional=1)
        elif key == "schedulers" and isinstance(value, list):  # SequentialLR, ChainedScheduler
            read = [(f"{part.where}.{key}.{k}", each) for k, each in enumerate(value)]
            parts = [SchedulePart(at, *_read(each, at), part.lasts) for at, each in read]
            given[key] = [_make_scheduler(optimizer, inner) for inner in parts]
    return _make(kind, optimizer, given, part.where)


def _make(
    kind: type[lr_scheduler.LRScheduler], optimizer: SGD, given: dict[str, object], where: str
) -> lr_scheduler.LRScheduler:
    by_name = next(iter(inspect.signature(kind).parameters)) == "schedulers"  # as ChainedScheduler
    check_arguments(kind, given, where, positional=not by_name)
    with _refusing(where, f"{kind.__name__} refused its arguments"):
        return kind(optimizer=optimizer, **given) if by_name else kind(optimizer, **given)  # type: ignore[arg-type]


# ---- rates that wait for evaluations -------------------------------------------------------------


class Plateau:
    """ReduceLROnPlateau, or a class derived from it, whose `step` reads each evaluation of a run.

    A rate is that of torch; after a warm-up or another schedule, as large a share of theirs.  It
    depends on the evaluations before a step alone: a resumed run takes them again.

    part: the class and its arguments.  optimizer: whose rates fall.  every: steps from one of its
    updates to the next.  Raises RecipeError for arguments that the class does not take.
    """

    def __init__(self, part: SchedulePart, optimizer: Optimizer, every: int) -> None:
        self._every, arguments = every, dict(part.arguments)
        self.metric = str(arguments.pop("metric", "loss"))
        self._part = replace(part, arguments=arguments)
        self._lrs = {optimizer.rate_field(lr): lr for lr, _ in optimizer.rates}
        self._begin()

    def _begin(self) -> None:
        groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in self._lrs.values()]
        made = _make(self._part.kind, SGD(groups), dict(self._part.arguments), self._part.where)
        self._scheduler = cast("lr_scheduler.ReduceLROnPlateau", made)
        self._taken: list[tuple[int, float]] = []  # steps done, and what was evaluated then
        self._rates: list[dict[str, float]] = []  # from then on

    def take(self, steps: int, value: float) -> None:
        """Take the evaluation after `steps` steps; a repeated one replaces all from there."""
        new = [(steps, value)]
        if self._taken[-1:] != new and self._taken and self._taken[-1][0] >= steps:
            new = [each for each in self._taken if each[0] < steps] + new
            self._begin()
        for each in new if self._taken[-1:] != new else ():
            self._scheduler.step(each[1])
            self._taken.append(each)
            rates = (float(group["lr"]) for group in self._scheduler.optimizer.param_groups)
            self._rates.append(dict(zip(self._lrs, rates, strict=True)))

    def adjust(self, field: str, planned: float, number: int) -> float:
        """Return the rate of an update.  field: its name in the plan.  planned: what other
        schedules say.  number: of the update, from 0.
        """
        taken = bisect(self._taken, number * self._every, key=lambda each: each[0])
        if field not in self._lrs or not taken:
            return planned
        now, lr = self._rates[taken - 1][field], self._lrs[field]
        return now if planned == lr else planned * now / lr


def waits(optim: Optim) -> bool:
    """Return whether rates wait for evaluations."""
    return any(part.waits for part in _parts(optim, 1))


def plateau_of(recipe: Recipe, optimizer: Optimizer, every: int = 1) -> Plateau | None:
    """Return what changes the rates of a recipe as it is evaluated; None: nothing does.  every:
    steps from one update to the next.  Raises RecipeError where nothing is evaluated in time.
    """
    if not waits(recipe.optim):
        return None
    part, held, train = _parts(recipe.optim, 1)[-1], recipe.eval, recipe.train
    found, known = Plateau(part, optimizer, every), ("loss", *recipe.task.metrics)
    problem = f"{part.name} waits for evaluations, and there are none before the end of the run."
    due = held.every or (train.keep_best and train.save_every)
    instead = "Set eval.every over 0, with eval.batches and eval.fraction."
    require(bool(held.batches and held.fraction and due), part.where, problem, instead)
    what = f"{found.metric} is not a result of an evaluation."
    require(found.metric in known, f"{part.where}.metric", what, f"Write {one_of(known)}.")
    return found
