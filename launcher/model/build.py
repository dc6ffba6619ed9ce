"""Make what a recipe names: model, data set, loss and metrics.

Each mistake is a RecipeError at the key that names it.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from flowrun.engine.capture.capture import made_of
from flowrun.engine.capture.capture_errors import (
    MADE_IN,
    describe_error,
    describe_failure,
    describe_value,
)
from flowrun.engine.capture.joint_graph import LOSS
from flowrun.engine.capture.module_checks import place_of_function, refuse_foreign
from flowrun.engine.errors import RecipeError, RunError, refuse_as
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ir.module_path import within
from flowrun.engine.ir.names import ROWS
from flowrun.engine.torch_internals import WRAPPERS, has_memory, wrapped_module
from flowrun.launcher.data.collate import Collate
from flowrun.launcher.data.named import Streamed, is_in_order
from flowrun.launcher.data.sampler import ORDER
from flowrun.launcher.model.adapters import add_adapters
from flowrun.launcher.model.dataset_checks import check_items, check_kind
from flowrun.launcher.model.deferred import LEAST_BYTES, Unrecordable, defer
from flowrun.launcher.model.initial import Initial, initial_of, named_tensors
from flowrun.launcher.model.packed_inputs import packed_inputs
from flowrun.launcher.model.pretrained import weights_of
from flowrun.launcher.model.targets import find, list_arguments, make_function, make_object
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import did_you_mean, require
from flowrun.launcher.recipe.schema import FP32, KEEP_DTYPE, MIRRORED, ROWWISE, TARGET, Fp8
from flowrun.launcher.terminal import doing
from flowrun.launcher.terminal.units import size
from flowrun.models.fp8 import Fp8Linear
from flowrun.models.sampling import Order, in_order

_NARROW = (torch.bfloat16, torch.float16)  # where an update rounded to nearest is often lost
_OF_ANY_ROWS = (AttributeError, ImportError, NameError, TypeError)
LossFunction = Callable[[Any, Mapping[str, Tensor]], Tensor]  # (output, batch) -> scalar mean


@dataclass(frozen=True)
class Described:
    """A model whose larger weights have no memory, and the values that they begin with.

    notes: what went otherwise than a user expects.
    """

    model: nn.Module
    initial: Initial
    notes: tuple[str, ...]


def instantiate_model(recipe: Recipe, notes: list[str] | None = None) -> nn.Module:
    """The model as plain torch makes it, whole: its weights drawn from `train.seed`, or read from
    `model.weights`.  notes: takes what went otherwise than a user expects.
    """
    with _keep_random_state(recipe):
        model = _make_model(recipe, [] if notes is None else notes)
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
    for name, buffer in model.named_buffers():
        if name in read and has_memory(buffer):  # forward may decide by it
            buffer.data.copy_(read[name])
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


def _make_model(recipe: Recipe, notes: list[str]) -> nn.Module:
    model = make_object(recipe.model, "model")
    if not isinstance(model, nn.Module):
        raise RecipeError(
            "model._target_", f"this makes a {type(model).__name__}, not a torch.nn.Module."
        )
    refuse_foreign(model)
    wrapped = []
    while (inner := wrapped_module(model)) is not None:
        wrapped.append(f"what {type(model).__name__} wraps is trained: flowrun divides it itself")
        model = inner
    for path, part in model.named_modules():
        if isinstance(part, WRAPPERS):
            kind, part.__class__ = type(part).__name__, nn.DataParallel
            part.device_ids = []  # it hands its input on
            wrapped.append(f"the {kind} at {path} does nothing: flowrun divides it itself")
    narrow = _widen_trained(model, recipe)  # before adapters freeze what they are added to
    add_adapters(model, recipe.adapters)
    narrow_products(model, recipe.precision.fp8)
    _freeze(model, "", recipe.optim.groups)
    _train_alone(model, recipe.trained)
    narrow |= _widen_trained(model, recipe)  # what a group trains again
    notes[:] = [*wrapped, *_note_narrow(narrow.values(), recipe.precision.param_dtype)]
    return model


def narrow_products(model: nn.Module, asked: Fp8) -> None:
    """Let the linear layers that are named multiply 8 bits.  Raises RecipeError for a pattern that
    names none.
    """
    linears = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear]
    for pattern in asked.modules:
        named = [linear for name, linear in linears if fnmatch.filter(within(name), pattern)]
        if not named:
            raise RecipeError(
                "precision.fp8.modules",
                f"{pattern!r} matches no nn.Linear, and no module with one inside.",
                "Linear layers: " + ", ".join(name for name, _ in linears),
            )
        for linear in named:
            linear.__class__ = Fp8Linear
            vars(linear)["rowwise"] = asked.recipe == ROWWISE


def _widen_trained(module: nn.Module, recipe: Recipe) -> dict[int, nn.Parameter]:
    """Make parameters that train, and buffers of the same module, fp32 where the module made them
    in bf16 or fp16, unless `precision.param_dtype` says that they stay; return the parameters by
    id.

    What the constructor froze (a quantised base), and every wider dtype, is left as it is.
    """
    found: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        parameters = owner.parameters(recurse=False)
        trained = {id(p): p for p in parameters if p.requires_grad and p.dtype in _NARROW}
        found |= trained
        if recipe.precision.param_dtype == KEEP_DTYPE or not trained:
            continue
        held = (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False))
        for name, tensor in held:
            if id(tensor) in trained or (
                not isinstance(tensor, nn.Parameter) and tensor.dtype in _NARROW
            ):
                vars(owner).setdefault(MADE_IN, {})[name] = tensor.dtype
                tensor.data = tensor.data.float()
    return found


def _note_narrow(narrow: Collection[nn.Parameter], kept: str) -> list[str]:
    """Note what becomes of parameters in bf16 or fp16.  kept: `precision.param_dtype`."""
    elements = sum(parameter.numel() for parameter in narrow)
    become = {
        FP32: f"are kept in fp32, {size(4 * elements)} (precision.param_dtype=bf16 keeps them in "
        "bf16, with updates rounded at random)",
        KEEP_DTYPE: "stay so, and each update is rounded to nearest, which loses small ones "
        f"(precision.param_dtype={KEEP_DTYPE})",
    }
    if not narrow or kept not in become:
        return []
    made = f"the model makes {len(narrow)} parameters in bf16 or fp16 ({elements:,} elements)"
    return [f"{made}: they {become[kept]}"]


def _freeze(module: nn.Module, prefix: str, groups: Mapping[str, object]) -> None:
    """No gradient for parameters that a group of `optim.groups` has frozen; the later pattern wins.
    One that says frozen: false gives those that were frozen before a gradient again.

    prefix: of the names, LOSS for a loss that is a module.  A pattern that begins with LOSS is of
    the loss alone.  Raises RecipeError for a value that is neither true nor false, and for a
    pattern that matches no parameter.
    """
    frozen: dict[str, bool] = {}
    held = module.named_parameters(remove_duplicate=False)
    names = {prefix + name: parameter for name, parameter in held}
    for pattern, keys in groups.items():
        if not is_freezing(keys):
            continue
        value = keys["frozen"]
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


def _train_alone(model: nn.Module, patterns: Collection[str]) -> None:
    """Let an update train no parameter but those that it names.  patterns: none: it trains all."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            problem = f"{pattern!r} matches no parameter of this model."
            raise RecipeError("updates", problem, f"Names look like: {', '.join(names[:3])}")
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if patterns and not any(fnmatch.fnmatchcase(name, each) for each in patterns):
            parameter.requires_grad_(False)


