"""known_values: what Python may ask for the value of, as it is the same in every step.

That are constants which forward makes (arange, tensor), buffers that it never writes, and what is
computed of these alone: each function of torch that reads nothing else is called with their
values, too.  So is whether torch.rand exceeds 0, or a number that it never reaches.  A buffer that
Python has asked for keeps its value: Variable.decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from flowrun.engine.torch_internals import (
    has_memory,
    is_traced,
    storage_id,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    version_of,
    without_modes,
)

_MOST_BYTES = 1 << 16  # of a tensor whose values are followed; a larger buffer may have no memory
_VALUE = "flowrun_value"  # attribute of a tensor that stands in: the value
_UNIFORM = "flowrun_uniform"  # attribute of what torch.rand returns: its version
# functions that make a constant of numbers
_NAMES = "arange linspace logspace zeros ones full eye tensor tril_indices triu_indices"
_MAKERS = frozenset(getattr(torch, name) for name in _NAMES.split())
# what functions of torch raise for values that they do not take
OF_VALUES = RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError


class _Computed(NamedTuple):
    """What a function makes of values, and the buffers that these come from."""

    value: object
    buffers: frozenset[str]


class KnownValues:
    """The values that are known in one call of forward.

    on_ask: is called with the buffers whose values Python asks for.
    """

    def __init__(self, on_ask: Callable[[frozenset[str]], None]) -> None:
        self.on_ask = on_ask
        # by storage, which is held so that no other has its id: buffers that it comes from; None:
        # something was written that is not known
        self.sources: dict[int, tuple[torch.UntypedStorage, frozenset[str] | None]] = {}

    def begin(self, buffers: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """Begin a call.  buffers: name, what stands in, the buffer itself."""
        self.sources.clear()
        for name, stand_in, buffer in buffers:
            if (value := _copy_of(buffer)) is not None:
                self._set(stand_in, value, frozenset((name,)))

    def follow(self, func: Any, args: Any, kwargs: Any) -> object:
        """Call a function of tensors that stand in, and the same of their values."""
        written = [(x, version_of(x)) for x in tree_leaves((args, kwargs)) if hasattr(x, _VALUE)]
        result = func(*args, **kwargs)
        written = [(x, version) for x, version in written if version_of(x) != version]
        made = self._make(func, args, kwargs, bool(written), _tensors(result))
        for x, _ in written:
            self._set(x, getattr(x, _VALUE), made and made.buffers)
        for x, value in zip(_tensors(result), _tensors(made and made.value), strict=False):
            assert made is not None
            if is_traced(x):
                self._set(x, value, made.buffers)
        return result

    def _make(
        self,
        func: Callable[..., object],
        args: object,
        kwargs: object,
        writes: bool,
        made: list[Tensor],
    ) -> _Computed | None:
        """Return what a function that has made tensors, or writes into some, makes of values."""
        if func is torch.rand:
            for x in made:
                setattr(x, _UNIFORM, version_of(x))
        found = None
        if (writes or made) and all(x.nbytes <= _MOST_BYTES for x in made):
            found = self._run(func, args, kwargs)
        return found or _compare_drawn(getattr(func, "__name__", ""), args)

    def ask(self, func: Any, args: Any, kwargs: Any) -> object:
        """Return what a function makes of values; None where one is not known."""
        made = self._run(func, args, kwargs)
        if made is None and func is Tensor.__getitem__:
            return self._select(*args)
        return made and self._answer(made)

    def numbers(
        self, args: object, kwargs: object
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Return arguments with whole numbers in the place of known tensors of one; None if there
        are none of these.
        """
        leaves, spec = tree_flatten((args, kwargs))
        found = False
        for k, x in enumerate(leaves):
            whole = isinstance(x, Tensor) and not x.dim() and not x.is_floating_point()
            if whole and (known := self._value_of(x)):
                self.on_ask(known[1])
                leaves[k], found = known[0].tolist(), True
        given, named = tree_unflatten(leaves, spec)
        return (given, named) if found else None

    def _select(self, x: Tensor, index: object) -> object:
        """Return what known masks select of a tensor; None where one is not known."""
        places: list[Any] = []
        for each in index if isinstance(index, tuple) else (index,):
            if isinstance(each, Tensor) and each.dtype is torch.bool:
                made = self._run(torch.nonzero, (each,), {"as_tuple": True})
                if made is None:
                    return None
                places += self._answer(made)
            else:
                places.append(each)
        return x[tuple(places)]

    def _answer(self, made: _Computed) -> Any:
        """Return what stands in for a value that Python has asked for, as a constant."""
        self.on_ask(made.buffers)
        leaves, spec = tree_flatten(made.value)
        for k, x in enumerate(leaves):
            if isinstance(x, Tensor):
                constant = torch.tensor(x.tolist(), dtype=x.dtype, device=x.device)
                leaves[k] = constant.reshape(x.shape)  # a list of none has lost it
                self._set(leaves[k], x, made.buffers)
        return tree_unflatten(leaves, spec)

    def _run(self, func: Callable[..., object], args: Any, kwargs: Any) -> _Computed | None:
        """Call a function on values; None where one is not known, or it draws."""
        leaves, spec = tree_flatten((args, kwargs))
        buffers: set[str] = set()
        none = True
        for k, x in enumerate(leaves):
            if isinstance(x, torch.Generator):
                return None
            if isinstance(x, Tensor):
                none, found = False, self._value_of(x)
                if found is None:
                    return None
                leaves[k] = found[0]
                buffers |= found[1]
        if none and func not in _MAKERS:
            return None
        before = torch.default_generator.get_state()
        given, named = tree_unflatten(leaves, spec)
        with without_modes(), torch.no_grad():
            try:
                value = func(*given, **named)
            except OF_VALUES:  # forward itself meets it, too, or takes another way
                return None
            if not torch.equal(before, torch.default_generator.get_state()):
                torch.default_generator.set_state(before)
                return None
        return _Computed(value, frozenset(buffers))

    def _value_of(self, x: Tensor) -> tuple[Tensor, frozenset[str]] | None:
        value = getattr(x, _VALUE, None)
        if value is None:
            copy = None if is_traced(x) else _copy_of(x)
            return None if copy is None else (copy, frozenset())
        _, buffers = self.sources.get(storage_id(value), (None, None))
        return None if buffers is None else (value, buffers)

    def _set(self, x: Tensor, value: Tensor, buffers: frozenset[str] | None) -> None:
        """Let x stand for a value; buffers: None if something was written that is not known."""
        setattr(x, _VALUE, value)
        vars(x)["tolist"] = partial(handle_torch_function, Tensor.tolist, (x,), x)  # else no call
        number = storage_id(value)
        storage, others = self.sources.get(number, (value.untyped_storage(), frozenset()))
        both = None if buffers is None or others is None else buffers | others
        self.sources[number] = (storage, both)


def _compare_drawn(name: str, args: object) -> _Computed | None:
    """Return how numbers of torch.rand, from 0 to below 1, compare with a bound beyond them; that
    one of them is 0 does not count.
    """
    match args:
        case Tensor() as x, int() | float() as bound if vars(x).get(_UNIFORM) == version_of(x):
            known = {"gt": bound <= 0, "ge": bound <= 0, "lt": bound >= 1, "le": bound >= 1}
            compares = name.strip("_")
            if compares in known and not 0 < bound < 1:
                with without_modes():
                    return _Computed(torch.full(x.shape, known[compares]), frozenset())
    return None


def _tensors(x: object) -> list[Tensor]:
    return [each for each in tree_leaves(x) if isinstance(each, Tensor)]


def _copy_of(x: Tensor) -> Tensor | None:
    """Return a copy of a small tensor that has memory; None of others."""
    if type(x) is not Tensor or x.layout is not torch.strided or x.device.type != "cpu":
        return None
    if x.nbytes > _MOST_BYTES or not has_memory(x):
        return None
    with without_modes():
        return x.detach().clone()
