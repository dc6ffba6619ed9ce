"""capture: a torch module and the shapes of one micro-batch -> LogicalGraph (level "captured").

Relied upon of torch (tests/engine/capture/test_capture.py names each fact):
`dynamo_graph_capture_for_export` turns module and loss into one FX graph, whose `process_inputs`
gives what its placeholders stand for; `aot_export_joint_with_descriptors` turns that into one
functional ATen graph of forward and backward, which joint_graph.py reads.  These two files and
fold.py are the only ones that know torch's capture internals.

Of many equal blocks a few are handed to the second (fold.py); the others are put back behind it
(unfold.py).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
import torch.utils._triton
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowrun.engine.capture.buffers import WRITES, assign_buffers, with_buffers
from flowrun.engine.capture.capture_errors import no_loss, not_captured
from flowrun.engine.capture.fold import Fold, fold
from flowrun.engine.capture.gradient_hooks import apply_hooks
from flowrun.engine.capture.joint_graph import LOSS, JointGraph
from flowrun.engine.capture.module_checks import check_modules
from flowrun.engine.capture.parts import UnlikeError
from flowrun.engine.capture.random_ops import seed_random_ops
from flowrun.engine.capture.rewrites.check_ranges import check_ranges
from flowrun.engine.capture.rewrites.lookups import make_gradients_dense
from flowrun.engine.capture.rewrites.recurrent import decomposed_for_training
from flowrun.engine.capture.rewrites.simplify import simplify
from flowrun.engine.capture.rewrites.strided_views import view_elements
from flowrun.engine.capture.rewrites.substitutes import substituted
from flowrun.engine.capture.side_effects import Effect, recorded
from flowrun.engine.capture.unfold import unfold
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import LogicalGraph

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
    writes_attention: as products and a softmax, as software before fused kernels ran it; else one
        op, which each device has a kernel for (kernels/attention.py), where nothing is dropped.
    narrows_attention: products of written attention in the dtype of their inputs, as autocast has
        all others; torch widens bf16 and fp16 first, which costs a CPU little and a GPU much.
    seed: of what the module draws at random.
    keeps_logits: what cross entropy keeps for backward are logits (kept_logits.py); else, as torch
        and OneFlow do, probabilities.
    checks: asserts of the model on tensors run, and whatever else makes nothing; else they are left
        out.
    """

    model: nn.Module
    inputs: Mapping[str, str]
    loss: LossFn | None = None
    metrics: Mapping[str, LossFn] = ()  # type: ignore[assignment]
    _: KW_ONLY
    autocast: torch.dtype | None = None
    writes_attention: bool = False
    narrows_attention: bool = False
    seed: int = 0
    keeps_logits: bool = True
    checks: bool = False

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Prefix of names -> the modules whose parameters are trained: the model, and a loss that
        is a module.
        """
        of_loss = {LOSS: self.loss} if isinstance(self.loss, nn.Module) else {}
        return {"": self.model, **of_loss}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, a tied one by its first name: the model's own names, and those of
        the loss behind LOSS.
        """
        everything = self._all()
        return {name: everything[name] for name in dict.fromkeys(self.first_names.values())}

    def check_names(self) -> None:
        """Raises RecipeError if a tensor of the model has a name that means one of the loss."""
        names = itertools.chain(self.model.named_parameters(), self.model.named_buffers())
        if met := next((name for name, _ in names if name.startswith(LOSS)), None):
            raise RecipeError(
                "model",
                f"{met} has a name that means a tensor of task.loss.",
                f"Call the submodule otherwise than {LOSS.rstrip('.')}.",
            )

    def _all(self) -> dict[str, torch.Tensor]:
        """By every name."""
        return {
            prefix + name: tensor
            for kind in ("named_parameters", "named_buffers")
            for prefix, module in self.modules.items()
            for name, tensor in getattr(module, kind)(remove_duplicate=False)
        }

    @property
    def first_names(self) -> dict[str, str]:
        """Name of each parameter and buffer -> the first name of the same tensor: one where it is
        tied, as in `named_parameters()`; torch's graph lists every name and reads an arbitrary one.
        """
        first: dict[int, str] = {}
        return {name: first.setdefault(id(tensor), name) for name, tensor in self._all().items()}


