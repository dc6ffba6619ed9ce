"""update_trace: an optimizer written as a function of tensors -> ATen ops of one update.

    def lion(param, grad, exp_avg, *, lr, beta1=0.9, beta2=0.99, weight_decay=0.0):
        return param - lr * …, beta2 * exp_avg + …

The positional arguments after param and grad are states, shaped as the parameter.  A state without
default starts at 0, one whose default is a number starts at that number, and one whose default is
None starts as the parameter.  `lr` and `step` (from 1) are scalar tensors, fed once a step to
functions that take them; other keywords are numbers of the recipe.  The function returns the new
parameter and the new states, in order, and changes nothing in place.  torch's `make_fx` traces it
(tests/engine/capture/test_update_trace.py names what is relied on).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import fx

from flowrun.engine.capture.node_reader import NodeReader, trace_function
from flowrun.engine.errors import RecipeError, refuse_as
from flowrun.engine.ir.graph import LogicalTensor, Op, refs
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ops.traits import has
from flowrun.engine.strategy import Settings, Update
from flowrun.engine.torch_internals import OpOverload, schema_of

UpdateFunction = Callable[..., Any]

FED = ("lr", "step")  # keywords that are tensors, fed once a step


@dataclass(frozen=True, slots=True)
class TracedUpdate:
    """A traced update.

    ops: read "param", "grad", the states by the function's names for them, "lr" and "step".
    tensors: name -> each tensor that an op makes; it has the op's name.
    results: the new parameter, then the new states.
    """

    ops: tuple[Op, ...]
    tensors: Mapping[str, LogicalTensor]
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UpdateState:
    """A state of a parameter.  start: the number that fills it first; None: it starts as the
    parameter.  One of another shape than the parameter is whole on every rank.
    """

    name: str
    start: float | None
    shape: Shape

    def dtype(self, param: LogicalTensor) -> torch.dtype:
        """Return its dtype: the parameter's; of a number of a larger parameter at least fp32."""
        is_number = param.shape and not self.shape
        return torch.promote_types(param.dtype, torch.float32) if is_number else param.dtype


@lru_cache(maxsize=1024)
def states_of(function: UpdateFunction, shape: Shape) -> tuple[UpdateState, ...]:
    """Return the states of a parameter of a shape.  Raise RecipeError if it can have none."""
    if states := getattr(function, "states", None):  # a class (passes/update/torch_update.py)
        with refuse_as(lambda error: _refusal(function, f"{error}")):
            return tuple(states(shape))
    positional = [p for p in _parameters(function) if p.kind is not p.KEYWORD_ONLY]
    start = lambda p: 0.0 if p.default is p.empty else p.default  # noqa: E731
    return tuple(UpdateState(p.name, start(p), shape) for p in positional[2:])


def keywords_of(function: UpdateFunction) -> Mapping[str, Any]:
    """Return the keywords, without `lr` and `step`, and their defaults (or Parameter.empty)."""
    named = [p for p in _parameters(function) if p.kind is p.KEYWORD_ONLY]
    return {p.name: p.default for p in named if p.name not in FED}


def step_scalars_of(function: UpdateFunction) -> tuple[str, ...]:
    """Return those of `lr` and `step` that an update function takes, in its order."""
    return tuple(p.name for p in _parameters(function) if p.name in FED)


def _parameters(function: UpdateFunction) -> Sequence[inspect.Parameter]:
    parameters = list(inspect.signature(function).parameters.values())
    plain = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(plain) < 2 or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise _refusal(
            function,
            f"its arguments are {inspect.signature(function)}.",
            "Write (param, grad, one name for each state, *, lr, other numbers).",
        )
    return parameters