def is_freezing(keys: object) -> TypeGuard[Mapping[str, object]]:
    """Return True if a group of `optim.groups` says whether its parameters are frozen."""
    return isinstance(keys, Mapping) and "frozen" in keys


def instantiate_data(recipe: Recipe) -> Dataset[dict[str, Tensor]]:
    """The data set: map-style, items are dicts of tensors."""
    with doing.show_log("flowrun.launcher.data"):
        data = make_object(recipe.data, "data")
    data = Streamed.around(data)
    check_kind(data)
    check_items(data, instantiate_collate(recipe))
    return data  # type: ignore[no-any-return]


def instantiate_collate(recipe: Recipe) -> Collate | None:
    """Return what makes a batch of a list of items (data.collate); None: they are stacked."""
    asked = recipe.collate
    return make_function(asked, "data.collate", 1) if asked else None


def instantiate_order(recipe: Recipe, data: object, num_samples: int) -> Order | None:
    """Return the order of the samples of an epoch (data.order); None: a permutation.

    A function with an argument `data` or `num_samples` (that are trained on) is given it.
    """
    if not recipe.order:
        return in_order if is_in_order(data) else None
    function = find(str(recipe.order[TARGET]), f"data.order.{TARGET}")
    known = inspect.signature(function).parameters.keys() - recipe.order.keys()
    more = {"data": data, "num_samples": num_samples}
    more = {key: value for key, value in more.items() if key in known}
    order: Order = make_function(recipe.order, "data.order", 3, more)
    numbers = torch.arange(min(8, num_samples))
    with refuse_as(lambda error: RecipeError("data.order", f"{error}.", ORDER)):
        parts = (numbers, numbers[:1], numbers[1:])
        whole, *pieces = (torch.as_tensor(order(recipe.train.seed, 0, each)) for each in parts)
    if not torch.equal(whole, torch.cat(pieces)):
        instead = "Draw from a generator that seed and epoch seed, for all numbers of the epoch."
        raise RecipeError("data.order", "its indices differ from call to call.", instead)
    return order


