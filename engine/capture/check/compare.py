"""compare: the captured step against the module itself, called twice with autograd."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrun.engine.capture.buffers import WRITES
from flowrun.engine.capture.capture import Batch, CapturedModule, Task, Traced
from flowrun.engine.capture.capture_errors import MODES, describe_error, explain_plain_failure
from flowrun.engine.capture.check.draws import Draws
from flowrun.engine.capture.check.interpret import interpret
from flowrun.engine.capture.check.state import (
    EffectState,
    copy_outside_tensors,
    has_changed,
    take_snapshot,
)
from flowrun.engine.capture.module_checks import place_of_function
from flowrun.engine.capture.patches.substitutes import narrow_residual
from flowrun.engine.capture.side_effects import Effect
from flowrun.engine.cost.op_cost import SizedOp
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ir.user_code import place_of
from flowrun.engine.ops.traits import is_random, is_view
from flowrun.engine.torch_internals import FakeTensorMode, gradient_hooks, version_of

MAX_FLOPS = 2e10  # forward and backward of a micro-batch: about a second of one core
MAX_ELEMENTS = 4e8  # elements that all ops of a micro-batch make
MAX_MEMORY_SHARE = 0.5  # share of the free memory
_KEY = "engine.check_capture"
# bytes of the narrowest dtype that computes -> tolerance relative to the norm.  The captured graph
# runs the module's ops; another formula or order of a sum in torch's graph changes some roundings.
_TOLERANCE = {8: 1e-6, 4: 1e-4, 2: 5e-2, 1: 1e-1}
_NOISE_SHARE = 0.03  # of the norm of all gradients: rounding errors of a gradient that cancels out
_ERRORS_OF_ANY_BATCH = (NotImplementedError, RuntimeError, TypeError)  # subclasses depend on values
_WEIGHT_FACTOR = 1.01  # weights are multiplied by it between the calls, in the place of an update


def explain_size_limit(graph: LogicalGraph) -> str:
    """Return why a graph is too large to be run here; "" if it is not."""
    ops = [op for op in graph.ops if not is_view(op.target)]
    outputs = [graph.tensors[name] for op in ops for name in op.makes]
    elements = sum(tensor.num_elements for tensor in outputs)
    num_bytes = sum(tensor.num_bytes for tensor in outputs)
    flops = sum(SizedOp.whole(op, graph.tensors).flops for op in ops)
    held = sum(graph.tensors[v.tensor].num_bytes for v in graph.variables)
    if flops > MAX_FLOPS or elements > MAX_ELEMENTS:
        return f"a micro-batch takes {flops / 1e9:,.0f} Gflop, more than a second here"
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 3 * held + 2 * num_bytes > MAX_MEMORY_SHARE * free:
        return f"it takes {(3 * held + 2 * num_bytes) / 1e9:,.1f} GB"
    return ""


def check_capture(
    task: Task,
    batches: Sequence[Batch],
    traced: Traced,
    values: Mapping[str, Tensor],
    *,
    on_cpu: bool = True,
) -> str:
    """Compare the captured graph with the module; return "", or why they could not be compared.

    task: the module, which is changed: call this in a process of its own.  batches: two
    micro-batches.  values: name -> value of every parameter and buffer.  on_cpu: the model trains
    on the CPU, where it is called here.  Raise RecipeError if loss, gradients or buffers differ, or
    if each call changes an object in Python.
    """
    if why := explain_size_limit(traced.graph):
        _check_state(task, batches, traced.effects)
        return why
    for name, tensor in task.tensors.items():
        tensor.data = values[name]
    return _CaptureComparison(task, batches, traced, on_cpu).run()


def _check_state(task: Task, batches: Sequence[Batch], effects: Sequence[Effect]) -> None:
    """Raise RecipeError for what each of two calls changes in Python; tensors have no numbers."""
    if not effects:
        return
    program = CapturedModule(task, tuple(batches[0]), {})
    states = [take_snapshot(effects)]
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
        for batch in batches:
            try:
                program(*(fake.from_tensor(value) for value in batch.values()))
            except Exception:  # the model looks at values
                return
            states.append(take_snapshot(effects))
    _refuse_changes(effects, states)


def _refuse_changes(effects: Sequence[Effect], states: Sequence[EffectState]) -> None:
    """Raise RecipeError for what each call changes; the first alone may fill a cache."""
    before, once, twice = states
    for (k, attribute), value in twice.items():
        flips = attribute == "training" and before[k, attribute] != once[k, attribute]
        if value != once[k, attribute] or flips:
            raise RecipeError("model", *_explain_change(effects[k], attribute, flips))


def _explain_change(effect: Effect, attribute: str, flips: bool) -> tuple[str, str]:
    what = f"forward changes {_describe_effect(effect, attribute)}"
    if flips:
        return (f"{what}: the next call runs in another mode.", MODES)
    return (
        f"{what} with every call, in Python: the captured graph would repeat in every step what the"
        " first call does.",
        "Count in a buffer (self.register_buffer('steps', torch.zeros((), dtype=torch.long)) in"
        " __init__, self.steps += 1 in forward) and choose with torch.where. Keep values that only"
        " people read out of forward.",
    )


def _describe_effect(effect: Effect, attribute: str) -> str:
    return effect.describe(attribute) + (f" ({effect.place})" if effect.place else "")


@dataclass(frozen=True, slots=True)
class _StepResult:
    """The results of one call: loss, gradients by parameter, buffers by name."""

    loss: Tensor
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each value with words for it."""
        yield "the loss", self.loss
        for name, value in self.buffers.items():
            yield f"buffer {name}", value
        for name, value in self.gradients.items():
            yield f"the gradient of {name}", value