class CapturedModule(nn.Module):
    """Model, loss and metrics as one module of positional tensors: what torch captures.

    written: names of buffers whose values behind forward are returned, too.
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
        self.written = tuple((self.get_submodule(o), n) for o, n in map(_owned, written))

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
        loss = self.loss(output, batch) if self.loss is not None else own_loss(output)
        buffers = (owner._buffers[name] for owner, name in self.written)
        written = (value.detach().clone() for value in buffers if value is not None)
        return (loss, *(fn(output, batch) for fn in self.metric_fns), *written)


def own_loss(output: Any) -> torch.Tensor:
    """The loss that a model makes itself: its output, or what that has of this name."""
    if isinstance(output, torch.Tensor):
        return output
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if not isinstance(loss, torch.Tensor):
        raise no_loss(output)
    return loss


def _owned(name: str) -> tuple[str, str]:
    """(path of the module in Program, its own name) of a buffer."""
    inside = f"loss.{name.removeprefix(LOSS)}" if name.startswith(LOSS) else f"model.{name}"
    owner, _, last = inside.rpartition(".")
    return owner, last


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


@dataclass(frozen=True, slots=True)
class Traced:
    """Forward and backward as torch captured them, before anything is rewritten.

    effects: what forward changes in Python, which the graph does not; assigned buffers are results
    of the graph and not among them.  outside: tensors that the graph reads beside parameters,
    buffers and the batch: it holds their numbers.
    """

    graph: LogicalGraph
    effects: tuple[Effect, ...] = ()
    outside: tuple[torch.Tensor, ...] = ()


def import_tracer() -> None:
    """Import what capture asks of torch, two seconds of it: in front of a fork that captures, too,
    so that one process does it and not each.
    """
    import torch._dynamo.functional_export
    import torch._functorch.aot_autograd  # noqa: F401


def capture(task: Task, batch: Batch) -> LogicalGraph:
    """The training graph of one micro-batch.

    batch: example tensors, dim 0 = samples of one micro-batch; only shapes and dtypes are used. The
    gradient of each parameter is listed in the result's `results` as ("grad/<parameter>", tensor);
    the tangent of the loss is a feed named "@tangent".  Raises RecipeError if the module cannot be
    captured.
    """
    return rewritten(trace(task, batch), task)


def trace(task: Task, batch: Batch) -> Traced:
    """The first half of `capture`: what capture_check.py compares with the module itself."""
    task.model.train()
    task.check_names()
    check_modules(task.modules, task.tensors)
    traced = _traced(task, batch, {}, train=True)
    return replace(traced, graph=_checked(apply_hooks(traced.graph, task.tensors), task))


def rewritten(traced: Traced, task: Task) -> LogicalGraph:
    """The second half of `capture`."""
    graph = seed_random_ops(assign_buffers(traced.graph), task.seed)
    return _numbered(check_ranges(simplify(graph, keeps_logits=task.keeps_logits)))


def capture_evaluation(task: Task, batch: Batch) -> LogicalGraph:
    """The evaluation graph of one micro-batch: forward only, modules in eval mode; results "loss"
    and one for each metric.
    """
    modes = {module: module.training for module in task.modules.values()}
    for module in modes:
        module.eval()
    try:
        traced = _traced(task, batch, dict(task.metrics or {}), train=False)
        return rewritten(traced, task)
    finally:
        for module, mode in modes.items():
            module.train(mode or module is task.model)


def _traced(task: Task, batch: Batch, metrics: Mapping[str, LossFn], *, train: bool) -> Traced:
    try:
        return _joint(task, batch, metrics, train=train, folds=True)
    except UnlikeError as unlike:
        traced = _joint(task, batch, metrics, train=train, folds=False)
        note = f"equal blocks are captured one by one: {unlike}"
        graph = replace(traced.graph, notes=(*traced.graph.notes, note))
        return replace(traced, graph=graph)


def _numbered(graph: LogicalGraph) -> LogicalGraph:
    """Moments from 0 up: torch counts through a process, and a graph is to be the same in all."""
    moments = sorted({op.moment for op in graph.ops if op.moment >= 0})
    place = {moment: k for k, moment in enumerate(moments)} | {-1: -1}
    return replace(graph, ops=tuple(replace(op, moment=place[op.moment]) for op in graph.ops))


def _joint(
    task: Task, batch: Batch, metrics: Mapping[str, LossFn], *, train: bool, folds: bool
) -> Traced:
    """Forward, and backward where it is training.  folds: equal blocks are captured once; raises
    UnlikeError where that cannot be.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    values, tensors = tuple(batch.values()), task.tensors
    folded: tuple[Fold, ...] = ()
    grad = contextlib.nullcontext() if train else torch.no_grad()
    try:
        with _without_gpus(), contextlib.ExitStack() as stack, grad, warnings.catch_warnings():
            if task.writes_attention:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if task.narrows_attention:
                stack.enter_context(_narrow_attention())
            warnings.simplefilter("ignore")
            stack.enter_context(torch._dynamo.config.patch(_dynamo_settings()))
            stack.enter_context(_quiet())
            stack.enter_context(_own_tensors(task.modules.values()))
            stack.enter_context(_plain_buffers(task.modules.values()))
            stack.enter_context(_leaves_within_forward())
            stack.enter_context(decomposed_for_training())
            stack.enter_context(substituted())
            traced, effects, written = _followed(task, batch, metrics, writes=train)
            make_gradients_dense(traced)
            entering = _entering(traced.graph, values, tensors)
            outside = _outside(traced.graph, values, entering)
            if folds:
                folded = fold(traced.graph, entering)
            joint = aot_export_joint_with_descriptors(stack, traced, values)
            view_elements(joint.graph_module.graph)
    except RecipeError:
        raise
    except Exception as error:
        program = CapturedModule(task, tuple(batch), metrics)
        with _quiet():
            refused = not_captured(error, program, values, type(task.model).__name__)
        raise refused from error
    results = ("loss", *metrics, *(f"{WRITES}{name}" for name in written))
    reader = JointGraph(tuple(batch), results, task.first_names, train, task.checks)
    graph = reader.read(joint.graph_module)
    for each in folded:
        graph = unfold(graph, each)
    graph = with_buffers(graph, {name: tensors[name] for name in written})
    return Traced(graph, effects, outside)


