"""update_trace: an optimizer that is a small function of tensors -> ATen ops of one parameter's
update.

    def lion(param, grad, exp_avg, *, lr, beta1=0.9, beta2=0.99, weight_decay=0.0):
        return param - lr * …, beta2 * exp_avg + …

What stands before the `*` behind param and grad are states, shaped as the parameter: one without
default starts at 0, one whose default is a number starts at that, one whose default is None starts
as the parameter.  `lr` and `step` (from 1) are scalar tensors, fed once a step to functions that
take them; other keywords are numbers of the recipe.  Returned are the new parameter and the new
states, in order; nothing is changed in place.  With torch's `make_fx`
(tests/engine/capture/test_update_trace.py names what is relied on).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import LogicalTensor, Ref, refs
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ops.op_info import Trait
from flowrun.engine.ops.traits import has
from flowrun.engine.strategy import Settings

UpdateFunction = Callable[..., Any]

FED = ("lr", "step")  # keywords that are tensors, fed once a step


@dataclass(frozen=True, slots=True)
class TracedOp:
    """One ATen op of a traced update: made = target(*args, **kwargs)."""

    made: str
    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class TracedUpdate:
    """A traced update.  Its inputs are named as the function names them; those it did not make are
    "param", "grad", the states, and what of "lr" and "step" it takes.

    made: every tensor that a line makes.  results: the new parameter, then the new states.
    """

    lines: tuple[TracedOp, ...]
    made: Mapping[str, LogicalTensor]
    results: tuple[str, ...]


@lru_cache(maxsize=256)
def states_of(function: UpdateFunction) -> tuple[tuple[str, float | None], ...]:
    """(name, start) of every state of an update function."""
    positional = [p for p in _parameters(function) if p.kind is not p.KEYWORD_ONLY]
    return tuple((p.name, 0.0 if p.default is p.empty else p.default) for p in positional[2:])


def keywords_of(function: UpdateFunction) -> Mapping[str, Any]:
    """Keyword arguments but `lr` and `step`, with defaults (inspect.Parameter.empty: none)."""
    named = [p for p in _parameters(function) if p.kind is p.KEYWORD_ONLY]
    return {p.name: p.default for p in named if p.name not in FED}


def fed_to(function: UpdateFunction) -> tuple[str, ...]:
    """Which of `lr` and `step` an update function takes."""
    return tuple(p.name for p in _parameters(function) if p.name in FED)


def _parameters(function: UpdateFunction) -> Sequence[inspect.Parameter]:
    found = list(inspect.signature(function).parameters.values())
    plain = [p for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(plain) < 2 or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found):
        raise _refused(
            function,
            f"its arguments are {inspect.signature(function)}.",
            "Write (param, grad, one name for each state, *, lr, other numbers).",
        )
    return found


@lru_cache(maxsize=1024)
def trace(
    function: UpdateFunction, shape: Shape, dtype: torch.dtype, settings: Settings
) -> TracedUpdate:
    """The ops of one parameter's update.  Raises RecipeError (optim.update) if torch cannot trace
    the function, if it works in place, or if its results are not shaped as the parameter.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    states, fed = [name for name, _ in states_of(function)], fed_to(function)
    names = ("param", "grad", *states, *fed)
    examples = [torch.empty(shape, dtype=dtype) for _ in names[: 2 + len(states)]]
    examples += [torch.empty(()) for _ in fed]

    def positional(*tensors: torch.Tensor) -> Any:
        given = dict(zip(names, tensors, strict=True))
        numbers = {name: given.pop(name) for name in fed}
        return function(*given.values(), **numbers, **dict(settings))

    try:
        module = make_fx(positional, decomposition_table=_NORMS, tracing_mode="fake")(*examples)
    except RecipeError:
        raise
    except Exception as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise _refused(
            function,
            f"torch could not trace it: {type(error).__name__}: {reason}",
            "Compute with tensors: no .item(), no `if` on a value; torch.where chooses.",
        ) from error
    return _read(module, names, function, LogicalTensor("param", shape, dtype))


def is_elementwise(function: UpdateFunction, settings: Settings) -> bool:
    """True if every row of a parameter is updated by itself: nothing shaped as the parameter is
    reduced, moved or mixed.
    """
    shape = (5, 3)
    program = trace(function, shape, torch.float32, settings)
    shaped = {"param", "grad", *(name for name, _ in states_of(function))}
    for line in program.lines:
        if any(ref.name in shaped for ref in refs((line.args, line.kwargs))):
            if program.made[line.made].shape != shape or not has(line.target, Trait.POINTWISE):
                return False
            shaped.add(line.made)
    return True