@lru_cache(maxsize=1024)
def trace_update(
    function: UpdateFunction, shape: Shape, dtype: torch.dtype, settings: Settings
) -> TracedUpdate:
    """Return the ops of one parameter's update.

    function: the update function.  shape, dtype: of the parameter.  settings: values of its
    keywords but `lr` and `step`.  Raise RecipeError (optim) if torch cannot trace the
    function, if it works in place, or if its results are not shaped as the parameter.
    """
    states, fed = states_of(function, shape), step_scalars_of(function)
    names = ("param", "grad", *(state.name for state in states), *fed)
    param = LogicalTensor("param", shape, dtype)
    examples = [torch.empty(shape, dtype=dtype) for _ in range(2)]
    examples += [torch.empty(state.shape, dtype=state.dtype(param)) for state in states]
    examples += [torch.empty(()) for _ in fed]

    def positional(*tensors: torch.Tensor) -> object:
        given = dict(zip(names, tensors, strict=True))
        numbers = {name: given.pop(name) for name in fed}
        return function(*given.values(), **numbers, **dict(settings))

    refuse = partial(_refusal, function)
    module = trace_function(positional, examples, refuse, decomposition_table=_DECOMPOSED)
    _drop_copies(module.graph)
    return _read(module, names, function, param)


def is_elementwise(function: UpdateFunction, settings: Settings) -> bool:
    """Return whether each row of a parameter is updated on its own.

    That is so if nothing shaped as the parameter is reduced, moved or mixed, and all states are.
    """
    shape = (5, 3)
    if any(state.shape != shape for state in states_of(function, shape)):
        return False
    program = trace_update(function, shape, torch.float32, settings)
    shaped = {"param", "grad", *(state.name for state in states_of(function, shape))}
    for op in program.ops:
        if any(ref.name in shaped for ref in refs((op.args, op.kwargs))):
            if program.tensors[op.name].shape != shape or not has(op.target, Trait.POINTWISE):
                return False
            shaped.add(op.name)
    return True


@torch.no_grad()
def ignores_zero_gradient(function: UpdateFunction, settings: Settings) -> bool:
    """Return whether an update with a gradient of 0 leaves parameter and states bit for bit.

    A row that is not looked up then needs no update.  This is tried on 1000 random values at three
    steps, with states that are not negative.
    """
    numbers = torch.Generator().manual_seed(0)
    for step in (1.0, 2.0, 1000.0):
        param = torch.randn(1000, generator=numbers)
        states = [torch.rand(1000, generator=numbers) - 0.1 for _ in states_of(function, (1000,))]
        states = [state.clamp(min=0.0) for state in states]
        fed = {"lr": torch.tensor(0.1), "step": torch.tensor(step)}
        numbers_fed = {key: fed[key] for key in step_scalars_of(function)}
        new = function(param, torch.zeros(1000), *states, **numbers_fed, **dict(settings))
        new = (new,) if isinstance(new, torch.Tensor) else new
        if not all(map(torch.equal, new, (param, *states))):
            return False
    return True


def trace_of(update: Update, function: UpdateFunction, parameter: LogicalTensor) -> TracedUpdate:
    """Return the ops of the update of a parameter by its function.

    parameter: with the model's name for it, which a RecipeError says, at the key of the update.
    """
    try:
        return trace_update(function, parameter.shape, parameter.dtype, update.numbers)
    except RecipeError as error:
        problem = f"{error.problem}\nThe weight is {parameter.name}, of shape {parameter.shape}."
        raise RecipeError(update.key, problem, error.instead) from error


def describe_updates(parameters: Iterable[tuple[LogicalTensor, Update]]) -> tuple[object, ...]:
    """Return all that a plan takes from update functions, as values that compare by content.

    The name of a function says nothing of its body, so a plan cache compares these.
    parameters: each with its update, as trace_of takes them.
    """
    numbers: dict[UpdateFunction, int] = {}
    described: dict[object, object] = {}
    for tensor, update in parameters:
        if (function := update.function) is None:
            continue
        number = numbers.setdefault(function, len(numbers))
        key = number, tensor.shape, tensor.dtype, update.numbers
        if key not in described:
            traced = trace_of(update, function, tensor)
            states = states_of(function, tensor.shape)
            described[key] = _row_properties(function, update.numbers), traced, states
    return tuple(map(step_scalars_of, numbers)), described


