"""gradient_hooks: hooks of parameters (`Tensor.register_hook`), as ops behind their gradients.

Plain torch hands a hook the gradient of one backward, and goes on with what it returns.  So does
this: the hook is traced as a function of the gradient of one micro-batch.

Relied upon of torch (tests/engine/capture/test_gradient_hooks.py): a tensor keeps its hooks in
`_backward_hooks`, in order; `make_fx` traces one into functional ATen ops, and lists the tensors
from outside as `get_attr` nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from flowrun.engine.capture.module_checks import place_of_function
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import BACKWARD, LogicalGraph, LogicalTensor, Op, Ref, Variable
from flowrun.engine.ir.names import tensor_of_variable
from flowrun.engine.ops.shapes.create import CONSTANT

MOST_NUMBERS = 4096  # of a tensor from outside that a plan carries
_AS = ("device", "pin_memory", "layout")


def apply_hooks(graph: LogicalGraph, tensors: Mapping[str, torch.Tensor]) -> LogicalGraph:
    """The graph with the hooks of each parameter behind its gradient.

    tensors: name -> parameter or buffer.  Raises RecipeError for a hook that torch cannot trace.
    """
    for key, made in graph.results:
        kind, _, name = key.partition("/")
        hooks = tensors[name]._backward_hooks if kind == "grad" and name in tensors else None
        if hooks:
            graph = _Hooked(graph, name, made, tensors).graph(tuple(hooks.values()))
    return graph


class _Hooked:
    """One parameter's gradient with its hooks behind it."""

    def __init__(
        self, graph: LogicalGraph, name: str, gradient: str, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self.base = graph
        self.parameter = name
        self.gradient = gradient
        self.named = tensors
        self.tensors = dict(graph.tensors)
        self.variables = list(graph.variables)
        self.ops = list(graph.ops)
        self.names: dict[torch.fx.Node, str] = {}
        producer = graph.producer.get(gradient)
        self.module = producer.module if producer else name.rpartition(".")[0]

    def graph(self, hooks: tuple[Any, ...]) -> LogicalGraph:
        """With all of them, in order."""
        module = self._traced(hooks)
        result = self.gradient
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self.names[node] = self.gradient
            elif node.op == "get_attr":
                self._from_outside(node, getattr(module, str(node.target)))
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                returned: Any = node.args[0]
                result = self.names[returned]
        self._check(result)
        key = f"grad/{self.parameter}"
        results = tuple((k, result if k == key else made) for k, made in self.base.results)
        return replace(
            self.base,
            ops=tuple(self.ops),
            tensors=self.tensors,
            variables=tuple(self.variables),
            results=results,
        )

    def _traced(self, hooks: tuple[Any, ...]) -> torch.fx.GraphModule:
        from torch.fx.experimental.proxy_tensor import make_fx

        def changed(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()  # a hook may write into it
            for hook in hooks:
                made = hook(gradient)
                gradient = gradient if made is None else made
            return gradient

        like = self.tensors[self.gradient]
        example = torch.zeros(like.shape, dtype=like.dtype)
        try:
            with torch.no_grad():
                trace = make_fx(
                    torch.func.functionalize(changed, remove="mutations_and_views"),
                    tracing_mode="fake",
                    _allow_non_fake_inputs=True,
                )
                return trace(example)  # type: ignore[no-any-return]
        except Exception as error:
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            raise self._refused(
                hooks[0], f"torch could not trace it: {type(error).__name__}: {reason}"
            ) from error

    def _check(self, result: str) -> None:
        made, asked = self.tensors[result], self.tensors[self.gradient]
        if (made.shape, made.dtype) != (asked.shape, asked.dtype):
            what = f"it makes {made.dtype} of shape {made.shape} of a gradient that is"
            hooks = self.named[self.parameter]._backward_hooks
            raise self._refused(
                next(iter((hooks or {}).values())), f"{what} {asked.dtype} of shape {asked.shape}."
            )

    def _refused(self, hook: Any, problem: str) -> RecipeError:
        place = place_of_function(hook)
        return RecipeError(
            "model",
            f"the hook on the gradient of {self.parameter}{f' ({place})' if place else ''} is"
            f" refused: {problem}",
            "Compute with tensors: no .item(), no `if` on a value; torch.where chooses.",
        )

    def _from_outside(self, node: torch.fx.Node, value: torch.Tensor) -> None:
        """A tensor that the hook has from around it: a buffer or a parameter, or numbers."""
        for name, tensor in self.named.items():
            if tensor is value or (
                isinstance(tensor, nn.Parameter)
                and tensor.untyped_storage()._cdata == value.untyped_storage()._cdata
                and (tensor.shape, tensor.stride()) == (value.shape, value.stride())
            ):
                self.names[node] = self._variable(name)
                return
        if value.numel() > MOST_NUMBERS:
            hooks = self.named[self.parameter]._backward_hooks
            raise self._refused(
                next(iter((hooks or {}).values())),
                f"it reads a tensor of {value.numel():,} numbers from around it; at most"
                f" {MOST_NUMBERS:,} are carried along. Register it as a buffer of the module.",
            )
        name, numbers = self._name(node), tuple(value.detach().flatten().tolist())
        self._add(node, name, value)
        args = (numbers, self.tensors[name].shape)
        kwargs = (("dtype", value.dtype),)
        self.ops.append(
            Op(name, CONSTANT, args, kwargs, outputs=(name,), module=self.module, phase=BACKWARD)
        )

    def _variable(self, name: str) -> str:
        """The tensor of a variable, which forward may not read."""
        for variable in self.variables:
            if variable.name == name:
                return variable.tensor
        value = self.named[name]
        tensor = tensor_of_variable(name)
        self.tensors[tensor] = LogicalTensor(tensor, tuple(value.shape), value.dtype)
        kind = "parameter" if isinstance(value, nn.Parameter) else "buffer"
        self.variables.append(Variable(name, tensor, kind))
        return tensor

    def _call(self, node: torch.fx.Node) -> None:
        if "getitem" in str(node.target):
            return  # read together with the op that makes the tuple
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            outputs: tuple[str | None, ...] = (self._add(node, self._name(node), value),)
        else:
            made: list[str | None] = [None] * len(value)
            for user in node.users:
                index: Any = user.args[1]
                made[index] = made[index] or f"{self._name(node)}.{index}"
                self._add(user, str(made[index]), value[index])
            outputs = tuple(made)
        if str(node.target) in ("aten.detach.default", "aten.alias.default"):
            self.names[node] = self.names[node.args[0]]  # type: ignore[index]
            return
        kwargs = tuple((k, self._argument(v)) for k, v in node.kwargs.items() if k not in _AS)
        args = tuple(map(self._argument, node.args))
        target = str(node.target)
        self.ops.append(
            Op(
                self._name(node),
                target,
                args,
                kwargs,
                outputs=outputs,
                module=self.module,
                phase=BACKWARD,
            )
        )

    def _name(self, node: torch.fx.Node) -> str:
        return f"{tensor_of_variable(self.parameter)}/hook/{node.name}"

    def _add(self, node: torch.fx.Node, name: str, value: torch.Tensor) -> str:
        self.tensors[name] = LogicalTensor(name, tuple(int(n) for n in value.shape), value.dtype)
        self.names[node] = name
        return name

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return Ref(self.names[value])
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(item) for item in value)
        return value
