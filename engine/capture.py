"""capture: a torch module and the shapes of one micro-batch -> LogicalGraph (level "captured").

The only file that knows torch's capture internals.  Relied upon (tests/engine/test_capture.py names
each fact): `dynamo_graph_capture_for_export` turns module and loss into one FX graph;
`aot_export_joint_with_descriptors` turns that into one functional ATen graph of forward and
backward whose placeholders and outputs carry descriptors (`meta["desc"]`), whose nodes carry
`partitioner_tag`, `nn_module_stack` (forward) and `fwd_nn_module_stack` (backward), and `val` (a
fake tensor).
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowrun.engine.buffers import assign_buffers
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
from flowrun.engine.random_ops import seed_random_ops
from flowrun.engine.simplify import simplify

MOST_NUMBERS = 4096  # of a constant tensor that a plan carries

Batch = Mapping[str, torch.Tensor]
LossFn = Callable[[Any, Batch], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained: a module, how the batch enters it, and what is made of its output.

    inputs: model argument -> batch field.
    loss: loss(output, batch) -> scalar mean over the batch; None: the output, or its `.loss`.
    metrics: name -> metric(output, batch) -> scalar mean, evaluated with the validation loss.
    autocast: the dtype in which the ops that torch.autocast lists compute, in training and
        evaluation; None: all as written.  Parameters, gradients, loss and metrics are fp32 all the
        same.  The lists are those of torch's CPU autocast, on every device.
    any_device: write attention as products and a softmax, which run on any device, instead of as
        the fused kernel of the CPU, on which capture runs.
    seed: of what the module draws at random.
    """

    model: nn.Module
    inputs: Mapping[str, str]
    loss: LossFn | None = None
    metrics: Mapping[str, LossFn] = ()  # type: ignore[assignment]
    autocast: torch.dtype | None = None
    any_device: bool = False
    seed: int = 0


