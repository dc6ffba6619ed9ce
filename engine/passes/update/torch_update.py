"""torch_update: a class of torch.optim as an update function, which update_trace.py traces.

The class's own `step` runs on copies of a weight and of what it keeps, as torch.compile would run
it: no formula is written twice.  What it keeps is found by three steps of a small weight: tensors
and numbers in `state`, and numbers of its group that change; one that counts steps is `step`.
Relied on: it takes one weight, and computes with its count and its rate as tensors while torch says
that it compiles.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial, reduce
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from flowrun.engine.capture.update_trace import UpdateState
from flowrun.engine.ir.placement import Shape
from flowrun.engine.strategy import Settings
from flowrun.engine.torch_internals import compiling

_SWITCHES = {"foreach": False, "capturable": True}  # one weight; no branch on a tensor
NOT_NUMBERS = ("params", "lr", "differentiable", "fused", *_SWITCHES)
_SCALED = {"add": "alpha", "sub": "alpha", "addcdiv": "value", "addcmul": "value"}
_DIMS = (2, 3, 5, 7, 11, 13)  # of the small weight: no two alike, so those of a state say whose
_SCALES = (1.0, -0.75, 0.5)  # of its gradient in each step
_RATES = (0.01, 0.02)

_Key = tuple[str, str]  # ("state" or "group", key)
_HeldValues = dict[_Key, object]


@dataclass(frozen=True, slots=True)
class _Memory:
    """What a class keeps of a weight from step to step.

    states: by place, shaped as those of the small weight.  counts: numbers of steps, with what is
    added to `step` before a step.  constants: numbers that stay.  begins: the first step is
    another than later ones are from these states.
    """

    states: Mapping[_Key, UpdateState]
    counts: Mapping[_Key, float]
    constants: Mapping[_Key, object]
    begins: bool = False


@dataclass(frozen=True)
class TorchUpdate:
    """An update function: (param, grad, states …, *, lr, step, numbers …) -> (param, states …).

    kind: the class.  numbers: arguments of it, which decide on its states.
    """

    kind: type[Optimizer]
    numbers: Settings

    @property
    def __name__(self) -> str:
        return f"{self.kind.__module__.partition('.')[0]}.optim.{self.kind.__name__}"

    @cached_property
    def __signature__(self) -> inspect.Signature:
        at, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        plain = [inspect.Parameter(key, at) for key in ("param", "grad")]
        fed = [inspect.Parameter(key, named) for key in ("lr", "step")]
        given = [inspect.Parameter(key, named, default=value) for key, value in self.numbers]
        return inspect.Signature([*plain, *fed, *given])

    def states(self, shape: Shape) -> tuple[UpdateState, ...]:
        """Return the states of a weight.  Raises what the class does of one of this shape."""
        small = _DIMS[: len(shape)]
        whole = lambda dims: tuple(1 if n == 1 else shape[small.index(n)] for n in dims)  # noqa: E731
        return tuple(
            UpdateState(s.name, s.start, whole(s.shape))
            for s in _find_kept(self, len(shape)).states.values()
        )

    def __call__(
        self,
        param: Tensor,
        grad: Tensor,
        *states: Tensor,
        lr: Tensor,
        step: Tensor,
        **numbers: object,
    ) -> tuple[Tensor, ...]:
        """Return the new weight and the new states."""
        kept = _find_kept(self, param.dim())
        return self.apply(kept, (param, grad, lr, step, *states), numbers)

    def apply(
        self, kept: _Memory, given: Sequence[Tensor], numbers: Mapping[str, object]
    ) -> tuple[Tensor, ...]:
        """Return the new weight and states.  given: weight, gradient, rate, step, states."""

        def run(*given: Tensor) -> tuple[Tensor, ...]:
            later = self._step(kept, given, numbers)
            if not kept.begins:
                return later
            first, is_first = self._step(kept, given, numbers, begins=True), given[3] == 1
            return tuple(torch.where(is_first, *each) for each in zip(first, later, strict=True))

        param, grad, lr, step, *states = given
        # numbers of 64 bits, as Python's are
        made = torch.func.functionalize(run)(param, grad, lr.double(), step.double(), *states)
        return made  # type: ignore[no-any-return]

    def _step(
        self,
        kept: _Memory,
        given: Sequence[Tensor],
        numbers: Mapping[str, object],
        begins: bool = False,
    ) -> tuple[Tensor, ...]:
        param, grad, lr, step, *states = given
        with compiling(), torch.no_grad(), _number_functions(self.kind), _TensorNumbers():
            weight = param.clone()
            weight.grad = grad
            optimizer = self._make(weight, numbers)
            holds = {"state": optimizer.state[weight], "group": optimizer.param_groups[0]}
            holds["group"]["lr"] = lr
            if not begins:
                held: _HeldValues = {
                    at: x.clone() for at, x in zip(kept.states, states, strict=True)
                }
                held |= {at: step + before for at, before in kept.counts.items()}
                for (where, key), x in (held | dict(kept.constants)).items():
                    holds[where][key] = x
            try:
                inspect.unwrap(self.kind.step)(optimizer)
            except KeyError as error:
                raise ValueError(f"with these numbers it has a state {error}, too") from error
        known = {key for _, key in (*kept.states, *kept.counts, *kept.constants)}
        if more := {k for k, x in holds["state"].items() if x is not None} - known:
            raise ValueError(f"with these numbers it has a state {sorted(more)[0]!r}, too")
        new = [holds[where][key] for where, key in kept.states]
        return (weight, *(_as_tensor(x).to(old.dtype) for x, old in zip(new, states, strict=True)))

    def _make(self, weight: Tensor, numbers: Mapping[str, object]) -> Optimizer:
        known = inspect.signature(self.kind).parameters
        switches = {key: value for key, value in _SWITCHES.items() if key in known}
        return self.make(weight, {**numbers, **switches})

    def make(self, weight: Tensor, more: Mapping[str, object] = MappingProxyType({})) -> Optimizer:
        """Make the class's own optimizer of one weight."""
        return self.kind([weight], **{**dict(self.numbers), **more})  # type: ignore[arg-type]