def _followed(
    task: Task, batch: Batch, metrics: Mapping[str, LossFn], *, writes: bool
) -> tuple[Any, tuple[Effect, ...], tuple[str, ...]]:
    """(torch's graph before autograd; what forward changes in Python; names of the buffers that it
    assigns, if `writes`: the graph returns these, too).
    """
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    written: tuple[str, ...] = ()
    for _ in range(2):
        torch._dynamo.reset()
        program = CapturedModule(task, tuple(batch), metrics, written)
        with recorded() as effects:
            traced: Any = dynamo_graph_capture_for_export(program)(*batch.values())
        assigned = {id(e.owner) for e in effects} & {id(m._buffers) for m in program.modules()}
        rest = tuple(effect for effect in effects if id(effect.owner) not in assigned)
        if written or not writes or not assigned:
            break
        written = tuple(
            prefix + ".".join(part for part in (path, name) if part)
            for prefix, module in task.modules.items()
            for path, each in module.named_modules()
            for name, tensor in each._buffers.items()
            if id(each._buffers) in assigned and tensor is not None
        )
    return traced, rest, written


@contextlib.contextmanager
def _own_tensors(modules: Iterable[nn.Module]) -> Iterator[None]:
    """At the end modules hold the tensors that they held: torch puts its own in their place while
    it captures, and leaves those where a module has two names.
    """
    held = [m._parameters for root in modules for m in root.modules()]
    held += [m._buffers for root in modules for m in root.modules()]  # type: ignore[misc]
    before = [dict(each) for each in held]
    try:
        yield
    finally:
        for each, tensors in zip(held, before, strict=True):
            each.update(tensors)


