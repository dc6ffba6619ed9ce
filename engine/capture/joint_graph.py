"""joint_graph: torch's joint graph of forward and backward, in FX -> LogicalGraph.

Relied upon (tests/engine/capture/test_capture.py names each fact): placeholders and outputs carry
descriptors (`meta["desc"]`), nodes `nn_module_stack` (forward), `fwd_nn_module_stack` (backward),
`seq_nr` and `val` (a fake tensor); joint_nodes.py has the rest.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from flowrun.engine.capture.buffers import WRITES
from flowrun.engine.capture.joint_nodes import (
    backward_of,
    check_readable,
    drop_tokens,
    is_getitem,
    is_tagged_backward,
    makes_tensors,
    place_of,
    user_line,
)
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import (
    BACKWARD,
    FORWARD,
    Feed,
    LogicalGraph,
    LogicalTensor,
    Op,
    Ref,
    Variable,
)
from flowrun.engine.ir.names import tensor_of_field, tensor_of_node, tensor_of_variable
from flowrun.engine.ops.flow.check import AFTER, ASSERT
from flowrun.engine.ops.shapes.create import CONSTANT

LOSS = "task.loss."  # before the names of what a loss that is a module holds

MOST_NUMBERS = 4096  # of a constant tensor that a plan carries


class JointGraph:
    """Reads one; detach and getitem disappear.

    fields: of the batch, in order.  results: names of what forward returns.  first_names: any name
    of a parameter or buffer -> the one that counts.  train: forward writes into buffers.  checks:
    ops without a result run too (flow.check); else they are left out, and a note says so.
    """

    def __init__(
        self,
        fields: tuple[str, ...],
        results: tuple[str, ...],
        first_names: Mapping[str, str],
        train: bool,
        checks: bool = False,
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
        self.tensors: dict[str, LogicalTensor] = {}
        self.ops: list[Op] = []
        self.variables: list[Variable] = []
        self.feeds: list[Feed] = []
        self.results: list[tuple[str, str]] = []
        self.checks: list[str] | None = [] if checks else None  # what each makes
        self.left_out: dict[tuple[str, str], None] = {}  # (op, module)
        self.backward: Collection[torch.fx.Node] = ()

    def read(self, module: torch.fx.GraphModule) -> LogicalGraph:
        drop_tokens(module.graph)
        self.backward = backward_of(module.graph)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(module)
                if isinstance(value, torch.Tensor):  # else a function that an op is given
                    self._constant(node, value)
            elif node.op == "output":
                self._outputs(node)
        self._run_checks()
        return LogicalGraph(
            tuple(self.ops),
            self.tensors,
            tuple(self.variables),
            tuple(self.feeds),
            results=tuple(self.results),
            notes=tuple(_left_out(*each) for each in self.left_out),
        )

    def _tensor(self, node: torch.fx.Node, name: str, value: Any) -> str:
        self.tensors[name] = LogicalTensor(name, tuple(int(n) for n in value.shape), value.dtype)
        self.names[node] = name
        return name

    def _placeholder(self, node: torch.fx.Node) -> None:
        described, value = node.meta["desc"], node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        kind = type(described).__name__
        if kind in ("ParamAOTInput", "BufferAOTInput"):
            name = self._first_name(described)
            tensor = tensor_of_variable(name)
            if tensor in self.tensors:  # tied: torch lists every name
                self.names[node] = tensor
                return
            self._tensor(node, tensor, value)
            role = "parameter" if kind == "ParamAOTInput" else "buffer"
            others = tuple(self.other_names.get(name, ()))
            self.variables.append(Variable(name, tensor, role, aliases=others))
        elif kind == "PlainAOTInput":
            field = self.fields[described.idx]
            self.feeds.append(Feed(field, self._tensor(node, tensor_of_field(field), value)))
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
        name = self._tensor(node, tensor_of_node(node.name), value)
        numbers = tuple(value.flatten().tolist())
        if len(numbers) > MOST_NUMBERS:
            raise RecipeError(
                "model",
                f"a constant tensor of {len(numbers):,} numbers is made inside forward of module "
                f"{module_of(node) or '(top level)'}; at most {MOST_NUMBERS:,} are carried along.",
                "Register it as a buffer of the module.",
            )
        shape, dtype = self.tensors[name].shape, (("dtype", value.dtype),)
        alike = len(set(numbers)) == 1
        target = "aten.full.default" if alike else CONSTANT
        args = (shape, numbers[0]) if alike else (numbers, shape)
        self.ops.append(
            Op(
                name,
                target,
                args,
                dtype,
                outputs=(name,),
                module=module_of(node),
                phase=self._phase(node),
            )
        )

    def _call(self, node: torch.fx.Node) -> None:
        if is_getitem(node):
            return  # read together with the op that makes the tuple
        check_readable(node)
        target = str(node.target)
        if target in ("aten.detach.default", "aten.alias.default"):
            self.names[node] = self.names[node.args[0]]
            return
        if not makes_tensors(node):
            self._check(node)
            return
        self.ops.append(
            Op(
                name=tensor_of_node(node.name),
                target=target,
                args=tuple(self._argument(arg) for arg in node.args),
                kwargs=tuple(
                    (key, self._argument(arg))
                    for key, arg in node.kwargs.items()
                    if key not in ("device", "pin_memory", "layout")
                ),
                outputs=self._made(node),
                module=module_of(node),
                phase=self._phase(node),
                moment=self._moment(node),
            )
        )

    def _check(self, node: torch.fx.Node) -> None:
        """An op that is run for what it does, such as an assert: nothing reads a result of it."""
        if self.checks is None:
            self.left_out[str(node.target), module_of(node)] = None
            return
        name = tensor_of_node(node.name)
        self.tensors[name] = LogicalTensor(name, (), torch.bool)
        args = (self._argument(node.args), str(node.target), user_line(node))
        kwargs = tuple((key, self._argument(arg)) for key, arg in node.kwargs.items())
        module, phase = module_of(node), self._phase(node)
        self.ops.append(Op(name, ASSERT, args, kwargs, outputs=(name,), module=module, phase=phase))
        self.checks.append(name)

    def _run_checks(self) -> None:
        """The loss waits for the checks: what nothing reads is dropped."""
        if self.checks:
            loss = dict(self.results)["loss"]
            name = "loss/checked"
            self.tensors[name] = replace(self.tensors[loss], name=name)
            refs = tuple(map(Ref, (loss, *self.checks)))
            self.ops.append(
                Op(name, AFTER, refs, (), outputs=(name,), module="loss", phase=FORWARD)
            )
            self.results = [(k, name if k == "loss" else made) for k, made in self.results]

    def _phase(self, node: torch.fx.Node) -> str:
        return BACKWARD if node in self.backward else FORWARD

    def _moment(self, node: torch.fx.Node) -> int:
        """torch's number of the autograd node that a forward op made, or that a backward op runs;
        -1 where it does not tell.

        A sum of gradients belongs to none: it has no module and carries the number of what ran
        before; so do ops of the backward of a user's own autograd.Function.
        """
        tagged = is_tagged_backward(node)
        if tagged != (node in self.backward):
            return -1
        if tagged and module_of(node) == "" and not node.meta.get("fwd_nn_module_stack"):
            return -1
        return int(node.meta.get("seq_nr", -1))

    def _made(self, node: torch.fx.Node) -> tuple[str | None, ...]:
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            return (self._tensor(node, tensor_of_node(node.name), value),)
        made: list[str | None] = [None] * len(value)
        for user in node.users:
            index: Any = user.args[1]
            if made[index] is None and user.users:
                made[index] = self._tensor(
                    user, f"{tensor_of_node(node.name)}.{index}", value[index]
                )
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
    def _check_scalar(name: str, made: LogicalTensor) -> None:
        if made.shape != () or not made.dtype.is_floating_point:
            key = "task.loss" if name == "loss" else f"task.metrics.{name}"
            raise RecipeError(
                key,
                f"this makes {made.dtype} of shape {made.shape}, not one number, the batch's mean.",
                "Name a function called with (output, batch) that returns a floating-point scalar.",
            )

    def _outputs(self, node: torch.fx.Node) -> None:
        values: Any = node.args[0]
        pairs = list(zip(values, node.meta["desc"], strict=True))
        for value, described in sorted(pairs, key=lambda pair: _is_written(pair[1])):
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
                self._written(value, described.mutated_input)
            else:
                raise RecipeError(
                    "model", f"an output of kind {kind} is not understood ({described})"
                )

    def _written(self, node: torch.fx.Node, described: Any) -> None:
        """Forward writes into a buffer, or a parameter that is not trained: in evaluation that is
        left undone.  A field of the batch is a copy, which nobody reads after the step.
        """
        if type(described).__name__ == "PlainAOTInput":
            return
        name = self._first_name(described)
        if any(key == f"grad/{name}" for key, _ in self.results):
            raise RecipeError(
                "model",
                f"forward writes into the parameter {name}, which is trained{place_of(node)}.",
                _INSTEAD_OF_RENORM if "renorm" in str(node.target) else _INSTEAD_OF_WRITING,
            )
        if self.train:
            self.variables = [
                replace(v, kind="buffer") if v.name == name else v for v in self.variables
            ]
            self.results.append((f"{WRITES}{name}", self.names[node]))


_INSTEAD_OF_WRITING = (
    "Compute with a changed copy (weight.clamp(…)), or freeze it (requires_grad=False)."
)
_INSTEAD_OF_RENORM = "Leave max_norm out, or look up in a table that forward makes narrower itself."


def _is_written(described: Any) -> bool:
    return type(described).__name__ == "InputMutationAOTOutput"


def _left_out(target: str, module: str) -> str:
    name, where = target.removesuffix(".default"), module or "the model"
    return f"{name} in {where} makes nothing and is left out; engine.check=true runs it"


_INDEX = re.compile(r"\[['\"]?([^'\"\]]+)['\"]?\]")


def module_of(node: torch.fx.Node) -> str:
    """Dotted path in the user's model; "loss" outside of it; "" if torch does not tell.  A module
    of the model that is called `loss` is "model.loss".
    """
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
            path = dotted.removeprefix("model.")
            return dotted if path == "loss" else path
    is_sum = "add.Tensor" in str(node.target)  # of gradients, from several readers of a tensor
    return "" if backward and is_sum and not paths else "loss"