def _row_properties(function: UpdateFunction, settings: Settings) -> tuple[bool, bool] | None:
    """Return (is_elementwise, ignores_zero_gradient); None if the function takes no matrix."""
    try:
        return is_elementwise(function, settings), ignores_zero_gradient(function, settings)
    except Exception:  # of any type: a user's function may not support this shape
        return None


def _read(
    module: fx.GraphModule, names: Sequence[str], function: UpdateFunction, param: LogicalTensor
) -> TracedUpdate:
    reader, inputs = NodeReader(lambda node: node.name), iter(names)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            reader.names[node] = next(inputs)
        elif node.op == "call_function":
            _check_call(node, function)
            reader.add_op(node)
        elif node.op == "get_attr":
            problem = "it reads a tensor from outside."
            raise _refusal(function, problem, "Make it a state, or a number.")
    returned: object = module.graph.output_node().args[0]
    returned = returned if isinstance(returned, (tuple, list)) else (returned,)
    results = tuple(reader.names.get(value, "") for value in returned)
    states = states_of(function, param.shape)
    if len(results) != 1 + len(states):
        raise _refusal(
            function,
            f"it returns {len(results)} tensors.",
            f"Return the new parameter{''.join(f', the new {state.name}' for state in states)}.",
        )
    old = {"param": param}
    old |= {s.name: LogicalTensor(s.name, s.shape, s.dtype(param)) for s in states}
    for (name, before), result in zip(old.items(), results, strict=True):
        tensor = reader.tensors.get(result) or old.get(result, param)
        if result in FED or (tensor.shape, tensor.dtype) != (before.shape, before.dtype):
            raise _refusal(
                function,
                f"the new {name} is {tensor.dtype} of shape {tensor.shape}, but the old one is "
                f"{before.dtype} of shape {before.shape}.",
            )
    return TracedUpdate(tuple(reader.ops), reader.tensors, results)


def _drop_copies(graph: fx.Graph) -> None:
    """Drop copies and what nobody reads: in a graph where nothing is written, both do nothing."""
    graph.eliminate_dead_code()
    if any(_writes(node) for node in graph.nodes):
        return
    for node in graph.nodes:
        if node.target is torch.ops.aten.clone.default:
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def _check_call(node: fx.Node, function: UpdateFunction) -> None:
    if _writes(node):
        problem = f"it works in place ({node.target})."
        raise _refusal(function, problem, "Return new tensors instead.")
    if not isinstance(node.meta["val"], torch.Tensor):
        raise _refusal(function, f"{node.target} makes several tensors.", "Use another op.")


def _root_of_squares(
    x: torch.Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> object:
    """Compute a 2-norm as the root of a sum: a split tensor's sum is partial, its norm is not."""
    if ord != 2 or dtype is not None:
        return NotImplemented
    wide = x.float() if x.dtype.itemsize < 4 else x  # torch adds up squares of bf16 in fp32
    squares = wide * wide
    return (squares.sum() if not dim else squares.sum(list(dim), keepdim)).sqrt().to(x.dtype)


def _outer(x: torch.Tensor, y: torch.Tensor) -> object:
    """Compute a product over one element elementwise: any rank may have any part of it."""
    return x * y if x.shape[-1] == 1 else NotImplemented


_DECOMPOSED = {
    torch.ops.aten.linalg_vector_norm.default: _root_of_squares,
    **dict.fromkeys((torch.ops.aten.mm.default, torch.ops.aten.bmm.default), _outer),
}


def _refusal(function: UpdateFunction, problem: str, instead: str = "") -> RecipeError:
    name = getattr(function, "__name__", str(function))
    return RecipeError("optim", f"the update function {name} is refused: {problem}", instead)
