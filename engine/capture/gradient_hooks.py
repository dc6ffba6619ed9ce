"""gradient_hooks: hooks of parameters (`Tensor.register_hook`), as ops that follow the gradients.

Plain torch gives a hook the gradient of one backward and continues with what the hook returns.  The
hook is traced here as a function of the gradient of one micro-batch.

Relied upon of torch (tests/engine/capture/test_gradient_hooks.py): a tensor keeps its hooks in
`_backward_hooks`, in order; `make_fx` lists the tensors from outside as `get_attr` nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from flowrun.engine.capture.module_checks import place_of_function
from flowrun.engine.capture.node_reader import MOST_NUMBERS, NodeReader, trace_function
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import BACKWARD, LogicalGraph, LogicalTensor, Variable
from flowrun.engine.ir.names import tensor_of_variable
from flowrun.engine.torch_internals import gradient_hooks, storage_id


def apply_hooks(graph: LogicalGraph, tensors: Mapping[str, Tensor]) -> LogicalGraph:
    """Return the graph with the hooks of each parameter applied to its gradient.

    tensors: name -> parameter or buffer.  Raise RecipeError for a hook that torch cannot trace, or
    that changes the shape or dtype of the gradient.
    """
    for key, tensor in graph.results:
        kind, _, name = key.partition("/")
        hooks = gradient_hooks(tensors[name]) if kind == "grad" and name in tensors else None
        if hooks:
            graph = _HookedGradient(name, tensor, tuple(hooks.values()), tensors).apply(graph)
    return graph


@dataclass(frozen=True, slots=True)
class _HookedGradient:
    """The gradient (a tensor of the graph) of one parameter, and its hooks.

    tensors: every parameter and buffer by name, which hooks may read.
    """

    parameter: str
    gradient: str
    hooks: tuple[Callable[[Tensor], Tensor | None], ...]
    tensors: Mapping[str, Tensor]

    def apply(self, graph: LogicalGraph) -> LogicalGraph:
        """Return the graph with all hooks, in order."""
        module = self._trace(graph.tensors[self.gradient])
        prefix = f"{tensor_of_variable(self.parameter)}/hook/"
        reader = NodeReader(lambda node: prefix + node.name, graph.tensors, graph.ops)
        variables = {v.name: v for v in graph.variables}
        producer = graph.producer.get(self.gradient)
        owner = producer.module if producer else self.parameter.rpartition(".")[0]
        for node in module.graph.nodes:
            if node.op == "placeholder":
                reader.names[node] = self.gradient
            elif node.op == "get_attr":
                value = getattr(module, str(node.target))
                if name := self._name_of(value):
                    reader.names[node] = self._add_variable(name, variables, reader)
                else:
                    self._check_size(value)
                    reader.add_constant(node, value, module=owner, phase=BACKWARD)
            elif node.op == "call_function":
                reader.add_op(node, module=owner, phase=BACKWARD)
        result = reader.names[module.graph.output_node().args[0]]
        self._check_result(reader.tensors[result], graph.tensors[self.gradient])
        key = f"grad/{self.parameter}"
        return replace(
            graph,
            ops=tuple(reader.ops),
            tensors=reader.tensors,
            variables=tuple(variables.values()),
            results=tuple((k, result if k == key else tensor) for k, tensor in graph.results),
        )

    def _trace(self, like: LogicalTensor) -> torch.fx.GraphModule:
        def run_hooks(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()  # a hook may write into it
            for hook in self.hooks:
                result = hook(gradient)
                gradient = gradient if result is None else result
            return gradient

        functional = torch.func.functionalize(run_hooks, remove="mutations_and_views")
        example = torch.zeros(like.shape, dtype=like.dtype)
        with torch.no_grad():
            return trace_function(functional, [example], self._refusal, _allow_non_fake_inputs=True)

    def _name_of(self, value: Tensor) -> str:
        """Return the name of the parameter or buffer that a hook reads; "" for other tensors."""
        for name, tensor in self.tensors.items():
            if tensor is value or (
                isinstance(tensor, nn.Parameter)
                and storage_id(tensor) == storage_id(value)
                and (tensor.shape, tensor.stride()) == (value.shape, value.stride())
            ):
                return name
        return ""

    def _add_variable(self, name: str, variables: dict[str, Variable], reader: NodeReader) -> str:
        """Return the tensor of a variable, which is added if forward does not read it."""
        if name not in variables:
            value, tensor = self.tensors[name], tensor_of_variable(name)
            reader.tensors[tensor] = LogicalTensor(tensor, tuple(value.shape), value.dtype)
            kind = "parameter" if isinstance(value, nn.Parameter) else "buffer"
            variables[name] = Variable(name, tensor, kind)
        return variables[name].tensor

    def _check_size(self, value: Tensor) -> None:
        if value.numel() > MOST_NUMBERS:
            raise self._refusal(
                f"it reads a tensor of {value.numel():,} numbers from outside; a plan holds at most"
                f" {MOST_NUMBERS:,}.",
                "Register it as a buffer of the module.",
            )

    def _check_result(self, result: LogicalTensor, gradient: LogicalTensor) -> None:
        if (result.shape, result.dtype) != (gradient.shape, gradient.dtype):
            raise self._refusal(
                f"it returns {result.dtype} of shape {result.shape} for a gradient that is"
                f" {gradient.dtype} of shape {gradient.shape}.",
                "Return a tensor like the gradient.",
            )

    def _refusal(self, problem: str, instead: str) -> RecipeError:
        place = place_of_function(self.hooks[0])
        hook = f"the hook on the gradient of {self.parameter}{f' ({place})' if place else ''}"
        return RecipeError("model", f"{hook} is refused: {problem}", instead)