# ---- what a class keeps --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trial:
    """Some steps of a class on a small weight.

    weights: before each step and after the last; held: what the class holds then.  firsts: the
    first value of each key of its state.
    """

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    held: Sequence[_HeldValues]
    firsts: Mapping[str, object]

    @staticmethod
    def of(update: TorchUpdate, ndim: int, lr: float) -> _Trial:
        sizes = _DIMS[:ndim]
        line = partial(torch.linspace, steps=math.prod(sizes))
        weight = line(-1, 1).view(sizes).clone()
        optimizer = update.make(weight)
        optimizer.param_groups[0]["lr"] = lr
        state = optimizer.state[weight] = _Firsts(optimizer.state[weight])
        gradients = [line(0.5, -1).view(sizes) * scale for scale in _SCALES]
        weights, held = [weight.clone()], [_held(state, optimizer.param_groups[0])]
        for gradient in gradients:
            weight.grad = gradient.clone()
            with torch.no_grad():
                inspect.unwrap(update.kind.step)(optimizer)
            weights.append(weight.clone())
            held.append(_held(state, optimizer.param_groups[0]))
        return _Trial(weights, gradients, held, state.firsts)


class _Firsts(dict[str, object]):
    """A dict that keeps the first value of each key."""

    def __init__(self, given: Mapping[str, object]) -> None:
        super().__init__()
        self.firsts: dict[str, object] = {}
        self.update(given)

    def __setitem__(self, key: str, value: object) -> None:
        self.firsts.setdefault(key, _copy(value))
        super().__setitem__(key, value)

    def update(self, *given: Mapping[str, object], **more: object) -> None:  # type: ignore[override]
        """Set each key."""
        for key, value in dict(*given, **more).items():
            self[key] = value


