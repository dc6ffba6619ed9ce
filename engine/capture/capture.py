"""capture: a torch module and the shapes of one micro-batch -> LogicalGraph (level "captured").

`trace_forward` (torch_internals.py) turns module and loss into one FX graph; `trace_joint` turns
that graph into one functional ATen graph of forward and backward, which joint_graph.py reads.

Of many equal blocks only a few are traced (fold.py); the others are repeated in the logical graph
(unfold.py).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from flowrun.engine.capture.buffers import WRITES, assign_buffers, with_buffers
from flowrun.engine.capture.capture_errors import (
    UnfollowedError,
    explain_evaluation,
    explain_failure,
    missing_loss_error,
)
from flowrun.engine.capture.fold import Fold, are_folded, fold
from flowrun.engine.capture.gradient_hooks import apply_hooks
from flowrun.engine.capture.in_python.run_in_python import keep_used, run_in_python
from flowrun.engine.capture.joint_graph import LOSS, JointGraph
from flowrun.engine.capture.module_checks import check_modules
from flowrun.engine.capture.parts import UnlikeError
from flowrun.engine.capture.patches.alike_blocks import AbsentBlocks, find_runs, leave_out
from flowrun.engine.capture.patches.forward_graph import replace_calls, sort_inputs
from flowrun.engine.capture.patches.substitutes import narrow_residual
from flowrun.engine.capture.patches.tracing import prepare_tracing, silence_logs
from flowrun.engine.capture.random_ops import seed_random_ops
from flowrun.engine.capture.rewrites.check_ranges import check_ranges
from flowrun.engine.capture.rewrites.simplify import simplify
from flowrun.engine.capture.rewrites.strided_views import view_elements
from flowrun.engine.capture.side_effects import Effect, record_effects
from flowrun.engine.capture.unfold import unfold
from flowrun.engine.errors import FlowrunError, RecipeError, refuse_as
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ir.names import ROWS
from flowrun.engine.ir.user_code import place
from flowrun.engine.torch_internals import buffers_of, trace_forward, trace_joint

Batch = Mapping[str, torch.Tensor]
LossFn = Callable[[Any, Batch], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Task:
    """A module to train, with what feeds it and what is computed from its output.

    inputs: model argument -> batch field.
    loss: loss(output, batch) -> scalar mean over the batch; None: the output, or its `.loss`.
    metrics: name -> metric(output, batch) -> scalar mean, evaluated with the validation loss; or
        rows (n, D), of all of which metric.of_rows makes the number.
    autocast: dtype of the ops that torch.autocast lists, in training and evaluation; None: all ops
        as written.  Parameters, gradients, loss and metrics stay fp32.  The lists are those of
        torch's CPU autocast, on every device.
    narrow_residual: under autocast look-ups are narrow, too (patches/substitutes.py).
    decomposed_attention: capture attention as products and a softmax, as software before fused
        kernels ran it; else as one op wherever it has no dropout (kernels/fused_attention.py).
    low_precision_attention: decomposed attention multiplies in the dtype of its inputs, as autocast
        lets all other products do; torch casts bf16 and fp16 to fp32 first, which costs a CPU
        little and a GPU much.
    seed: seed of the random numbers that the module draws.
    keep_logits: cross entropy keeps logits for backward (kept_logits.py); else probabilities, as
        torch and OneFlow do.
    run_checks: keep the model's asserts on tensors, and other ops without a result.
    """

    model: nn.Module
    inputs: Mapping[str, str]
    loss: LossFn | None = None
    metrics: Mapping[str, LossFn] = ()  # type: ignore[assignment]
    _: KW_ONLY
    autocast: torch.dtype | None = None
    narrow_residual: bool = False
    decomposed_attention: bool = False
    low_precision_attention: bool = False
    seed: int = 0
    keep_logits: bool = True
    run_checks: bool = False

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Prefix of names -> module: the model, and the loss if it is a module."""
        of_loss = {LOSS: self.loss} if isinstance(self.loss, nn.Module) else {}
        return {"": self.model, **of_loss}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """First name -> parameter or buffer; names of the loss begin with LOSS."""
        everything = self._named_tensors()
        return {name: everything[name] for name in dict.fromkeys(self.first_names.values())}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return those of `tensors` that are parameters."""
        return {name: t for name, t in self.tensors.items() if isinstance(t, nn.Parameter)}

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """Within the block, torch computes the model, loss and metrics as a captured graph does."""
        with (
            torch.autocast("cpu", self.autocast, enabled=self.autocast is not None),
            narrow_residual(self.narrow_residual),
        ):
            yield

    def output(self, batch: Batch, model: nn.Module | None = None) -> Any:
        """Return what the model computes of a batch.  model: in the place of the task's."""
        given = {argument: batch[name] for argument, name in self.inputs.items()}
        return (self.model if model is None else model)(**given)

    def loss_of(self, output: object, batch: Batch) -> torch.Tensor:
        """Return the loss of what the model has computed of a batch."""
        return own_loss(output) if self.loss is None else self.loss(output, batch)

    def check_names(self) -> None:
        """Raise RecipeError if a tensor of the model has a name reserved for those of the loss."""
        names = itertools.chain(self.model.named_parameters(), self.model.named_buffers())
        if met := next((name for name, _ in names if name.startswith(LOSS)), None):
            raise RecipeError(
                "model",
                f"the name of {met} is reserved for tensors of task.loss.",
                f"Give the submodule another name than {LOSS.rstrip('.')}.",
            )

    def _named_tensors(self) -> dict[str, torch.Tensor]:
        """Return all parameters and buffers, a tied one under each of its names."""
        return {
            prefix + name: tensor
            for kind in ("named_parameters", "named_buffers")
            for prefix, module in self.modules.items()
            for name, tensor in getattr(module, kind)(remove_duplicate=False)
        }

    @property
    def first_names(self) -> dict[str, str]:
        """Any name of a parameter or buffer -> its first name, the one in `named_parameters()`.

        torch's graph lists every name of a tied tensor and reads an arbitrary one.
        """
        first: dict[int, str] = {}
        named = self._named_tensors().items()
        return {name: first.setdefault(id(tensor), name) for name, tensor in named}