class _CaptureComparison:
    """A comparison of module and graph, which are called in turn."""

    def __init__(self, task: Task, batches: Sequence[Batch], traced: Traced, on_cpu: bool) -> None:
        self.task = task
        self.on_cpu = on_cpu
        self.batches = batches
        self.graph = traced.graph
        self.effects = traced.effects
        self.program = CapturedModule(task, tuple(batches[0]), {})
        self.tensors = task.tensors
        results = {key for key, _ in self.graph.results}
        self.parameters = {  # frozen ones that forward writes are state, as buffers are
            name: tensor
            for name, tensor in task.parameters.items()
            if f"{WRITES}{name}" not in results
        }
        self.buffers = {n: t.clone() for n, t in self.tensors.items() if n not in self.parameters}
        self.saved = _saved_names(task)
        self.held = copy_outside_tensors(traced.effects, traced.outside)
        self.draws = any(is_random(op.target) for op in self.graph.ops)

    def run(self) -> str:
        """Return "", or why nothing could be compared; raise RecipeError for a difference."""
        states = [take_snapshot(self.effects)]
        differences: list[tuple[str, str]] = []
        for call, batch in enumerate(self.batches):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(call)
                try:
                    module = self._call_module(batch)
                except RecipeError:
                    raise
                except Exception as error:
                    return self._explain_failure(error, call)
                torch.manual_seed(call)
                captured = self._call_graph(batch)
            states.append(take_snapshot(self.effects))
            differences.append(self._difference(module, captured))
            with torch.no_grad():
                for parameter in self.parameters.values():
                    if parameter.requires_grad:
                        parameter.mul_(_WEIGHT_FACTOR)
        _refuse_changes(self.effects, states)
        for key, before in self.held.items():
            if has_changed(self.effects, key, before):
                raise RecipeError("model", *_explain_change(self.effects[key[0]], key[1], False))
        for call, (name, difference) in enumerate(differences):
            if difference:
                raise RecipeError("model", *self._explain_difference(name, difference, call))
        return ""

    def _call_module(self, batch: Batch) -> _StepResult:
        with self._draw_alike():
            with self._protect_gradients(), narrow_residual(self.task.narrow_residual):
                loss = self.program(*batch.values())[0]
            loss.backward()
        if new := _saved_names(self.task) - self.saved:
            raise RecipeError(
                "model",
                f"forward registers {min(new)} in its first call: the graph has it as a constant, "
                "and saved weights would lack it.",
                "Register it in __init__; with persistent=False forward may, as nothing saves it.",
            )
        after = self.task.tensors
        return _StepResult(
            loss.detach(),
            {n: p.grad.to_dense() for n, p in self.parameters.items() if p.grad is not None},
            {name: after[name].detach().clone() for name in self.buffers if name in after},
        )

    @contextlib.contextmanager
    def _protect_gradients(self) -> Iterator[None]:
        """Within the block, give parameters a gradient, as an earlier micro-batch would.

        Raise RecipeError if the block changes it; afterwards there is none.
        """
        trained = {n: p for n, p in self.parameters.items() if p.requires_grad}
        for parameter in trained.values():
            parameter.grad = torch.ones_like(parameter)
        before = {n: (p.grad, version_of(p.grad)) for n, p in trained.items() if p.grad is not None}
        try:
            yield
            for name, (gradient, version) in before.items():
                if trained[name].grad is not gradient or version_of(gradient) != version:
                    raise RecipeError(
                        "model",
                        f"forward changes the gradient of {name} (zero_grad, or .grad), which holds"
                        " the sum over earlier micro-batches of the step.",
                        "Remove it from forward; the training handles gradients.",
                    )
        finally:
            for parameter in self.parameters.values():
                parameter.grad = None

    def _call_graph(self, batch: Batch) -> _StepResult:
        with self._draw_alike():
            results = interpret(self.graph, {**self.parameters, **self.buffers}, batch)
        for name in self.buffers:
            if f"{WRITES}{name}" in results:
                self.buffers[name].copy_(results[f"{WRITES}{name}"])
        grads = {key[5:]: value for key, value in results.items() if key.startswith("grad/")}
        return _StepResult(results["loss"], grads, {n: b.clone() for n, b in self.buffers.items()})

    def _draw_alike(self) -> contextlib.AbstractContextManager[object]:
        return Draws() if self.draws else contextlib.nullcontext()

    # ------------------------------------------------------------------ what differs

    @property
    def _tolerance(self) -> float:
        dtypes = {t.dtype for t in self.graph.tensors.values() if _computes(t.dtype)}
        return _TOLERANCE[min((d.itemsize // (1 + d.is_complex) for d in dtypes), default=4)]

    def _difference(self, module: _StepResult, captured: _StepResult) -> tuple[str, str]:
        """Return what differs most: (the parameter if it is a gradient, words for it), or ""s."""
        most, which, what = 1.0, "", ""
        others = dict(captured.items())
        all_gradients = math.hypot(*map(_norm, module.gradients.values()))
        for name, value in module.items():
            floor = _NOISE_SHARE * all_gradients if name.startswith("the gradient") else 0.0
            distance, norm = _norm(value), _norm(value)
            share = math.inf if distance > self._tolerance * floor else 0.0
            if name in others:
                distance = _distance(value, others[name])
                share = distance / (self._tolerance * max(norm, floor, 1e-30))
            if distance and share > most:
                most, what = share, _describe(name, distance, norm)
                which = name.removeprefix("the gradient of ")
        for name, value in captured.gradients.items():
            if name not in module.gradients and _norm(value):
                return name, f"plain torch has no gradient of {name}"
        return which, what

    def _explain_difference(self, name: str, difference: str, call: int) -> tuple[str, str]:
        when = "the second time, after a change of weights" if call else "the first time"
        parameter = self.parameters.get(name)
        if parameter is not None and gradient_hooks(parameter):
            hook = next(iter(gradient_hooks(parameter).values()))
            return (
                f"the hook on the gradient of {name} ({place_of_function(hook)}) depends on more"
                f" than the gradient: {when} {difference}.",
                "Let the hook depend on nothing but the gradient.",
            )
        written = ", ".join(
            _describe_effect(effect, attribute)
            for effect in self.effects
            for attribute in effect.attributes or ("",)
        )
        because = f" Forward writes to {written}." if written else ""
        return (
            "the graph that torch captured does not compute what the model computes when it is"
            f" called {when}: {difference}.{because}",
            "Keep state that lasts between calls in a buffer, and compute values that depend on"
            f" weights in forward. {_KEY}=false trains the captured graph nevertheless.",
        )

    def _explain_failure(self, error: Exception, call: int) -> str:
        """Return why nothing could be compared, from the error of the module's call.

        Raise RecipeError if only the second call fails, or if the error would end every step on
        this device, whatever the values of the batch.
        """
        what = describe_error(error)
        place = place_of(error)
        at = f" ({place})" if place else ""
        if call and not isinstance(error, (IndexError, ValueError)):
            raise RecipeError(
                "model",
                f"the model's second call fails in plain torch: {what}{at}",
                "What forward keeps from a call must be detached (x.detach()).",
            )
        if self.on_cpu and type(error) in _ERRORS_OF_ANY_BATCH and "alloc" not in what:
            raise explain_plain_failure(error, type(self.task.model).__name__)
        return f"plain torch fails in a call of the model: {what}"


def _saved_names(task: Task) -> set[str]:
    """Return the names of what plain torch saves of the model and the loss."""
    modules = task.modules.items()
    return {prefix + name for prefix, module in modules for name in module.state_dict()}


def _computes(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _norm(x: Tensor) -> float:
    """Return the norm over all finite elements."""
    if x.is_complex():
        x = torch.view_as_real(x)
    return float(x.double().nan_to_num(0.0, 0.0, 0.0).norm())


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference; infinity if elements that are not finite differ."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    one, other = one.double(), other.double()
    finite = one.isfinite() & other.isfinite()
    alike = (one == other) | (one.isnan() & other.isnan()) | finite
    if not bool(alike.all()):
        return math.inf
    return float(torch.where(finite, one - other, 0.0).norm())


def _describe(name: str, distance: float, norm: float) -> str:
    if not math.isfinite(distance):
        return f"{name} has another shape, dtype or other infinite values"
    return f"{name} differs by {distance / norm:.2g} of its norm" if norm else f"{name} is not 0"