@contextlib.contextmanager
def _plain_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within, an `nn.Buffer` is a buffer by its place alone: of one that forward assigns anew,
    `self.steps += 1`, Dynamo's export cannot read the mark that nn.Buffer sets.
    """
    buffers = [b for root in modules for b in root.buffers() if hasattr(b, "_is_buffer")]
    for buffer in buffers:
        del buffer._is_buffer
    try:
        yield
    finally:
        for buffer in buffers:
            buffer._is_buffer = True  # type: ignore[attr-defined]


def _checked(graph: LogicalGraph, task: Task) -> LogicalGraph:
    """Raises RecipeError if no parameter gets a gradient; a note names those that get none."""
    trained = [
        n for n, t in task.tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad
    ]
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
    note = f"no gradient reaches {len(without)} of {len(trained)} parameters, which stay: {some}"
    return replace(graph, notes=(*graph.notes, note))


def _entering(
    graph: torch.fx.Graph, values: tuple[torch.Tensor, ...], tensors: Mapping[str, torch.Tensor]
) -> dict[torch.fx.Node, str]:
    """Placeholders of parameters and buffers, by the first name of each."""
    named = {id(tensor): name for name, tensor in tensors.items()}
    nodes = (node for node in graph.nodes if node.op == "placeholder")
    pairs = zip(nodes, graph.process_inputs(*values), strict=True)
    return {node: named[id(value)] for node, value in pairs if id(value) in named}


def _outside(
    graph: torch.fx.Graph, values: tuple[torch.Tensor, ...], entering: Mapping[torch.fx.Node, str]
) -> tuple[torch.Tensor, ...]:
    """Tensors that enter beside parameters, buffers and the batch."""
    nodes = (node for node in graph.nodes if node.op == "placeholder")
    pairs = zip(nodes, graph.process_inputs(*values), strict=True)  # type: ignore[operator]
    batch = {id(value) for value in values}
    return tuple(
        value
        for node, value in pairs
        if node not in entering and id(value) not in batch and isinstance(value, torch.Tensor)
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What torch logs while it captures is for its own developers; what failed is an error."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _without_gpus() -> Iterator[None]:
    """Capture runs on the CPU.  Dynamo would open CUDA to keep the state of its random numbers; it
    also asks for Triton, and torch keeps the answer.
    """
    before, torch.cuda.is_available = torch.cuda.is_available, lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = before
        for asked in vars(torch.utils._triton).values():
            if hasattr(asked, "cache_clear"):
                asked.cache_clear()


@contextlib.contextmanager
def _narrow_attention() -> Iterator[None]:
    """See Task.narrows_attention."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


@contextlib.contextmanager
def _leaves_within_forward() -> Iterator[None]:
    """A loss may come of a tensor for which forward calls requires_grad_().  Dynamo refuses that,
    for compiled code would return a tensor that does not know of it; here nothing is returned.
    """
    owner, name = (
        torch._dynamo.output_graph.OutputGraph,
        "_check_requires_grad_intermediate_outputs",
    )
    before = getattr(owner, name, None)
    if before is None:
        yield
        return
    setattr(owner, name, lambda *_: None)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _dynamo_settings() -> dict[str, Any]:
    """Recurrent layers and torch.autograd.grad in forward are captured as all else is (torch 2.11
    knows no key for the second).
    """
    wanted = {"ignore_logger_methods": _loggers(), "allow_rnn": True, "trace_autograd_ops": True}
    return {key: value for key, value in wanted.items() if hasattr(torch._dynamo.config, key)}


def _loggers() -> set[Callable[..., Any]]:
    """What a module may say while it runs, and capture leaves out; libraries add words of their
    own, such as warning_once.
    """
    words = ("debug", "info", "warn", "error", "exception", "critical", "fatal", "log")
    methods = vars(logging.Logger).items()
    found = {method for name, method in methods if name.startswith(words) and callable(method)}
    return found | {print, warnings.warn}
