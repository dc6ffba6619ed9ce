"""check: the captured step beside the module itself, called twice with autograd."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flowrun.engine.capture.buffers import WRITES
from flowrun.engine.capture.capture import Batch, CapturedModule, Task, Traced
from flowrun.engine.capture.capture_errors import said_by
from flowrun.engine.capture.check.draws import Draws
from flowrun.engine.capture.check.interpret import interpret
from flowrun.engine.capture.check.state import EffectState, has_changed, state_of, tensors_read
from flowrun.engine.capture.module_checks import place_of_function
from flowrun.engine.capture.side_effects import Effect
from flowrun.engine.cost.op_cost import op_flops
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ops.traits import is_random, is_view
from flowrun.engine.user_code import place_of

MOST_FLOPS = 2e10  # of a micro-batch, forward and backward: about a second of one core
MOST_ELEMENTS = 4e8  # that all ops of it make
MEMORY_SHARE = 0.5  # of what is free
_KEY = "engine.check_capture"
# Relative to the norm.  The captured graph runs the ops that the module runs; where torch captures
# another formula, or another order of a sum, numbers differ by some roundings.
_TOLERANCE = {8: 1e-6, 4: 1e-4, 2: 5e-2}  # bytes of the narrowest type that computes
_NOISE = 0.03  # of the tolerance, of all gradients: what is left of a gradient that cancels out
_OF_ANY_BATCH = (NotImplementedError, RuntimeError, TypeError)  # not a class below: of values
_CHANGE = 1.01  # between the calls, as an update would change weights


def why_unchecked(graph: LogicalGraph) -> str:
    """Why a graph is too large to be run here; "" if it is not."""
    flops = elements = num_bytes = 0.0
    for op in graph.ops:
        if not is_view(op.target):
            read = [graph.tensors[name].shape for name in op.inputs]
            made = [name and graph.tensors[name] for name in op.outputs]
            flops += op_flops(op, read, [tensor.shape if tensor else None for tensor in made])
            elements += sum(tensor.num_elements for tensor in made if tensor)
            num_bytes += sum(tensor.num_bytes for tensor in made if tensor)
    held = sum(graph.tensors[v.tensor].num_bytes for v in graph.variables)
    if flops > MOST_FLOPS or elements > MOST_ELEMENTS:
        return f"a micro-batch takes {flops / 1e9:,.0f} Gflop, more than a second here"
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 3 * held + 2 * num_bytes > MEMORY_SHARE * free:
        return f"it takes {(3 * held + 2 * num_bytes) / 1e9:,.1f} GB"
    return ""


def check_capture(
    task: Task,
    batches: Sequence[Batch],
    traced: Traced,
    values: Mapping[str, Tensor],
    *,
    here: bool = True,
) -> str:
    """Raises RecipeError where the captured graph is not what the module computes.

    batches: two micro-batches.  values: of every parameter and buffer.  here: the model trains on
    the CPU, as it is called here.  The modules are changed: call it in a process of its own.
    Returns why nothing could be compared, or "".
    """
    if why := why_unchecked(traced.graph):
        _check_state(task, batches, traced.effects)
        return why
    for name, tensor in task.tensors.items():
        tensor.data = values[name]
    return _CaptureComparison(task, batches, traced, here).run()


def _check_state(task: Task, batches: Sequence[Batch], effects: Sequence[Effect]) -> None:
    """What two calls change in Python, without values of tensors."""
    if not effects:
        return
    from torch._subclasses import FakeTensorMode

    program = CapturedModule(task, tuple(batches[0]), {})
    states = [state_of(effects)]
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
        for batch in batches:
            try:
                program(*(fake.from_tensor(value) for value in batch.values()))
            except Exception:  # what looks at values
                return
            states.append(state_of(effects))
    _refuse_changes(effects, states)


def _refuse_changes(effects: Sequence[Effect], states: Sequence[EffectState]) -> None:
    """Raises RecipeError for what each call changes; a cache is built by the first alone."""
    before, once, twice = states
    for (k, attribute), value in twice.items():
        flips = attribute == "training" and before[k, attribute] != once[k, attribute]
        if value != once[k, attribute] or flips:
            raise RecipeError("model", *_why_changes(effects[k], attribute, flips))


def _why_changes(effect: Effect, attribute: str, flips: bool) -> tuple[str, str]:
    where = f" ({effect.place})" if effect.place else ""
    what = f"forward changes {effect.name(attribute)}{where}"
    if flips:
        return (
            f"{what}: the next call runs in another mode.",
            "Set modes outside of forward: override train(), or call .eval() in it on a part that"
            " stays so.",
        )
    return (
        f"{what} with every call, in Python: what was captured would do in every step what it does"
        " in the first.",
        "Count in a buffer (self.register_buffer('steps', torch.zeros((), dtype=torch.long)) in"
        " __init__, self.steps += 1 in forward) and choose with torch.where. What is only read by"
        " people: keep it out of forward.",
    )


@dataclass(frozen=True, slots=True)
class _StepResult:
    """Loss, gradients by parameter, buffers by name."""

    loss: Tensor
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Each with a name for a person."""
        yield "the loss", self.loss
        for name, value in self.buffers.items():
            yield f"buffer {name}", value
        for name, value in self.gradients.items():
            yield f"the gradient of {name}", value


