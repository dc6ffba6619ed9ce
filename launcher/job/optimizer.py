"""optim -> Optimizer: what the recipe says of the update, checked against the update itself."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer as TorchOptimizer

from flowrun.engine.capture.capture import Task
from flowrun.engine.capture.update_trace import keywords_of
from flowrun.engine.errors import RecipeError, refuse_as
from flowrun.engine.ops.flow.update import FUSED
from flowrun.engine.passes.update.torch_update import NOT_NUMBERS, TorchUpdate
from flowrun.engine.strategy import Argument, Optimizer, ParameterGroup, Update
from flowrun.launcher.job.lr_schedule import rates
from flowrun.launcher.model.build import is_freezing
from flowrun.launcher.model.targets import find
from flowrun.launcher.recipe.recipe_errors import did_you_mean, require
from flowrun.launcher.recipe.schema import OPTIMIZERS, Optim
from flowrun.launcher.recipe.value_ranges import check_number
from flowrun.launcher.store.checkpoint import Checkpoint
from flowrun.models import optimizers

OF_TORCH: Mapping[str, type[TorchOptimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, TorchOptimizer) and kind is not TorchOptimizer
}
_EITHER = "Write _target_: torch.optim.Adam, or one of your own, and numbers that it takes."


def optimizer_of(optim: Optim, steps: int) -> Optimizer:
    """Raises RecipeError at the key of optim that is wrong.  steps: of the run."""
    if optim.update:
        default = _read_update(optim.update, "optim")
    else:
        default = _find_named(optim.name, "optim")
        default = replace(
            default, settings=tuple((key, _value(optim, key)) for key, _ in default.settings)
        )
    groups = tuple(
        _group(pattern, given, default)
        for pattern, given in optim.groups.items()
        if not is_freezing(given) or (len(given) > 1 and not given["frozen"])  # build.py froze it
    )
    _check_known(groups, default)
    lrs = [optim.lr, *(float(v) for g in groups for key, v in g.settings if key == "lr")]  # type: ignore[arg-type]
    return Optimizer(
        default.name,
        (("lr", optim.lr), *default.settings),
        optim.clip_norm,
        optim.clip_value,
        groups=groups,
        rates=rates(optim, lrs, steps),
        ema=optim.ema,
        sparse=optim.sparse,
        function=default.function,
    )


def is_own(function: Callable[..., object] | None) -> bool:
    """Return whether an update is a function of the user, no class and none of these here."""
    return inspect.isfunction(function) and function.__module__ != optimizers.__name__


def _value(optim: Optim, key: str) -> float | bool:
    if key in ("beta1", "beta2"):
        return float(optim.betas[key == "beta2"])
    return getattr(optim, key)  # type: ignore[no-any-return]


def _read_update(given: object, where: str) -> Update:
    """Return an update by its name or its function, with its numbers: those given, and defaults for
    the rest.
    """
    given = {"name": given} if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        raise RecipeError(where, f"{given!r} says no update.", _EITHER)
    name, target = given.get("name"), given.get("_target_")
    asked = {str(key): x for key, x in given.items() if key not in ("name", "_target_")}
    one = bool(name) != bool(target)
    require(one, f"{where}._target_", "nothing says which function updates the weights.", _EITHER)
    if name:
        words = dict.fromkeys((*OPTIMIZERS, *OF_TORCH))
        instead = did_you_mean(str(name), words)
        require(name in words, f"{where}.name", f"no update is {name!r}.", instead)
    if name in OPTIMIZERS:
        made = _with_numbers(_find_named(str(name), where), asked)
    else:
        function = find(str(target), f"{where}._target_") if target else OF_TORCH[str(name)]
        if inspect.isclass(function):
            return _of_class(function, asked, where, f"{where}.{'_target_' if target else 'name'}")
        made = _with_numbers(_of_function(function, where), asked)
    for key, value in dict[str, object](made.settings).items():
        problem = f"{made.name} needs the number {key!r}."
        instead = f"Write {where.rpartition('.')[2]}: {{_target_: …, {key}: …}}."
        require(value is not inspect.Parameter.empty, where, problem, instead)
    return made


def _find_named(name: str, where: str) -> Update:
    """Return the update of a word of optim.name, with its own numbers."""
    if name in FUSED:
        return Update(name, tuple(FUSED[name].numbers.items()), key=where)
    return replace(_of_function(find(OPTIMIZERS[name], where), where), name=name)


def _of_function(function: Callable[..., object], where: str) -> Update:
    known = tuple(keywords_of(function).items())
    return Update(getattr(function, "__name__", "update"), known, function, where)


def _with_numbers(update: Update, asked: Mapping[str, object]) -> Update:
    """Return the update with these numbers in place of its own; betas stand for beta1 and beta2."""
    numbers = dict(update.settings)
    for key, value in asked.items():
        where = f"{update.key}.{key}"
        if key == "betas" and "beta1" in numbers and update.function is None:
            numbers |= _betas(value, where)
            continue
        problem = f"{update.name} takes no number {key!r}."
        require(key in numbers, where, problem, did_you_mean(key, numbers))
        numbers[key] = _read_number(value, where)
    return replace(update, settings=tuple(numbers.items()))


def _of_class(kind: type, asked: Mapping[str, object], where: str, named: str) -> Update:
    """Return the update of a class of torch.optim, or of another library that is like it.

    named: the key that says so, of those in `where`.
    """
    what = f"{kind.__name__} is not a class derived from torch.optim.Optimizer."
    require(issubclass(kind, TorchOptimizer), named, what, _EITHER)
    known = {
        key: p.default
        for key, p in inspect.signature(kind).parameters.items()
        if key not in NOT_NUMBERS
    }
    for key, value in asked.items():
        problem = f"{kind.__name__} takes no {key!r} here."
        require(key in known, f"{where}.{key}", problem, did_you_mean(key, known))
        known[key] = _read_argument(value, f"{where}.{key}")
    function = TorchUpdate(kind, tuple(known.items()))

    def refuse(error: Exception) -> RecipeError:
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        problem = f"{kind.__name__} of {kind.__module__} cannot be traced: {reason}."
        instead = "Write its update as a function (docs/how_to/training.md)."
        return RecipeError(named, problem, instead)

    with refuse_as(refuse):
        function.make(torch.zeros(2, 3))
        for name, fused in FUSED.items():  # one op, unless an argument asks for more than it does
            takes = {"betas", *fused.numbers}
            if fused.kind is kind and not any(known[key] for key in known.keys() - takes):
                numbers = {key: value for key, value in known.items() if key in takes}
                return _with_numbers(_find_named(name, where), numbers)
        function.states((2, 3))
    return Update(kind.__name__.lower(), function.numbers, function, where)


def _read_argument(value: object, where: str) -> Argument:
    """Return what a class of torch takes: a number, numbers, or a word."""
    if isinstance(value, list | tuple):
        return tuple(_read_number(each, where) for each in value)
    return value if isinstance(value, str) or value is None else _read_number(value, where)


def _group(pattern: str, given: Any, default: Update) -> ParameterGroup:
    """Return a group with what it replaces; betas stand for beta1 and beta2."""
    where = f"optim.groups.{pattern}"
    if not isinstance(given, Mapping) or not given:
        raise RecipeError(where, "only a mapping of keys can stand here.", "{weight_decay: 0}.")
    own = _read_update(given["update"], f"{where}.update") if "update" in given else None
    numbers = dict((own or default).settings)
    settings: dict[str, Argument] = {}
    until = given.get("frozen_until")
    is_count = until is None or (isinstance(until, int) and until >= 0 and until is not True)
    problem = f"{until!r} is not a number of steps."
    require(is_count, f"{where}.frozen_until", problem, "Write an integer, such as 500.")
    for key, value in given.items():
        if key in ("frozen", "frozen_until", "update"):
            continue
        if key == "betas" and "beta1" in numbers:
            settings |= _betas(value, f"{where}.betas")
            continue
        _read_number(value, f"{where}.{key}", f"optim.{key}")
        settings[key] = value if isinstance(value, bool) else float(value)
    return ParameterGroup(pattern, tuple(settings.items()), own, until)


def _check_known(groups: Sequence[ParameterGroup], default: Update) -> None:
    """Raise RecipeError for a number that no update takes; the compiler knows whose each is."""
    updates = (default, *(group.update for group in groups if group.update))
    known = ("lr", *dict.fromkeys(key for update in updates for key, _ in update.settings))
    for group in groups:
        for key, _ in group.settings:
            where, problem = f"optim.groups.{group.pattern}.{key}", f"the update takes no {key!r}."
            words = (*known, "frozen", "frozen_until", "update")
            require(key in known, where, problem, did_you_mean(key, words))


def _betas(value: Any, where: str) -> dict[str, float]:
    two = isinstance(value, list | tuple) and len(value) == 2
    require(two, where, f"betas must be two numbers, not {value!r}.", "Usual are [0.9, 0.95].")
    for beta in value:
        _read_number(beta, where, "optim.betas.*")
    return {"beta1": float(value[0]), "beta2": float(value[1])}


def _read_number(value: object, where: str, row: str = "") -> float | bool:
    """Return a number.  row: the key of which it is; of a function's own numbers, none."""
    if not isinstance(value, bool | int | float):
        raise RecipeError(where, f"{value!r} is not a number.", "Write a number, true or false.")
    if row:
        check_number(value, row, where)
    elif not math.isfinite(value):
        raise RecipeError(where, f"{value} is not a finite number.")
    return value


# ---- parameters that train, and since when ------------------------------------------------------


def trained_of(task: Task, optimizer: Optimizer) -> dict[str, int]:
    """Return parameter -> steps before its first update."""
    begun = dict(optimizer.begun)
    return {
        name: begun.get(name, optimizer.frozen_until(name))
        for name, parameter in task.parameters.items()
        if parameter.requires_grad
    }


def find_begun(start: Checkpoint, task: Task, optimizer: Optimizer) -> tuple[tuple[str, int], ...]:
    """Return, for a run that goes on from a checkpoint, (parameter, steps before its first update)
    where that is not what its groups say: those that train by now begin there.
    """
    then = start.about().trained
    if then is None:
        return ()
    found = []
    for name, until in trained_of(task, optimizer).items():
        began = then.get(name, start.step)
        if began >= start.step:  # it has had no update
            began = max(until, start.step)
        if began != until:
            found.append((name, began))
    return tuple(found)


def newly_trained(start: Checkpoint, task: Task, optimizer: Optimizer) -> set[str]:
    """Return the parameters that train by now, and did not when the checkpoint was written."""
    then = start.about().trained
    return set() if then is None else {*trained_of(task, optimizer)} - then.keys()
