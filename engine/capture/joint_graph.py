"""joint_graph: torch's joint graph of forward and backward, in FX -> LogicalGraph.

Relied upon (tests/engine/capture/test_capture.py names each fact): placeholders and outputs carry
descriptors (`meta["desc"]`), nodes `nn_module_stack` (forward), `fwd_nn_module_stack` (backward),
`seq_nr` and `val` (a fake tensor); joint_nodes.py names the rest.
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
    outputs_of,
    place_of,
    user_line,
)
from flowrun.engine.capture.node_reader import MOST_NUMBERS, NodeReader
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
from flowrun.engine.ir.names import ROWS, tensor_of_field, tensor_of_node, tensor_of_variable
from flowrun.engine.ops.flow.check import AFTER, ASSERT

_WRITTEN = "InputMutationAOTOutput"  # torch's name of what forward writes into an input
LOSS = "task.loss."  # prefix of the names of parameters and buffers that a loss module holds


class JointGraph:
    """A reader of one joint graph.

    fields: fields of the batch, in order.  results: names of what forward returns.  first_names:
    any name of a parameter or buffer -> the name that counts.  train: keep forward's writes into
    buffers.  run_checks: keep ops without a result (flow.check); else a note says what is left out.
    """

    def __init__(
        self,
        fields: tuple[str, ...],
        results: tuple[str, ...],
        first_names: Mapping[str, str],
        train: bool,
        run_checks: bool = False,
    ) -> None:
        self.fields = fields
        self.result_names = results
        self.first_names = first_names
        self.train = train
        self.run_checks = run_checks
        self.reader = NodeReader(lambda node: tensor_of_node(node.name))
        self.variables: dict[str, Variable] = {}
        self.feeds: list[Feed] = []
        self.results: list[tuple[str, str]] = []
        self.checks: list[str] = []  # what each check makes
        self.left_out: dict[tuple[str, str], None] = {}  # (op, module)
        self.backward: Collection[torch.fx.Node] = ()

    def read(self, module: torch.fx.GraphModule) -> LogicalGraph:
        """Return the logical graph of torch's joint graph.

        Raise RecipeError for what no logical graph can hold: another kind of input or result, a
        large constant, a call that is not an op of tensors, a write into a trained parameter.
        """
        drop_tokens(module.graph)
        self.backward = backward_of(module.graph)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._read_placeholder(node)
            elif node.op == "call_function":
                self._read_call(node)
            elif node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(module)
                if isinstance(value, torch.Tensor):  # else a function that an op takes
                    self._read_constant(node, value)
            elif node.op == "output":
                self._read_outputs(node)
        self._delay_loss()
        return LogicalGraph(
            tuple(self.reader.ops),
            self.reader.tensors,
            tuple(self.variables.values()),
            tuple(self.feeds),
            results=tuple(self.results),
            notes=tuple(_left_out_note(*each) for each in self.left_out),
        )

    def _read_placeholder(self, node: torch.fx.Node) -> None:
        described, value = node.meta["desc"], node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        kind, add = type(described).__name__, self.reader.add_tensor
        if kind in ("ParamAOTInput", "BufferAOTInput"):
            name = self._first_name(described)
            if name in self.variables:  # tied: torch lists every name
                self.reader.names[node] = self.variables[name].tensor
                return
            tensor = add(node, tensor_of_variable(name), value)
            role = "parameter" if kind == "ParamAOTInput" else "buffer"
            others = (n for n, first in self.first_names.items() if n != first == name)
            self.variables[name] = Variable(name, tensor, role, aliases=tuple(others))
        elif kind == "PlainAOTInput":
            field = self.fields[described.idx]
            self.feeds.append(Feed(field, add(node, tensor_of_field(field), value)))
        elif kind == "TangentAOTInput":
            self.feeds.append(Feed("@tangent", add(node, "tangent", value)))
        else:
            raise RecipeError("model", f"torch's graph has an unknown input, {kind} ({described})")

    def _first_name(self, described: Any) -> str:
        owner, _, name = described.target.partition(".")
        name = f"{LOSS}{name}" if owner == "loss" else name
        return self.first_names.get(name, name)

    def _read_constant(self, node: torch.fx.Node, value: torch.Tensor) -> None:
        """Read a tensor that forward makes of numbers, as an op that holds the numbers."""
        module = module_of(node)
        if value.numel() > MOST_NUMBERS:
            raise RecipeError(
                "model",
                f"forward of module {module or '(top level)'} makes a constant tensor of"
                f" {value.numel():,} numbers; a plan holds at most {MOST_NUMBERS:,}.",
                "Register it as a buffer of the module.",
            )
        self.reader.add_constant(node, value, module=module, phase=self._phase(node))

    def _read_call(self, node: torch.fx.Node) -> None:
        if is_getitem(node):
            return  # read together with the op that makes the tuple
        check_readable(node)
        module, phase = module_of(node), self._phase(node)
        if makes_tensors(node):
            of = {"module": module, "phase": phase, "line": user_line(node)}
            self.reader.add_op(node, **of, moment=self._moment(node))
        elif self.run_checks:
            self._add_check(node, module, phase)
        else:
            self.left_out[str(node.target), module] = None

    def _add_check(self, node: torch.fx.Node, module: str, phase: str) -> None:
        """Append an op that runs for its effect, such as an assert."""
        name = tensor_of_node(node.name)
        self.reader.tensors[name] = LogicalTensor(name, (), torch.bool)
        given, kwargs = self.reader.arguments(node)
        args = (given, str(node.target), user_line(node))
        check = Op(name, ASSERT, args, kwargs, outputs=(name,), module=module, phase=phase)
        self.reader.ops.append(check)
        self.checks.append(name)

    def _delay_loss(self) -> None:
        """Let the loss wait for the checks: an op that nothing reads would be dropped."""
        if self.checks:
            loss, name = dict(self.results)["loss"], "loss/checked"
            self.reader.tensors[name] = replace(self.reader.tensors[loss], name=name)
            refs = tuple(map(Ref, (loss, *self.checks)))
            self.reader.ops.append(Op(name, AFTER, refs, outputs=(name,), module="loss"))
            self.results = [(k, name if k == "loss" else each) for k, each in self.results]

    def _phase(self, node: torch.fx.Node) -> str:
        return BACKWARD if node in self.backward else FORWARD

    def _moment(self, node: torch.fx.Node) -> int:
        """Return torch's number of the autograd node that a forward op made or a backward op runs.

        -1 stands for none.  A sum of gradients belongs to no autograd node (it has no module, and
        carries the number of what ran before), nor do the ops of a user's autograd.Function.
        """
        tagged = is_tagged_backward(node)
        if tagged != (node in self.backward):
            return -1
        if tagged and module_of(node) == "" and not node.meta.get("fwd_nn_module_stack"):
            return -1
        return int(node.meta.get("seq_nr", -1))

    def _read_outputs(self, node: torch.fx.Node) -> None:
        pairs = [(type(d).__name__, v, d) for v, d in outputs_of(node.graph)]
        for kind, value, described in sorted(pairs, key=lambda pair: pair[0] == _WRITTEN):
            if value is None:
                continue
            name = self.reader.names[value]
            if kind == "PlainAOTOutput":
                result = self.result_names[described.idx]
                if not result.startswith(WRITES):
                    _check_result(result, self.reader.tensors[name])
                self.results.append((result, name))
            elif kind == "GradAOTOutput":
                if type(described.grad_of).__name__ == "ParamAOTInput":
                    self.results.append((f"grad/{self._first_name(described.grad_of)}", name))
            elif kind == _WRITTEN:
                self._read_write(value, described.mutated_input)
            else:
                problem = f"torch's graph has an unknown output, {kind} ({described})"
                raise RecipeError("model", problem)

    def _read_write(self, node: torch.fx.Node, described: Any) -> None:
        """Read what forward writes into a buffer, or into a parameter that is not trained.

        Evaluation leaves the write undone.  A field of the batch is a copy that nobody reads after
        the step.
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
            self.variables[name] = replace(self.variables[name], kind="buffer")
            self.results.append((f"{WRITES}{name}", self.reader.names[node]))