class _CaptureComparison:
    """Calls module and graph in turn."""

    def __init__(self, task: Task, batches: Sequence[Batch], traced: Traced, here: bool) -> None:
        self.task = task
        self.here = here
        self.batches = batches
        self.graph = traced.graph
        self.effects = traced.effects
        self.program = CapturedModule(task, tuple(batches[0]), {})
        self.tensors = task.tensors
        self.parameters = {n: t for n, t in self.tensors.items() if isinstance(t, nn.Parameter)}
        self.buffers = {n: t.clone() for n, t in self.tensors.items() if n not in self.parameters}
        self.held = tensors_read(traced.effects, traced.outside)
        self.draws = any(is_random(op.target) for op in self.graph.ops)

    def run(self) -> str:
        states = [state_of(self.effects)]
        differences: list[tuple[str, str]] = []
        for call, batch in enumerate(self.batches):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(call)
                try:
                    module = self._call_module(batch)
                except RecipeError:
                    raise
                except Exception as error:
                    return self._failed(error, call)
                torch.manual_seed(call)
                captured = self._call_graph(batch)
            states.append(state_of(self.effects))
            differences.append(self._difference(module, captured))
            with torch.no_grad():
                for parameter in self.parameters.values():
                    if parameter.requires_grad:
                        parameter.mul_(_CHANGE)
        _refuse_changes(self.effects, states)
        for key, before in self.held.items():
            if has_changed(self.effects, key, before):
                raise RecipeError("model", *_why_changes(self.effects[key[0]], key[1], False))
        for call, (name, difference) in enumerate(differences):
            if difference:
                raise RecipeError("model", *self._why_differs(name, difference, call))
        return ""

    def _call_module(self, batch: Batch) -> _StepResult:
        with self._drawing():
            with self._gradients_stay():
                loss = self.program(*batch.values())[0]
            loss.backward()
        after = self.task.tensors
        return _StepResult(
            loss.detach(),
            {n: p.grad.to_dense() for n, p in self.parameters.items() if p.grad is not None},
            {name: after[name].detach().clone() for name in self.buffers if name in after},
        )

    @contextlib.contextmanager
    def _gradients_stay(self) -> Iterator[None]:
        """Within, parameters have a gradient, as behind an earlier micro-batch.  Raises RecipeError
        if it is another one at the end; then there is none.
        """
        trained = {n: p for n, p in self.parameters.items() if p.requires_grad}
        for parameter in trained.values():
            parameter.grad = torch.ones_like(parameter)
        before = {
            name: (p.grad, p.grad._version) for name, p in trained.items() if p.grad is not None
        }
        try:
            yield
            for name, (gradient, version) in before.items():
                if trained[name].grad is not gradient or gradient._version != version:
                    raise RecipeError(
                        "model",
                        f"forward changes the gradient of {name} (zero_grad, or .grad), which holds"
                        " what earlier micro-batches of the step have added.",
                        "Leave gradients to the training: take it out of forward.",
                    )
        finally:
            for parameter in self.parameters.values():
                parameter.grad = None

    def _call_graph(self, batch: Batch) -> _StepResult:
        with self._drawing():
            made = interpret(self.graph, {**self.parameters, **self.buffers}, batch)
        for name in self.buffers:
            if f"{WRITES}{name}" in made:
                self.buffers[name].copy_(made[f"{WRITES}{name}"])
        gradients = {
            key.removeprefix("grad/"): value for key, value in made.items() if key[:5] == "grad/"
        }
        return _StepResult(made["loss"], gradients, {n: b.clone() for n, b in self.buffers.items()})

    def _drawing(self) -> contextlib.AbstractContextManager[object]:
        return Draws() if self.draws else contextlib.nullcontext()

    # ------------------------------------------------------------------ what differs

    @property
    def _tolerance(self) -> float:
        dtypes = {t.dtype for t in self.graph.tensors.values() if _computes(t.dtype)}
        return _TOLERANCE[min((d.itemsize // (1 + d.is_complex) for d in dtypes), default=4)]

    def _difference(self, module: _StepResult, captured: _StepResult) -> tuple[str, str]:
        """(the parameter whose gradient differs, or "", what differs most, or "")."""
        most, which, what = 1.0, "", ""
        others = dict(captured.items())
        all_gradients = math.hypot(*map(_norm, module.gradients.values()))
        for name, value in module.items():
            floor = _NOISE * all_gradients if name.startswith("the gradient") else 0.0
            if name not in others:
                apart = _norm(value)
                share = math.inf if apart > self._tolerance * floor else 0.0
            else:
                apart = _apart(value, others[name])
                share = apart / (self._tolerance * max(_norm(value), floor, 1e-30))
            if apart and share > most:
                most, what = share, _described(name, apart, _norm(value))
                which = name.removeprefix("the gradient of ")
        for name, value in captured.gradients.items():
            if name not in module.gradients and _norm(value):
                return name, f"plain torch has no gradient of {name}"
        return which, what

    def _why_differs(self, name: str, difference: str, call: int) -> tuple[str, str]:
        when = "the second time, after a change of weights" if call else "the first time"
        parameter = self.parameters.get(name)
        if parameter is not None and parameter._backward_hooks:
            hook = next(iter(parameter._backward_hooks.values()))
            problem = (
                f"the hook on the gradient of {name} ({place_of_function(hook)}) depends on more"
            )
            problem += f" than the gradient: {when} {difference}."
            return problem, "A hook must be a function of the gradient alone."
        written = ", ".join(
            effect.name(attribute) + (f" ({effect.place})" if effect.place else "")
            for effect in self.effects
            for attribute in effect.attributes or ("",)
        )
        because = f" Forward writes to {written}." if written else ""
        return (
            "what torch captured of the model is not what the model computes when it is called"
            f" {when}: {difference}.{because}",
            "What lasts from call to call belongs in a buffer, what is made of weights is made in"
            f" forward. {_KEY}=false trains what was captured all the same.",
        )

    def _failed(self, error: Exception, call: int) -> str:
        """Why nothing could be compared.  Raises RecipeError for what the second call cannot, and
        for what no step could that runs where this one does: values of the batch do not matter to
        it.
        """
        what = said_by(error)
        place = place_of(error)
        at = f" ({place})" if place else ""
        if call and not isinstance(error, (IndexError, ValueError)):
            raise RecipeError(
                "model",
                f"the model's second call fails in plain torch: {what}{at}",
                "What forward keeps from a call must be detached (x.detach()).",
            )
        if self.here and type(error) in _OF_ANY_BATCH and "alloc" not in what:
            raise RecipeError("model", f"the model fails in plain torch, too: {what}{at}")
        return f"plain torch fails in a call of the model: {what}"


def _computes(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _norm(x: Tensor) -> float:
    """Of all that is finite."""
    if x.is_complex():
        x = torch.view_as_real(x)
    return float(x.double().nan_to_num(0.0, 0.0, 0.0).norm())


def _apart(one: Tensor, other: Tensor) -> float:
    """Norm of the difference; where one is not finite the other must be the same."""
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


def _described(name: str, apart: float, norm: float) -> str:
    if not math.isfinite(apart):
        return f"{name} has another shape, dtype or infinite values"
    return f"{name} differs by {apart / norm:.2g} of its norm" if norm else f"{name} is not 0"