def instantiate_loss(recipe: Recipe) -> LossFunction | None:
    """loss(output, batch) -> scalar, drawn from `train.seed`; None: the model has it."""
    with _keep_random_state(recipe):
        loss = (
            None if recipe.task.loss is None else make_function(recipe.task.loss, recipe.loss_key)
        )
    if isinstance(loss, nn.Module):
        _freeze(loss, LOSS, recipe.optim.groups)
        _widen_trained(loss, recipe)
    return loss


def instantiate_metrics(recipe: Recipe) -> dict[str, LossFunction]:
    """name -> metric(output, batch) -> scalar, or rows."""
    made = {
        name: make_function(metric, f"task.metrics.{name}")
        for name, metric in recipe.task.metrics.items()
    }
    for name, metric in made.items():
        wrong = recipe.view == MIRRORED and made_of(metric, "of_rows")
        problem = f"{name} is made of the rows of all samples, and view=mirrored has a mean a rank."
        require(not wrong, f"task.metrics.{name}", problem, "Leave it out, or the view.")
    return made


def number_of(name: str, function: Callable[..., object], value: object) -> float:
    """Return what `function` makes of the mean, or of the rows, of all batches.  name: of the
    metric, for a RunError.
    """

    def refuse(error: Exception) -> RunError:
        instead = "of_rows takes a tensor (n, D), of_mean a float, and each returns a number."
        return RunError(f"task.metrics.{name}", f"{describe_error(error)}.", instead)

    with refuse_as(refuse):
        made = function(value)
        if isinstance(made, Tensor) and made.numel() != 1:
            raise TypeError(f"it returns {describe_value(made)}, not a number")
        return float(made)  # type: ignore[arg-type]


def try_metrics(metrics: Mapping[str, LossFunction], graph: LogicalGraph) -> None:
    """Make a number of rows of 0 and 1, as many as an evaluation's micro-batch has.  Raises
    RecipeError for an error that no other rows would mend; they would raise it after training.
    """
    for result, tensor in graph.results:
        if not result.startswith(ROWS):
            continue
        name, (rows, columns) = result.removeprefix(ROWS), graph.tensors[tensor].shape
        bits = [torch.arange(rows) >> column % 3 & 1 for column in range(columns)]
        function = made_of(metrics[name], "of_rows")
        assert function
        try:
            number_of(name, function, torch.stack(bits, 1).float())
        except RunError as error:
            if isinstance(cause := error.__cause__, _OF_ANY_ROWS):
                problem = f"of_rows, tried on {rows} rows of 0 and 1: {describe_failure(cause)}."
                raise RecipeError(error.where, problem, error.instead) from error


def task_inputs(recipe: Recipe, model: nn.Module, item: Mapping[str, Tensor]) -> dict[str, str]:
    """Map arguments of the model to batch fields, by the recipe's `task.inputs` or by equal names;
    documents of packed data go in by themselves, and a model of transformers attends within them
    from now on: they are the inputs of this instance of the model alone.

    item: one of the data set.  Raises RecipeError for a field that it lacks.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = list_arguments(model.forward)
    inputs = dict(recipe.task.inputs) or {name: name for name in named if name in item}
    inputs |= packed_inputs(model, item, inputs)
    _check_inputs(inputs, item, inputs if anything else [*named])
    missing = [name for name, must in named.items() if must and name not in inputs]
    if missing or not inputs:
        found = _explain_unfed(model, missing, [*named], ", ".join(item))
        raise RecipeError("task.inputs", *found)
    return inputs


def _explain_unfed(
    model: nn.Module, missing: list[str], named: list[str], fields: str
) -> tuple[str, str]:
    """Return what is wrong with the arguments of forward, and what to write.

    missing: without a default and a field.  named: all that have a name.  fields: of the items.
    """
    kind, forward = type(model).__name__, type(model).forward
    if forward is nn.Module.forward:
        return f"{kind} has no forward.", f"Write one that takes fields of the items: {fields}."
    at = f" of forward ({place})" if (place := place_of_function(forward)) else ""
    if not named:
        return (
            f"no argument{at} of {kind} has a name (*args, **kwargs).",
            f"Name them after fields of the items, {fields}; or name those of **kwargs here.",
        )
    if missing == named and not named[1:]:
        return (
            f"nothing feeds the model's argument {missing[0]!r}{at}: each argument takes one field "
            "of the items; a batch of all fields is not passed as one argument.",
            f"Write forward(self, {fields}), or map {missing[0]} to a field.",
        )
    problem = f"nothing feeds the model's argument {(missing or named)[0]!r}{at}."
    return problem, f"Map it to a field of the items: {fields}."


def _check_inputs(
    inputs: Mapping[str, str], fields: Collection[str], arguments: Collection[str]
) -> None:
    for argument, field in inputs.items():
        for word, known, problem in (
            (field, fields, f"items of the data set have no field {field!r}."),
            (argument, arguments, f"forward of the model takes no {argument!r}."),
        ):
            if word not in known:
                raise RecipeError(f"task.inputs.{argument}", problem, did_you_mean(word, known))