def _check_result(name: str, tensor: LogicalTensor) -> None:
    rows = name.startswith(ROWS)
    if len(tensor.shape) != 2 * rows or not tensor.dtype.is_floating_point:
        wanted = "rows (n, D)" if rows else "one number, the mean over the batch"
        raise RecipeError(
            "task.loss" if name == "loss" else f"task.metrics.{name.removeprefix(ROWS)}",
            f"it returns {tensor.dtype} of shape {tensor.shape} instead of {wanted}.",
            "Name a function called with (output, batch) that returns a floating-point "
            + ("matrix, a row a sample: it has of_rows." if rows else "scalar."),
        )


_INSTEAD_OF_WRITING = (
    "Compute with a changed copy (weight.clamp(…)), or freeze it (requires_grad=False)."
)
_INSTEAD_OF_RENORM = (
    "Leave max_norm out, or let forward compute a table of bounded norms and look up in that."
)


def _left_out_note(target: str, module: str) -> str:
    name, where = target.removesuffix(".default"), module or "the model"
    return f"{name} in {where} returns nothing and is left out; engine.check=true runs it"


_INDEX = re.compile(r"\[['\"]?([^'\"\]]+)['\"]?\]")


def module_of(node: torch.fx.Node) -> str:
    """Return the dotted path of the module in the user's model that a node comes from.

    "loss" stands for everything outside of the model, "" for the model itself and for nodes whose
    module torch does not record; a module of the model called `loss` is "model.loss".
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