class _Program(nn.Module):
    """Model, loss and metrics as one module of positional tensors: what torch captures."""

    def __init__(self, task: Task, fields: tuple[str, ...], metrics: Mapping[str, LossFn]) -> None:
        super().__init__()
        self.model = task.model
        self.task = task
        self.fields = fields
        self.metric_fns = tuple(metrics.values())

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.task.autocast is None:
            return self._measured(values)
        # here and not around the capture: torch then leaves backward as autograd writes it
        with torch.autocast("cpu", self.task.autocast):
            measured = self._measured(values)
        return tuple(_widened(value) for value in measured)

    def _measured(self, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        batch = dict(zip(self.fields, values, strict=True))
        output = self.model(**{arg: batch[name] for arg, name in self.task.inputs.items()})
        if self.task.loss is not None:
            loss = self.task.loss(output, batch)
        else:
            loss = output if isinstance(output, torch.Tensor) else output.loss
        return (loss, *(fn(output, batch) for fn in self.metric_fns))


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def capture(task: Task, batch: Batch) -> LogicalGraph:
    """The training graph of one micro-batch.

    batch: example tensors, dim 0 = samples of one micro-batch; only shapes and dtypes are used. The
    gradient of each parameter is listed in the result's `results` as ("grad/<parameter>", tensor);
    the tangent of the loss is a feed named "@tangent".  Raises RecipeError if the module cannot be
    captured.
    """
    task.model.train()
    return _captured(task, batch, {}, train=True)


def capture_evaluation(task: Task, batch: Batch) -> LogicalGraph:
    """The evaluation graph of one micro-batch: forward only, module in eval mode; results "loss"
    and one for each metric.
    """
    task.model.eval()
    try:
        return _captured(task, batch, dict(task.metrics or {}), train=False)
    finally:
        task.model.train()


def _captured(
    task: Task, batch: Batch, metrics: Mapping[str, LossFn], *, train: bool
) -> LogicalGraph:
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    program = _Program(task, tuple(batch), metrics)
    values = tuple(batch.values())
    grad = contextlib.nullcontext() if train else torch.no_grad()
    try:
        with contextlib.ExitStack() as stack, grad, warnings.catch_warnings():
            if task.any_device:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
                stack.enter_context(_narrow_attention())
            warnings.simplefilter("ignore")
            stack.enter_context(torch._dynamo.config.patch(ignore_logger_methods=_loggers()))
            torch._dynamo.reset()
            captured = dynamo_graph_capture_for_export(program)(*values)
            joint = aot_export_joint_with_descriptors(stack, captured, values)
    except Exception as error:
        raise RecipeError(
            "model",
            f"torch could not capture {type(task.model).__name__}: {_first_line(error)}",
            "The model must run on one micro-batch without data-dependent Python control flow.",
        ) from error
    reader = _Reader(tuple(batch), ("loss", *metrics), _first_names(task.model), train)
    graph = reader.read(joint.graph_module)
    return simplify(seed_random_ops(graph, task.seed))


@contextlib.contextmanager
def _narrow_attention() -> Iterator[None]:
    """Attention's products in the dtype of their inputs, as autocast has all others; torch would
    widen bf16 and fp16 first.
    """
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def _loggers() -> set[Callable[..., Any]]:
    """What a module may say while it runs, and capture leaves out; libraries add words of their
    own, such as warning_once.
    """
    words = ("debug", "info", "warn", "error", "exception", "critical", "fatal", "log")
    methods = vars(logging.Logger).items()
    return {method for name, method in methods if name.startswith(words) and callable(method)}


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


class _Reader:
    """Reads torch's joint FX graph into a LogicalGraph; detach and getitem disappear."""

    def __init__(
        self,
        fields: tuple[str, ...],
        results: tuple[str, ...],
        first_names: Mapping[str, str],
        train: bool,
    ) -> None:
        self.first_names = first_names
        self.train = train
        self.fields = fields
        self.result_names = results
        self.names: dict[Any, str] = {}  # FX node -> tensor
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self.variables: list[Variable] = []
        self.feeds: list[Feed] = []
        self.results: list[tuple[str, str]] = []
        self.changed: dict[str, str] = {}  # buffer -> what forward makes of it

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
        graph = LogicalGraph(
            tuple(self.ops),
            self.tensors,
            tuple(self.variables),
            tuple(self.feeds),
            tuple(self.results),
        )
        return assign_buffers(graph, self.changed)

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
            if any(v.name == name for v in self.variables):  # tied: torch lists every name
                self.names[node] = name
                return
            tensor = self._tensor(node, name, value)
            role = "parameter" if kind == "ParamAOTInput" else "buffer"
            others = tuple(
                other for other, first in self.first_names.items() if first == name != other
            )
            self.variables.append(Variable(name, tensor, role, aliases=others))
        elif kind == "PlainAOTInput":
            field = self.fields[described.idx]
            self.feeds.append(Feed(field, self._tensor(node, f"batch.{field}", value)))
        elif kind == "TangentAOTInput":
            self.feeds.append(Feed("@tangent", self._tensor(node, "tangent", value)))
        else:
            raise RecipeError("model", f"an input of kind {kind} is not understood ({described})")

    def _first_name(self, described: Any) -> str:
        name = described.target.removeprefix("model.")
        return self.first_names.get(name, name)

    def _constant(self, node: torch.fx.Node, value: torch.Tensor) -> None:
        """A tensor made of numbers inside forward: an op of the graph that holds the numbers."""
        name, numbers = self._tensor(node, node.name, value), tuple(value.flatten().tolist())
        if len(numbers) > MOST_NUMBERS:
            raise RecipeError(
                "model",
                f"a constant tensor of {len(numbers):,} numbers is made inside forward of module "
                f"{_module_of(node) or '(top level)'}; at most {MOST_NUMBERS:,} are carried along.",
                "Register it as a buffer of the module.",
            )
        shape, dtype = self.tensors[name].shape, (("dtype", value.dtype),)
        alike = len(set(numbers)) == 1
        target = "aten.full.default" if alike else "flow.constant"
        args = (shape, numbers[0]) if alike else (numbers, shape)
        self.ops.append(Op(name, target, args, dtype, (name,), _module_of(node), _phase_of(node)))

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
                module=_module_of(node),
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
                self._check_scalar(self.result_names[described.idx], self.tensors[name])
                self.results.append((self.result_names[described.idx], name))
            elif kind == "GradAOTOutput":
                if type(described.grad_of).__name__ == "ParamAOTInput":
                    self.results.append((f"grad/{self._first_name(described.grad_of)}", name))
            elif kind == "InputMutationAOTOutput":
                self._changed(described.mutated_input, name)
            else:
                raise RecipeError(
                    "model", f"an output of kind {kind} is not understood ({described})"
                )

    def _changed(self, described: Any, made: str) -> None:
        """Forward writes into a buffer: in evaluation that is left undone."""
        if type(described).__name__ != "BufferAOTInput":
            raise RecipeError(
                "model",
                f"forward writes into {described}.",
                "Only buffers of the model may change in forward.",
            )
        if self.train:
            self.changed[self._first_name(described)] = made


_INDEX = re.compile(r"\[['\"]?([^'\"\]]+)['\"]?\]")


def _first_names(model: nn.Module) -> dict[str, str]:
    """Name of each parameter and buffer -> the first name of the same tensor: one where it is tied,
    as in `named_parameters()`; torch's graph lists every name and reads an arbitrary one.
    """
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(tensor), name)
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    }


def _moment_of(node: torch.fx.Node) -> int:
    """torch's number of the autograd node that a forward op made, or that a backward op runs.

    A sum of gradients belongs to none: it has no module and carries the number of what ran before.
    """
    backward = node.meta.get("partitioner_tag") == "is_backward"
    if backward and _module_of(node) == "" and not node.meta.get("fwd_nn_module_stack"):
        return -1
    return int(node.meta.get("seq_nr", -1))


def _phase_of(node: torch.fx.Node) -> str:
    return BACKWARD if node.meta.get("partitioner_tag") == "is_backward" else FORWARD


def _module_of(node: torch.fx.Node) -> str:
    """Dotted path in the user's model; "loss" outside of it; "" if torch does not tell."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    backward = node.meta.get("partitioner_tag") == "is_backward"
    paths = [entry[0] for entry in (stack or {}).values()]
    for path in reversed(paths):
        dotted = re.sub(r"^L\[['\"]\w+['\"]\]\.?", "", path)
        dotted = _INDEX.sub(r".\1", dotted).replace("..", ".").lstrip(".")
        dotted = dotted.replace("_modules.", "")
        if dotted == "model":
            return ""
        if dotted.startswith("model."):
            return dotted.removeprefix("model.")
    named = any(part in str(node.target) for part in ("add.Tensor",))
    return "" if backward and named and not paths else "loss"