@torch.no_grad()
def rests(function: UpdateFunction, settings: Settings) -> bool:
    """True if a gradient of 0 changes nothing, bit for bit; tried on many values, states from 0 up.

    A row without a look-up then needs no update.
    """
    numbers = torch.Generator().manual_seed(0)
    for step in (1.0, 2.0, 1000.0):
        param = torch.randn(1000, generator=numbers)
        states = [torch.rand(1000, generator=numbers) - 0.1 for _ in states_of(function)]
        states = [state.clamp(min=0.0) for state in states]
        fed = {"lr": torch.tensor(0.1), "step": torch.tensor(step)}
        numbers_fed = {key: fed[key] for key in fed_to(function)}
        new = function(param, torch.zeros(1000), *states, **numbers_fed, **dict(settings))
        new = (new,) if isinstance(new, torch.Tensor) else new
        if not all(map(torch.equal, new, (param, *states))):
            return False
    return True


def behaviour(
    function: UpdateFunction, parameters: Iterable[tuple[LogicalTensor, Mapping[str, float | bool]]]
) -> tuple[Any, ...]:
    """All that a plan takes from an update function of these parameters, as plain values: its name
    does not tell what it does.

    parameters: each with the settings of its update.  Raises RecipeError where `trace` does.
    """
    told: dict[tuple[Any, ...], Any] = {}
    for tensor, given in parameters:
        settings = tuple((key, value) for key, value in given.items() if key not in FED)
        key = tensor.shape, tensor.dtype, settings
        if key not in told:
            by_rows = _updates_rows(function, settings)
            told[key] = by_rows, trace(function, tensor.shape, tensor.dtype, settings)
    return states_of(function), fed_to(function), told


def _updates_rows(function: UpdateFunction, settings: Settings) -> tuple[bool, bool] | None:
    """Whether it is elementwise, and rests; None for one that does not take a matrix."""
    try:
        return is_elementwise(function, settings), rests(function, settings)
    except Exception:  # whatever a user's function raises of a shape that it may never be given
        return None


def _read(
    module: torch.fx.GraphModule,
    names: Sequence[str],
    function: UpdateFunction,
    param: LogicalTensor,
) -> TracedUpdate:
    known: dict[torch.fx.Node, str] = {}
    made: dict[str, LogicalTensor] = {}
    lines: list[TracedOp] = []
    inputs = iter(names)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            known[node] = next(inputs)
        elif node.op == "call_function":
            value = node.meta["val"]
            if node.target._schema.is_mutable:
                raise _refused(
                    function, f"it works in place ({node.target}).", "Return new tensors instead."
                )
            if not isinstance(value, torch.Tensor):
                raise _refused(function, f"{node.target} makes several tensors.", "Use another op.")
            known[node] = node.name
            made[node.name] = LogicalTensor(node.name, tuple(value.shape), value.dtype)
            kwargs = tuple((k, _argument(v, known)) for k, v in node.kwargs.items() if k not in _AS)
            args = tuple(_argument(arg, known) for arg in node.args)
            lines.append(TracedOp(node.name, str(node.target), args, kwargs))
        elif node.op == "output":
            returned = node.args[0] if isinstance(node.args[0], (tuple, list)) else node.args
            results = tuple(known.get(value, "") for value in returned)
        else:
            raise _refused(
                function, "it reads a tensor from outside.", "Make it a state, or a number."
            )
    states = [name for name, _ in states_of(function)]
    if len(results) != 1 + len(states):
        raise _refused(
            function,
            f"it returns {len(results)} tensors.",
            f"Return the new parameter{''.join(f', the new {name}' for name in states)}.",
        )
    for name, result in zip(("param", *states), results, strict=True):
        found = made.get(result, param)
        if result in FED or (found.shape, found.dtype) != (param.shape, param.dtype):
            raise _refused(
                function,
                f"the new {name} is {found.dtype} of shape {found.shape}, the old one "
                f"{param.dtype} of shape {param.shape}.",
            )
    return TracedUpdate(tuple(lines), made, results)


_AS = ("device", "pin_memory", "layout")


def _argument(value: Any, known: Mapping[torch.fx.Node, str]) -> Any:
    if isinstance(value, torch.fx.Node):
        return Ref(known[value])
    if isinstance(value, (list, tuple)):
        return tuple(_argument(item, known) for item in value)
    return value


def _root_of_squares(
    x: torch.Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """A 2-norm as a root of a sum, for a sum over a split tensor is partial and a norm is not."""
    if ord != 2 or dtype is not None:
        return NotImplemented
    squares = x * x
    return (squares.sum() if not dim else squares.sum(list(dim), keepdim)).sqrt()


_NORMS = {torch.ops.aten.linalg_vector_norm.default: _root_of_squares}


def _refused(function: UpdateFunction, problem: str, instead: str = "") -> RecipeError:
    name = getattr(function, "__name__", str(function))
    return RecipeError("optim.update", f"the update function {name} is refused: {problem}", instead)
