"""joint_graph: torch's joint graph of forward and backward, in FX -> LogicalGraph.

Relied upon (tests/engine/test_capture.py names each fact): placeholders and outputs carry
descriptors (`meta["desc"]`), nodes `partitioner_tag`, `nn_module_stack` (forward),
`fwd_nn_module_stack` (backward), `seq_nr` and `val` (a fake tensor).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from flowrun.engine.buffers import WRITES
from flowrun.engine.errors import RecipeError
from flowrun.engine.graph import (
    BACKWARD,
    FORWARD,
    Feed,
    LogicalGraph,
    Op,
    Ref,
    Tensor,
    Variable,
)

LOSS = "task.loss."  # before the names of what a loss that is a module holds
MOST_NUMBERS = 4096  # of a constant tensor that a plan carries


class JointGraph:
    """Reads one; detach and getitem disappear.

    fields: of the batch, in order.  results: names of what forward returns.  first_names: any name
    of a parameter or buffer -> the one that counts.  train: forward writes into buffers.
    """

    def __init__(
        self,
        fields: tuple[str, ...],
        results: tuple[str, ...],
        first_names: Mapping[str, str],
        train: bool,
    ) -> None:
        self.first_names = first_names
        self.other_names: dict[str, list[str]] = {}
        for other, first in first_names.items():
            if other != first:
                self.other_names.setdefault(first, []).append(other)
        self.train = train
        self.fields = fields
        self.result_names = results
        self.names: dict[Any, str] = {}  # FX node -> tensor
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self.variables: list[Variable] = []
        self.feeds: list[Feed] = []
        self.results: list[tuple[str, str]] = []

    def read(self, module: torch.fx.GraphModule) -> LogicalGraph:
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "get_attr":
                self._constant(node, getattr(module, str(node.target)))
            elif node.op == "output":
                self._outputs(node)
        return LogicalGraph(
            tuple(self.ops),
            self.tensors,
            tuple(self.variables),
            tuple(self.feeds),
            tuple(self.results),
        )

    def _tensor(self, node: torch.fx.Node, name: str, value: Any) -> str:
        self.tensors[name] = Tensor(name, tuple(int(n) for n in value.shape), value.dtype)
        self.names[node] = name
        return name

    def _placeholder(self, node: torch.fx.Node) -> None:
        described, value = node.meta["desc"], node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        kind = type(described).__name__
        if kind in ("ParamAOTInput", "BufferAOTInput"):
            name = self._first_name(described)
            if name in self.tensors:  # tied: torch lists every name
                self.names[node] = name
                return
            tensor = self._tensor(node, name, value)
            role = "parameter" if kind == "ParamAOTInput" else "buffer"
            others = tuple(self.other_names.get(name, ()))
            self.variables.append(Variable(name, tensor, role, aliases=others))
        elif kind == "PlainAOTInput":
            field = self.fields[described.idx]
            self.feeds.append(Feed(field, self._tensor(node, f"batch.{field}", value)))
        elif kind == "TangentAOTInput":
            self.feeds.append(Feed("@tangent", self._tensor(node, "tangent", value)))
        else:
            raise RecipeError("model", f"an input of kind {kind} is not understood ({described})")

    def _first_name(self, described: Any) -> str:
        owner, _, name = described.target.partition(".")
        name = f"{LOSS}{name}" if owner == "loss" else name
        return self.first_names.get(name, name)

    def _constant(self, node: torch.fx.Node, value: torch.Tensor) -> None:
        """A tensor made of numbers inside forward: an op of the graph that holds the numbers."""
        name, numbers = self._tensor(node, node.name, value), tuple(value.flatten().tolist())
        if len(numbers) > MOST_NUMBERS:
            raise RecipeError(
                "model",
                f"a constant tensor of {len(numbers):,} numbers is made inside forward of module "
                f"{module_of(node) or '(top level)'}; at most {MOST_NUMBERS:,} are carried along.",
                "Register it as a buffer of the module.",
            )
        shape, dtype = self.tensors[name].shape, (("dtype", value.dtype),)
        alike = len(set(numbers)) == 1
        target = "aten.full.default" if alike else "flow.constant"
        args = (shape, numbers[0]) if alike else (numbers, shape)
        self.ops.append(Op(name, target, args, dtype, (name,), module_of(node), _phase_of(node)))

    def _call(self, node: torch.fx.Node) -> None:
        target = str(node.target)
        if target == "<built-in function getitem>":
            return  # read together with the op that makes the tuple
        if target in ("aten.detach.default", "aten.alias.default"):
            self.names[node] = self.names[node.args[0]]
            return
        self.ops.append(
            Op(
                name=node.name,
                target=target,
                args=tuple(self._argument(arg) for arg in node.args),
                kwargs=tuple(
                    (key, self._argument(arg))
                    for key, arg in node.kwargs.items()
                    if key not in ("device", "pin_memory", "layout")
                ),
                outputs=self._made(node),
                module=module_of(node),
                phase=_phase_of(node),
                moment=_moment_of(node),
            )
        )

    def _made(self, node: torch.fx.Node) -> tuple[str | None, ...]:
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            return (self._tensor(node, node.name, value),)
        made: list[str | None] = [None] * len(value)
        for user in node.users:
            index: Any = user.args[1]
            if made[index] is None and user.users:
                made[index] = self._tensor(user, f"{node.name}.{index}", value[index])
            elif made[index] is not None:
                self.names[user] = str(made[index])
        return tuple(made)

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return Ref(self.names[arg])
        if isinstance(arg, (list, tuple)):
            return tuple(self._argument(item) for item in arg)
        return arg

    @staticmethod
    def _check_scalar(name: str, made: Tensor) -> None:
        if made.shape != () or not made.dtype.is_floating_point:
            key = "task.loss" if name == "loss" else f"task.metrics.{name}"
            raise RecipeError(
                key,
                f"this makes {made.dtype} of shape {made.shape}, not one number, the batch's mean.",
                "Name a function called with (output, batch) that returns a floating-point scalar.",
            )

    def _outputs(self, node: torch.fx.Node) -> None:
        values: Any = node.args[0]
        for value, described in zip(values, node.meta["desc"], strict=True):
            kind = type(described).__name__
            if value is None:
                continue
            name = self.names[value]
            if kind == "PlainAOTOutput":
                result = self.result_names[described.idx]
                if not result.startswith(WRITES):
                    self._check_scalar(result, self.tensors[name])
                self.results.append((result, name))
            elif kind == "GradAOTOutput":
                if type(described.grad_of).__name__ == "ParamAOTInput":
                    self.results.append((f"grad/{self._first_name(described.grad_of)}", name))
            elif kind == "InputMutationAOTOutput":
                self._written(described.mutated_input, name)
            else:
                raise RecipeError(
                    "model", f"an output of kind {kind} is not understood ({described})"
                )

    def _written(self, described: Any, made: str) -> None:
        """Forward writes into a buffer: in evaluation that is left undone."""
        if type(described).__name__ != "BufferAOTInput":
            raise RecipeError(
                "model",
                f"forward writes into {described}.",
                "Only buffers of the model may change in forward.",
            )
        if self.train:
            self.results.append((f"{WRITES}{self._first_name(described)}", made))


_INDEX = re.compile(r"\[['\"]?([^'\"\]]+)['\"]?\]")


def _moment_of(node: torch.fx.Node) -> int:
    """torch's number of the autograd node that a forward op made, or that a backward op runs.

    A sum of gradients belongs to none: it has no module and carries the number of what ran before.
    """
    backward = node.meta.get("partitioner_tag") == "is_backward"
    if backward and module_of(node) == "" and not node.meta.get("fwd_nn_module_stack"):
        return -1
    return int(node.meta.get("seq_nr", -1))


def _phase_of(node: torch.fx.Node) -> str:
    return BACKWARD if node.meta.get("partitioner_tag") == "is_backward" else FORWARD


def module_of(node: torch.fx.Node) -> str:
    """Dotted path in the user's model; "loss" outside of it; "" if torch does not tell."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    backward = node.meta.get("partitioner_tag") == "is_backward"
    paths = [entry[0] for entry in (stack or {}).values()]
    for path in reversed(paths):
        dotted = re.sub(r"^L\[['\"]\w+['\"]\]\.?", "", path)
        dotted = _INDEX.sub(r".\1", dotted).replace("..", ".").lstrip(".")
        dotted = dotted.replace("__dict__.", "").replace("_modules.", "")
        if dotted == "model":
            return ""
        if dotted.startswith("model."):
            return dotted.removeprefix("model.")
    is_sum = "add.Tensor" in str(node.target)  # of gradients, from several readers of a tensor
    return "" if backward and is_sum and not paths else "loss"