def _copy(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _held(state: Mapping[str, object], group: Mapping[str, object]) -> _HeldValues:
    found = {("state", key): _copy(x) for key, x in state.items() if x is not None}
    return found | {("group", key): x for key, x in group.items() if _is_number(x) and key != "lr"}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@lru_cache(maxsize=256)
def _find_kept(update: TorchUpdate, ndim: int) -> _Memory:
    """Raises ValueError for a class that keeps anything else than tensors and numbers."""
    trial, other = (_Trial.of(update, ndim, lr) for lr in _RATES)
    states: dict[_Key, UpdateState] = {}
    counts: dict[_Key, float] = {}
    constants: dict[_Key, object] = {}
    begins = False
    for place, last in trial.held[-1].items():
        where, key = place
        values = [held.get(place) for held in trial.held[1:]]
        if not isinstance(last, Tensor | int | float | str):
            raise ValueError(f"its state {key} is a {type(last).__name__}, and no tensor")
        if _is_count(values):
            counts[place] = float(values[0]) - 2  # type: ignore[arg-type]
        elif not isinstance(last, Tensor) and len(set(values)) == 1:
            constants |= {place: last} if where == "state" else {}
        else:
            starts = [_start(each, place) for each in (trial, other)]
            known = starts[0] == starts[1]  # else it depends on the rate, or is not a number
            begins |= not known
            shape = tuple(_as_tensor(last).shape)
            states[place] = UpdateState(key, starts[0] if known else 0.0, shape)
    kept = _Memory(states, counts, constants, begins)
    if not _follows(update, kept, trial):
        kept = replace(kept, begins=True)
        if not _follows(update, kept, trial):
            raise ValueError("its step reads more than weight, gradient, states, rate and step")
    return kept


def _is_count(values: Sequence[object]) -> bool:
    numbers = [x for x in values if _is_number(x) or (isinstance(x, Tensor) and x.dim() == 0)]
    if len(numbers) < len(values):
        return False
    first, *rest = map(float, numbers)  # type: ignore[arg-type]
    return rest == [first + k for k in range(1, len(values))]


def _start(trial: _Trial, place: _Key) -> float | None:
    """Return the number that a state starts at; None: as the weight; NaN: as nothing known."""
    where, key = place
    value = trial.firsts.get(key) if where == "state" else trial.held[0].get(place)
    if value is None:
        return math.nan
    x = _as_tensor(value)
    if x.shape == trial.weights[0].shape and torch.equal(x, trial.weights[0]):
        return None
    return float(x.max()) if bool((x == x.max()).all()) else math.nan


def _follows(update: TorchUpdate, kept: _Memory, trial: _Trial) -> bool:
    """Return whether the update makes of the small weight what the class itself does."""
    weight = trial.weights[0]
    states = [
        weight if s.start is None else torch.full(s.shape, s.start) for s in kept.states.values()
    ]
    for k, gradient in enumerate(trial.gradients):
        given = trial.weights[k], gradient, torch.tensor(_RATES[0]), torch.tensor(k + 1.0)
        new = update.apply(kept, (*given, *states), {})
        held = [trial.held[k + 1].get(place) for place in kept.states]
        for x, wanted in zip(new, (trial.weights[k + 1], *held), strict=True):
            if wanted is None or not torch.allclose(x, _as_tensor(wanted).to(x.dtype)):
                return False
        states = list(new[1:])
    return True


# ---- numbers that are tensors --------------------------------------------------------------------


def _as_tensor(value: object) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((), value)  # type: ignore[call-overload, no-any-return]


class _TensorNumbers(TorchFunctionMode):
    """Within, numbers that torch's functions take may be tensors: so is what `.item()` gives."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given, name = dict(kwargs or {}), getattr(func, "__name__", "").rstrip("_")
        if name == "item":
            return args[0]
        if func is Tensor.square_:  # which torch cannot make functional
            return args[0].mul_(args[0])
        if name == "full_like" and isinstance(args[1], Tensor):
            return torch.zeros_like(args[0]) + args[1]
        if name == "lerp" and isinstance(args[-1], Tensor):
            args = (*args[:-1], args[-1].to(args[0].dtype))
        key = _SCALED.get(name, "")
        if isinstance(factor := given.get(key), Tensor):
            total, first, *rest = args
            del given[key]
            args = (total, first.to(total.dtype) * factor, *rest)  # in the dtype of the sum
        return func(*args, **given)


@contextmanager
def _number_functions(kind: type[Optimizer]) -> Iterator[None]:
    """Within, functions of numbers take tensors, too, in the modules of a class and its bases."""
    own = [each for each in kind.__mro__ if issubclass(each, Optimizer) and each is not Optimizer]
    modules = [
        inspect.unwrap(kind.step).__globals__,
        *(vars(sys.modules[k.__module__]) for k in own),
    ]
    with ExitStack() as changed:
        for names in modules:
            changed.enter_context(_change(names))
        yield


@contextmanager
def _change(names: dict[str, object]) -> Iterator[None]:
    before = dict(names)
    names.update(_OF_NUMBERS if names.get("math") is math else _BOUNDS)
    try:
        yield
    finally:
        for key in _OF_NUMBERS.keys() - before.keys():
            names.pop(key, None)
        names.update({key: before[key] for key in _OF_NUMBERS.keys() & before.keys()})


def _bound(plain: Callable[..., object], clamp: str, *given: object, **more: object) -> object:
    tensors = [x for x in given if isinstance(x, Tensor)]
    if not tensors:
        return plain(*given, **more)
    limits = [x for x in given if x is not tensors[0]]
    return reduce(lambda x, limit: x.clamp(**{clamp: limit}), limits, tensors[0])  # type: ignore[call-overload]


def _power(x: Tensor | float, y: Tensor | float = 0.5) -> object:
    return x**y


_BOUNDS = {"min": partial(_bound, min, "max"), "max": partial(_bound, max, "min")}
_MATH = SimpleNamespace(**{**vars(math), "sqrt": _power, "pow": _power})
_OF_NUMBERS = {**_BOUNDS, "math": _MATH}
