"""Guess what a model learns from a data set, for flowrun init: which fields forward takes, and the
loss, by what forward returns and by what the field that is left holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice, permutations, product

import torch
from torch import Tensor, nn

from flowrun.engine.capture.capture_errors import describe_failure, describe_value
from flowrun.engine.capture.patches.tracing import silence_logs
from flowrun.engine.errors import RecipeError, refuse_as
from flowrun.engine.torch_internals import FakeTensorMode
from flowrun.launcher.commands.start.inspect_model import TARGETS
from flowrun.launcher.model.targets import make_object
from flowrun.launcher.recipe.recipe_errors import require
from flowrun.launcher.recipe.schema import Target
from flowrun.models.losses import IGNORED, OutputPart

_LOSSES, _METRICS = "flowrun.models.losses.", "flowrun.models.metrics."
_METRIC = {"cross_entropy": "accuracy", "binary_cross_entropy": "binary_accuracy"}
_ORDERS = 24  # of fields that are tried as arguments


@dataclass(frozen=True, slots=True)
class DryModel:
    """A model that is called on two items.  mode: of its tensors, which have no numbers; None: they
    have, as its constructor needs them.
    """

    module: nn.Module
    mode: FakeTensorMode | None

    def __call__(self, fields: Mapping[str, Tensor], inputs: Mapping[str, str]) -> object:
        """Return what forward makes of the first two items.  Raises RecipeError."""
        take = self.mode.from_tensor if self.mode else torch.clone
        values = {argument: take(fields[name][:2]) for argument, name in inputs.items()}
        quiet, rng = warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=[])
        fails = refuse_as(lambda error: RecipeError("model", describe_failure(error)))
        with fails, quiet, silence_logs(), rng, self.mode or nullcontext():
            return self.module(**values)


def make_dry(target: Target) -> DryModel:
    """Make the model of a target, where that can be without numbers.  Raises RecipeError."""
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), None):
        try:
            with silence_logs(), torch.random.fork_rng(devices=[]), mode or nullcontext():
                module = make_object(target, "model")
        except RecipeError:
            if mode is None:
                raise
        else:
            break
    problem = f"this makes a {type(module).__name__}, not a torch.nn.Module."
    require(isinstance(module, nn.Module), "model._target_", problem)
    return DryModel(module, mode)


@dataclass(frozen=True, kw_only=True)
class GuessedTask:
    """A task says what is trained.

    inputs: argument of forward -> field.  loss: None: the model returns it; empty: none is known.
    metrics: by name.  why: of the loss.
    """

    inputs: Mapping[str, str]
    loss: Target | None
    why: str
    metrics: Mapping[str, Target] = field(default_factory=dict)


def guess_task(
    model: DryModel | None, arguments: Mapping[str, bool], fields: Mapping[str, Tensor]
) -> GuessedTask:
    """Return the first task that can be computed, of those whose inputs are fields in some order.

    model: None: it cannot be made yet, and the dtype of the target decides, as where no task can be
    computed.  arguments: of forward, and whether each must be given.  fields: of items (N, …).
    """
    if not model:  # whether it computes a loss is unknown
        arguments = {name: must for name, must in arguments.items() if must or name in fields}
        return _by_dtype(next(_list_inputs(arguments, fields)), fields)
    orders = [*islice(_list_inputs(arguments, fields), _ORDERS)]
    computed: list[GuessedTask] = []
    for inputs in orders:
        with suppress(RecipeError):
            computed.append(_by_output(inputs, fields, model(fields, inputs)))
            if computed[-1].loss != {}:
                return computed[-1]
    return computed[0] if computed else _by_dtype(orders[0], fields)


def _list_inputs(
    arguments: Mapping[str, bool], fields: Mapping[str, Tensor]
) -> Iterator[dict[str, str]]:
    """Yield argument -> field: by equal names, then in each order, fields that are named as targets
    last; each with an optional target and without it.
    """
    optional = next((a for a, must in arguments.items() if a in TARGETS and not must), "")
    needed = [name for name, must in arguments.items() if must]
    equal = {name: name for name in arguments if name in fields and name != optional}
    for named in (equal, {}):
        free = [name for name in needed if name not in named]
        left = sorted(fields.keys() - named.keys(), key=[*fields].index)
        left.sort(key=TARGETS.__contains__)
        for order in permutations(left, min(len(free), len(left))):
            inputs = named | dict(zip(free, order, strict=False))
            rest = _list_left(inputs, fields)
            if optional and rest:
                yield inputs | {optional: rest[0]}
            yield inputs


def _list_left(inputs: Mapping[str, str], fields: Mapping[str, Tensor]) -> list[str]:
    """Return the fields that are not inputs, those first that are named as targets."""
    left = [name for name in fields if name not in inputs.values()]
    return sorted(left, key=lambda name: name not in TARGETS)


def _by_output(
    inputs: Mapping[str, str], fields: Mapping[str, Tensor], output: object
) -> GuessedTask:
    """Return the task for what forward returns of two items: a loss, or what is compared with the
    field that is left, or else with an input.
    """
    parts, left = _parts_of(output), _list_left(inputs, fields)
    if (own := _own_loss(parts)) and (not left or {*TARGETS} & {*inputs}):
        return GuessedTask(inputs=inputs, loss=own[0], why="the model returns it")
    repeated = [name for name in inputs.values() if fields[name].is_floating_point()]
    for (key, part), name in product(parts.items(), (*left, *repeated)):
        fit = fit_loss(fields[name], part)
        if fit and (name in left or fit[0] != "cross_entropy"):
            given = {} if key in (None, "logits") else {"part": key}
            return _task_of(inputs, name, fit[0], fit[2], **given, **fit[1])
    shapes = ", ".join(f"{name} {describe_value(fields[name][:2])}" for name in left) or "no field"
    why = f"none fits: forward returns {describe_value(output)} for two items; left is {shapes}"
    return GuessedTask(inputs=inputs, loss={}, why=why)


def _own_loss(parts: Mapping[OutputPart, Tensor]) -> list[Target | None]:
    """Return a loss for each number that forward returns, `loss` first; None: it needs no name."""
    own = [key for key, part in parts.items() if part.dim() == 0 and part.is_floating_point()]
    return [
        None if key in (None, "loss") else {"_target_": f"{_LOSSES}model_loss", "part": key}
        for key in sorted(own, key=lambda key: key != "loss")
    ]


def _parts_of(output: object) -> dict[OutputPart, Tensor]:
    """Return the tensors of an output, by number or name; None: it is one."""
    if isinstance(output, list | tuple):
        output = dict(enumerate(output))
    parts = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    parts = {None: output} if isinstance(output, Tensor) else parts
    return {key: part for key, part in parts.items() if isinstance(part, Tensor)}


def fit_loss(target: Tensor, output: Tensor) -> tuple[str, Target, str] | None:
    """Return the loss for targets (N, …) against what forward returns for two items (2, …), what it
    is given, and why; None if there is none.
    """
    if target.is_complex() or not output.is_floating_point() or len(output) != 2:
        return None
    every = target.double().unique()
    values = every[every != IGNORED]
    whole = len(values) > 0 and torch.equal(values, values.round())
    holds = f"whole numbers {values.min():g} to {values.max():g}" if whole else "numbers"
    size = _without_ones(target.shape[1:])
    if _without_ones(output.shape[1:]) == size:
        if len(values) < len(every):  # these losses would count -100 as a number
            return None
        if whole and {*values.tolist()} <= {0.0, 1.0}:
            what = f"logit for each{_advise(output, 'Sigmoid')}"
            return "binary_cross_entropy", {}, f"0 and 1, and forward returns a {what}"
        return "squared_error", {}, f"{holds}, and forward returns one number for each"
    for dim in _class_dims(output, size) if whole and values.min() >= 0 else ():
        if values.max() >= output.shape[dim]:
            continue
        what = f"{output.shape[dim]} logits for each{_advise(output, 'Softmax')}"
        given = {"class_dim": 1} if dim == 1 else {}
        return "cross_entropy", given, f"{holds}, and forward returns {what}"
    return None


def _class_dims(output: Tensor, size: Sequence[int]) -> Iterator[int]:
    """Yield the dims of an output (2, …) without which it has a size, the last or the one after the
    items.
    """
    for dim in (-1, 1) if output.dim() > 1 else ():
        others = output.movedim(dim, -1).shape[1:-1]
        if output.shape[dim] > 1 and _without_ones(others) == size:
            yield dim


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [n for n in shape if n != 1]


def _advise(output: Tensor, name: str) -> str:
    """Return what to change where an op of this name, of which the loss takes the input, has made
    the output, up to its shape.
    """
    node = output.grad_fn
    while node and node.name().startswith(("Squeeze", "View", "Unsqueeze", "Reshape", "Select")):
        node = node.next_functions[0][0]
    made = node is not None and node.name().startswith(name)
    return f", after a {name.lower()}, which the loss applies again: leave it out" if made else ""


def _by_dtype(inputs: Mapping[str, str], fields: Mapping[str, Tensor]) -> GuessedTask:
    """Return the task by what the first field that is left holds."""
    left = _list_left(inputs, fields)
    if {*TARGETS} & {*inputs}:
        return GuessedTask(inputs=inputs, loss=None, why="the model returns it")
    if not left:
        return GuessedTask(inputs=inputs, loss={}, why="no field is left for it")
    target = fields[left[0]]
    if not target.is_floating_point():
        return _task_of(inputs, left[0], "cross_entropy", "whole numbers")
    if {*target.unique().tolist()} <= {0.0, 1.0}:
        return _task_of(inputs, left[0], "binary_cross_entropy", "0 and 1")
    return _task_of(inputs, left[0], "squared_error", "numbers")


def _task_of(
    inputs: Mapping[str, str], name: str, loss: str, holds: str, **given: object
) -> GuessedTask:
    """Return the task of a loss and its metric for a target, the field `name`."""
    given = {**({} if name == "targets" else {"target": name}), **given}
    metric = _METRIC.get(loss)
    return GuessedTask(
        inputs=inputs,
        loss={"_target_": f"{_LOSSES}{loss}", **given},
        metrics={metric: {"_target_": f"{_METRICS}{metric}", **given}} if metric else {},
        why=f"{name} holds {holds}",
    )
