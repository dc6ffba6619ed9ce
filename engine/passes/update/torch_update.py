"""torch_update: a class of torch.optim as an update function, which update_trace.py traces.

The class's own `step` runs on copies of a weight and its states, as torch.compile would run it: no
formula is written twice.  Relied on: it takes one weight, keeps its states in `state`, its rate in
`param_groups`, and computes with `step` and `lr` as tensors while torch says that it compiles.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from flowrun.engine.strategy import Settings
from flowrun.engine.torch_internals import compiling

_SWITCHES = {"foreach": False, "capturable": True}  # one weight; no branch on a tensor
NOT_NUMBERS = ("params", "lr", "differentiable", "fused", *_SWITCHES)
_SCALED = {"add": "alpha", "sub": "alpha", "addcdiv": "value", "addcmul": "value"}


@dataclass(frozen=True)
class TorchUpdate:
    """An update function: (param, grad, states …, *, lr, step, numbers …) -> (param, states …).

    kind: the class.  numbers: arguments of it, which decide on its states.
    """

    kind: type[Optimizer]
    numbers: Settings

    @property
    def __name__(self) -> str:
        return f"torch.optim.{self.kind.__name__}"

    @cached_property
    def __signature__(self) -> inspect.Signature:
        at, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        starts = [inspect.Parameter(key, at, default=x) for key, x in self._starts.items()]
        plain = [inspect.Parameter(key, at) for key in ("param", "grad")]
        fed = [inspect.Parameter(key, named) for key in ("lr", "step")[: 1 + self._counts]]
        given = [inspect.Parameter(key, named, default=value) for key, value in self.numbers]
        return inspect.Signature([*plain, *starts, *fed, *given])

    def __call__(
        self, param: Tensor, grad: Tensor, *states: Tensor, lr: Tensor, **numbers: object
    ) -> tuple[Tensor, ...]:
        """Return the new weight and the new states."""
        step = numbers.pop("step", lr)
        function = torch.func.functionalize(lambda *given: self._run(given, numbers))
        return function(param, grad, lr, step, *states)  # type: ignore[no-any-return]

    def _run(self, given: Iterable[Tensor], numbers: Mapping[str, object]) -> tuple[Tensor, ...]:
        param, grad, lr, step, *states = given
        with compiling(), torch.no_grad():
            weight = param.clone()
            weight.grad = grad
            optimizer = self._make(weight, numbers)
            optimizer.param_groups[0]["lr"] = lr
            state = optimizer.state[weight]
            state.update((key, x.clone()) for key, x in zip(self._starts, states, strict=True))
            if self._counts:
                state["step"] = step - 1
            try:
                with _TensorScalars():
                    inspect.unwrap(self.kind.step)(optimizer)
            except KeyError as error:
                raise ValueError(f"with these numbers it has a state {error}, too") from error
        if more := state.keys() - self._first.keys():
            raise ValueError(f"with these numbers it has a state {sorted(more)[0]!r}, too")
        return (weight, *(state[key] for key in self._starts))

    def _make(self, weight: Tensor, numbers: Mapping[str, object]) -> Optimizer:
        known = inspect.signature(self.kind).parameters
        switches = {key: value for key, value in _SWITCHES.items() if key in known}
        return self._of(weight, {**numbers, **switches})

    def _of(self, weight: Tensor, more: Mapping[str, object] = MappingProxyType({})) -> Optimizer:
        given: dict[str, Any] = {**dict(self.numbers), **more}
        return self.kind([weight], **given)

    # ------------------------------------------------------------------ its states

    @cached_property
    def _first(self) -> Mapping[str, Tensor]:
        """The states of a small weight after its first step."""
        weight = torch.linspace(-1, 1, 6).view(2, 3).clone()
        weight.grad = torch.linspace(0.5, -1, 6).view(2, 3).clone()
        optimizer = self._of(weight)
        with torch.no_grad():
            inspect.unwrap(self.kind.step)(optimizer)
        held: dict[str, Tensor] = {}
        for key, x in optimizer.state[weight].items():
            held |= {} if x is None else {key: torch.as_tensor(x)}
        for key, x in held.items():
            if key != "step" and x.shape != weight.shape:
                raise ValueError(f"its state {key} is not shaped as the weight")
        return held

    @cached_property
    def _counts(self) -> bool:
        return "step" in self._first

    @cached_property
    def _starts(self) -> Mapping[str, float]:
        """Return what states are before the first step: what the class fills in, or 0."""
        weight = torch.zeros(2, 3)
        made = self._of(weight).state[weight]
        held = {key: float(x.max()) for key, x in made.items() if isinstance(x, Tensor)}
        return {key: held.get(key, 0.0) for key in self._first if key != "step"}

    def check_start(self) -> None:
        """Raise ValueError unless a first step from these states is that of the class."""
        first = self._first
        weight = torch.linspace(-1, 1, 6).view(2, 3)
        gradient = torch.linspace(0.5, -1, 6).view(2, 3)
        states = [torch.full_like(weight, x) for x in self._starts.values()]
        rate = torch.tensor(float(inspect.signature(self.kind).parameters["lr"].default))
        new = self(weight, gradient, *states, lr=rate, step=torch.tensor(1.0))
        for key, x in zip(self._starts, new[1:], strict=True):
            if not torch.allclose(x, first[key]):
                raise ValueError(f"its state {key} does not start at a number")


class _TensorScalars(TorchFunctionMode):
    """Within, `alpha` and `value` of torch's sums may be tensors: they multiply what is added."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        key = _SCALED.get(getattr(func, "__name__", "").rstrip("_"), "")
        if isinstance(factor := given.get(key), Tensor):
            total, first, *rest = args
            assert isinstance(total, Tensor) and isinstance(first, Tensor), key
            del given[key]
            args = (total, first.to(total.dtype) * factor, *rest)  # in the dtype of the sum
        return func(*args, **given)
