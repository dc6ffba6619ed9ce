"""node_reader: nodes of an FX graph of functional ATen ops -> tensors and ops of a logical graph.

joint_graph.py, gradient_hooks.py and update_trace.py read torch's graphs with it.  Relied upon: the
fake tensors that a call makes are its `meta["val"]`; `make_fx` traces a function of tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from flowrun.engine.errors import FlowrunError, RecipeError, refuse_as
from flowrun.engine.ir.graph import LogicalTensor, Op, Ref
from flowrun.engine.ops.shapes.create import CONSTANT, FULL

MOST_NUMBERS = 4096  # elements of a constant tensor that a plan carries
_ALIASES = ("aten.detach.default", "aten.alias.default")
_OF_DEVICE = ("device", "pin_memory", "layout")  # keywords that every rank decides for itself


def trace_function(
    function: Callable[..., object],
    examples: Sequence[torch.Tensor],
    refuse: Callable[[str, str], RecipeError],
    **settings: Any,
) -> fx.GraphModule:
    """Return torch's graph of a user's function.

    refuse: (problem, what to write instead) -> the error to raise.  settings: of make_fx.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    def explain(error: Exception) -> FlowrunError:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        return refuse(
            f"torch could not trace it: {type(error).__name__}: {reason}",
            "Compute with tensors: no .item(), no `if` on a value; torch.where chooses.",
        )

    with refuse_as(explain):
        return make_fx(function, tracing_mode="fake", **settings)(*examples)  # type: ignore[no-any-return]


class NodeReader:
    """The tensors and ops that have been read; detach and getitem leave no op.

    name_of: gives the name of a node's tensor.  names: FX node -> name of its tensor.
    """

    def __init__(
        self,
        name_of: Callable[[fx.Node], str],
        tensors: Mapping[str, LogicalTensor] | None = None,
        ops: Iterable[Op] = (),
    ) -> None:
        self.name_of = name_of
        self.names: dict[object, str] = {}
        self.tensors = dict(tensors or {})
        self.ops = list(ops)

    def add_tensor(self, node: fx.Node, name: str, value: torch.Tensor) -> str:
        """Give the tensor of a node a name, and the shape and dtype of `value`; return the name."""
        self.tensors[name] = LogicalTensor(name, tuple(int(n) for n in value.shape), value.dtype)
        self.names[node] = name
        return name

    def add_op(self, node: fx.Node, **fields: Any) -> None:
        """Append the op of a call that makes tensors.  fields: further fields of the op."""
        target = str(node.target)
        if node.target is operator.getitem:
            return  # read together with the op that makes the tuple
        if target in _ALIASES:
            self.names[node] = self.names[node.args[0]]
            return
        args, kwargs = self.arguments(node)
        kwargs = tuple((key, value) for key, value in kwargs if key not in _OF_DEVICE)
        name, outputs = self.name_of(node), self._add_outputs(node)
        self.ops.append(Op(name, target, args, kwargs, outputs=outputs, **fields))

    def add_constant(self, node: fx.Node, value: torch.Tensor, **fields: Any) -> None:
        """Append an op that holds the numbers of a tensor.  fields: further fields of the op."""
        name = self.add_tensor(node, self.name_of(node), value)
        numbers, shape = tuple(value.detach().flatten().tolist()), self.tensors[name].shape
        uniform = len(set(numbers)) == 1
        target = FULL if uniform else CONSTANT
        args = (shape, numbers[0]) if uniform else (numbers, shape)
        kwargs = (("dtype", value.dtype),)
        self.ops.append(Op(name, target, args, kwargs, outputs=(name,), **fields))

    def arguments(self, node: fx.Node) -> tuple[tuple[object, ...], tuple[tuple[str, object], ...]]:
        """Return (args, kwargs) of a call, with Refs in the place of nodes."""
        kwargs = tuple((key, self._argument(value)) for key, value in node.kwargs.items())
        return tuple(map(self._argument, node.args)), kwargs

    def _argument(self, value: object) -> object:
        if isinstance(value, fx.Node):
            return Ref(self.names[value])
        if isinstance(value, (list, tuple)):
            return tuple(map(self._argument, value))
        return value

    def _add_outputs(self, node: fx.Node) -> tuple[str | None, ...]:
        """Name what a call makes; None stands for a result that nothing reads."""
        value, name = node.meta["val"], self.name_of(node)
        if isinstance(value, torch.Tensor):
            return (self.add_tensor(node, name, value),)
        outputs: list[str | None] = [None] * len(value)
        for user in node.users:
            index: Any = user.args[1]
            if outputs[index] is not None:
                self.names[user] = str(outputs[index])
            elif user.users:
                outputs[index] = self.add_tensor(user, f"{name}.{index}", value[index])
        return tuple(outputs)