class CapturedModule(nn.Module):
    """Model, loss and metrics as one module of positional tensors, which torch captures.

    fields: batch field of each argument.  written: names of buffers whose values after forward are
    returned, too.
    """

    def __init__(
        self,
        task: Task,
        fields: tuple[str, ...],
        metrics: Mapping[str, LossFn],
        written: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.model = task.model
        self.loss = task.loss
        self.task = task
        self.fields = fields
        self.metric_fns = tuple(metrics.values())
        self.written = tuple(map(self._locate_buffer, written))

    def _locate_buffer(self, name: str) -> tuple[nn.Module, str]:
        """Return the owner of a buffer, and the attribute that holds it."""
        inside = f"loss.{name.removeprefix(LOSS)}" if name.startswith(LOSS) else f"model.{name}"
        owner, _, last = inside.rpartition(".")
        return self.get_submodule(owner), last

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.task.autocast is None:
            return self._measure(values)
        # here and not around the capture: torch then leaves backward as autograd writes it
        with torch.autocast("cpu", self.task.autocast):
            measured = self._measure(values)
        low = (torch.bfloat16, torch.float16)
        return tuple(value.float() if value.dtype in low else value for value in measured)

    def _measure(self, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        batch = dict(zip(self.fields, values, strict=True))
        output = self.task.output(batch, self.model)
        loss = self.task.loss_of(output, batch)
        buffers = (buffers_of(owner)[name] for owner, name in self.written)
        written = (value.detach().clone() for value in buffers if value is not None)
        return (loss, *(fn(output, batch) for fn in self.metric_fns), *written)


def result_names(metrics: Mapping[str, LossFn]) -> list[str]:
    """Return the names under which an evaluation reports metrics, in their order."""
    return [ROWS + name if made_of(fn, "of_rows") else name for name, fn in metrics.items()]


def made_of(metric: LossFn | None, attribute: str) -> Callable[..., float] | None:
    """Return the function that a metric has as an attribute, of_mean or of_rows, if it does."""
    function = getattr(metric, "func", metric)  # of a partial
    found: Callable[..., float] | None = getattr(function, attribute, None)
    return found


def own_loss(output: object) -> torch.Tensor:
    """Return the loss that a model computes: its output, or `loss` of that.

    Raise RecipeError if the output has none.
    """
    if isinstance(output, torch.Tensor):
        return output
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if not isinstance(loss, torch.Tensor):
        raise missing_loss_error(output)
    return loss


@dataclass(frozen=True, slots=True)
class Traced:
    """Forward and backward as torch captured them, before any rewrite.

    effects: what forward changes in Python and the graph does not.  Assigned buffers are not among
        them, as they are results of the graph.
    outside: tensors whose numbers the graph holds: neither parameters, buffers nor batch.
    """

    graph: LogicalGraph
    effects: tuple[Effect, ...] = ()
    outside: tuple[torch.Tensor, ...] = ()


def capture(task: Task, batch: Batch) -> LogicalGraph:
    """Return the training graph of one micro-batch.

    batch: example tensors, dim 0 = samples of one micro-batch; only shapes and dtypes are used.
    The result lists the gradient of each parameter in `results` as ("grad/<parameter>", tensor);
    the gradient of the loss is a feed named "@tangent".  Raise RecipeError if the module cannot be
    captured.
    """
    return rewrite_trace(trace(task, batch), task)


def trace(task: Task, batch: Batch) -> Traced:
    """Return the first half of `capture`, which engine/capture/check compares with the module."""
    task.model.train()
    task.check_names()
    check_modules(task.modules, task.tensors)
    traced = _trace(task, batch, {}, train=True)
    graph = apply_hooks(traced.graph, task.tensors)
    return replace(traced, graph=_require_gradients(graph, task))


def rewrite_trace(traced: Traced, task: Task) -> LogicalGraph:
    """Return the second half of `capture`: the traced graph in the engine's own ops."""
    graph = seed_random_ops(assign_buffers(traced.graph), task.seed)
    return _renumber_moments(check_ranges(simplify(graph, keep_logits=task.keep_logits)))


def capture_evaluation(task: Task, batch: Batch) -> LogicalGraph:
    """Return the evaluation graph of one micro-batch: forward only, with modules in eval mode.

    task: the module, whose training modes are restored.  batch: as in `capture`.  The results are
    "loss" and the name of each metric.  Raise RecipeError if the module cannot be captured.
    """
    modes = {module: module.training for module in task.modules.values()}
    for module in modes:
        module.eval()
    try:
        return rewrite_trace(_trace(task, batch, dict(task.metrics or {}), train=False), task)
    except RecipeError as error:
        program = CapturedModule(task, tuple(batch), {})
        raise explain_evaluation(error, program, tuple(batch.values())) from error
    finally:
        for module, mode in modes.items():
            module.train(mode or module is task.model)


def _renumber_moments(graph: LogicalGraph) -> LogicalGraph:
    """Count moments from 0: torch counts all captures of a process, which no graph may show."""
    moments = sorted({op.moment for op in graph.ops if op.moment >= 0})
    place = {moment: k for k, moment in enumerate(moments)} | {-1: -1}
    return replace(graph, ops=tuple(replace(op, moment=place[op.moment]) for op in graph.ops))


def _trace(task: Task, batch: Batch, metrics: Mapping[str, LossFn], *, train: bool) -> Traced:
    """Trace forward, and backward if `train`: few of many equal blocks; all, with a note, if the
    others cannot be derived.
    """
    blocks_of = partial(_trace_blocks, task, batch, metrics, train=train)
    if runs := find_runs(task.model):
        with contextlib.suppress(
            FlowrunError, UnlikeError
        ):  # the trace of all finds it, or another
            return blocks_of(runs)
    try:
        try:
            return blocks_of()
        except UnlikeError as unlike:
            traced = blocks_of(folded=False)
            note = f"equal blocks are captured one by one: {unlike}"
            return replace(traced, graph=replace(traced.graph, notes=(*traced.graph.notes, note)))
    except UnfollowedError as first:
        try:
            return _trace_in_python(task, batch, metrics, first, train=train)
        except Exception as second:
            program, name = CapturedModule(task, tuple(batch), metrics), type(task.model).__name__
            values = tuple(batch.values())
            with silence_logs():
                error = explain_failure(first, second, program, values, name, train=train)
            raise error from first.reason


def _trace_in_python(
    task: Task, batch: Batch, metrics: Mapping[str, LossFn], first: UnfollowedError, *, train: bool
) -> Traced:
    """Trace a model while Python runs it.  first: says where Dynamo stopped."""
    make = partial(CapturedModule, task, tuple(batch), metrics)
    with _prepare(task), torch.set_grad_enabled(train):
        traced = run_in_python(make, tuple(batch.values()), task.tensors, train)
        view_elements(traced.joint.graph)
    graph = _make_reader(task, batch, metrics, traced.written, train).read(traced.joint)
    graph = with_buffers(graph, {name: task.tensors[name] for name in traced.written})
    written = {k.removeprefix(WRITES) for k, _ in graph.results if k.startswith(WRITES)}
    kept = keep_used(graph, written, traced.asked)
    note = f"captured while Python ran forward, as Dynamo stops at {place(first.frames) or 'it'}"
    notes = (*graph.notes, note, *traced.notes)
    return Traced(replace(graph, variables=kept, notes=notes))


def _make_reader(
    task: Task, batch: Batch, metrics: Mapping[str, LossFn], written: Iterable[str], train: bool
) -> JointGraph:
    results = ("loss", *result_names(metrics), *(f"{WRITES}{name}" for name in written))
    return JointGraph(tuple(batch), results, task.first_names, train, task.run_checks)


def _prepare(task: Task) -> contextlib.AbstractContextManager[None]:
    return prepare_tracing(
        task.modules.values(),
        narrow=task.narrow_residual,
        decomposed_attention=task.decomposed_attention,
        low_precision_attention=task.low_precision_attention,
    )


def _trace_blocks(
    task: Task,
    batch: Batch,
    metrics: Mapping[str, LossFn],
    runs: tuple[AbsentBlocks, ...] = (),
    *,
    train: bool,
    folded: bool = True,
) -> Traced:
    """Trace a model; raise UnlikeError if blocks are not as equal as they seemed.

    runs: blocks that torch does not trace.  folded: of those that it does, few go through autograd.
    """
    values, tensors = tuple(batch.values()), task.tensors
    folds: tuple[Fold, ...] = ()
    graphs: list[torch.fx.Graph] = []

    def refuse(error: Exception) -> FlowrunError:
        return UnfollowedError(error, graphs[0] if graphs else None)

    with (
        refuse_as(refuse),
        _prepare(task),
        contextlib.ExitStack() as stack,
        torch.set_grad_enabled(train),
    ):
        stack.enter_context(leave_out(task.model, runs))
        traced, effects, written = _trace_forward(task, batch, metrics, return_writes=train)
        graphs.append(traced.graph)
        replace_calls(traced)
        entering, outside = sort_inputs(traced.graph, values, tensors)
        if folded:
            absent = {f"{run.blocks}.{number}" for run in runs for number in run.absent}
            folds = fold(traced.graph, entering, absent)
        joint = trace_joint(stack, traced, values)
        view_elements(joint.graph_module.graph)
    graph = _make_reader(task, batch, metrics, written, train).read(joint.graph_module)
    if runs and (effects or not are_folded(runs, folds)):
        raise UnlikeError("blocks that torch did not trace are not called alike")
    for each in folds:
        graph = unfold(graph, each)
    graph = with_buffers(graph, {name: tensors[name] for name in written})
    return Traced(graph, effects, outside)


def _trace_forward(
    task: Task, batch: Batch, metrics: Mapping[str, LossFn], *, return_writes: bool
) -> tuple[torch.fx.GraphModule, tuple[Effect, ...], tuple[str, ...]]:
    """Return (torch's graph before autograd, effects of forward in Python, written buffers).

    return_writes: a graph whose forward assigns buffers is traced again to return them.  The
    buffers are given by name, and are not among the effects.
    """
    written: tuple[str, ...] = ()
    for _ in range(2):
        program = CapturedModule(task, tuple(batch), metrics, written)
        with record_effects() as effects:
            traced = trace_forward(program, tuple(batch.values()))
        assigned = {id(e.owner) for e in effects} & {id(buffers_of(m)) for m in program.modules()}
        rest = tuple(effect for effect in effects if id(effect.owner) not in assigned)
        if written or not return_writes or not assigned:
            break
        written = tuple(_buffers_in(task, assigned))
    return traced, rest, written


def _buffers_in(task: Task, owners: Collection[int]) -> Iterator[str]:
    """Yield the names of the buffers of modules whose dict of buffers has one of these ids."""
    for prefix, module in task.modules.items():
        for path, each in module.named_modules():
            if id(buffers_of(each)) in owners:
                names = [name for name, buffer in buffers_of(each).items() if buffer is not None]
                yield from (prefix + f"{path}.{name}".lstrip(".") for name in names)


def _require_gradients(graph: LogicalGraph, task: Task) -> LogicalGraph:
    """Add a note that names parameters without a gradient; raise RecipeError if all are."""
    trained = [name for name, parameter in task.parameters.items() if parameter.requires_grad]
    results = dict(graph.results)
    without = [name for name in trained if f"grad/{name}" not in results]
    if len(without) == len(trained):
        frozen = "" if trained else " All parameters are frozen (requires_grad is False)."
        raise RecipeError(
            "model" if task.loss is None else "task.loss",
            "there is nothing to train: no parameter gets a gradient from the loss. torch says:"
            f" element 0 of tensors does not require grad and does not have a grad_fn.{frozen}",
            "Look for .detach(), torch.no_grad(), .item(), argmax or rounding between the"
            " parameters and the loss.",
        )
    if not without:
        return graph
    some = ", ".join(without[:3]) + (" …" if without[3:] else "")
    note = f"{len(without)} of {len(trained)} parameters get no gradient and stay: {some}"
    return replace(graph, notes=(*graph.notes, note))
