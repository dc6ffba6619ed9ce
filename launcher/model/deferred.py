"""deferred: a module is made without memory for its weights, and how each is made is remembered.

While the constructor runs, each op passes by here.  What takes few bytes runs as ever.  A larger
tensor is one of the CPU like any other, but its storage has no memory; what an op does to it is a
StorageValue (replay.py).  Ops that draw are executed nevertheless, on memory that is dropped, so
that the generator is always where plain torch has it; its state before them is kept.  If Python
asks for a value, it is made at that moment.  What cannot be recorded (a thread, a pointer that is
asked for) ends the recording: build.py then makes the model whole, with a note that says why.

Relied upon of torch (tests/launcher/model/test_deferred.py): a storage with a size and no memory;
schemas that say what an op writes to, and tags that say whether it draws.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from flowrun.engine.runtime.process.heap import trim_above
from flowrun.engine.torch_internals import (
    DispatchMode,
    OpOverload,
    TreeSpec,
    schema_of,
    storage_id,
    storage_without_memory,
    tree_flatten,
    tree_unflatten,
)
from flowrun.launcher.model import op_schema
from flowrun.launcher.model.initial import Initial, InitialSource, named_tensors
from flowrun.launcher.model.op_schema import dense
from flowrun.launcher.model.replay import (
    Geometry,
    RecordedCall,
    StorageValue,
    View,
    perform,
    replay,
)

LEAST_BYTES = 1 << 16  # what takes less is made at once
MOST_WRITES = 10_000  # to one storage: to remember more takes more than the storage


class Unrecordable(Exception):
    """A constructor does what cannot be remembered."""


def defer(
    make: Callable[[], nn.Module], *, draws: bool = True, least_bytes: int = LEAST_BYTES
) -> tuple[nn.Module, Initial]:
    """Make a module whose larger parameters and buffers have no memory, and record their values.

    Tensors of fewer than `least_bytes` have memory.  draws: if False, nothing random is drawn, as
    for a plan alone, and random values are arbitrary.  Raises Unrecordable.  An error of `make` may
    be caused by the recording: try without it.
    """
    recorder = _Recorder(draws, least_bytes)
    with trim_above(LEAST_BYTES), _no_threads(recorder), recorder, _Escapes(recorder):
        model = make()
    if recorder.failed:  # and the constructor caught it
        raise recorder.failed
    sources: dict[str, InitialSource] = {}
    for name, tensor in named_tensors(model).items():
        sources[name] = recorder.view(tensor) or (tensor, tensor.dtype)
    recorder.make_others(named_tensors(model).values())
    return model, Initial(sources)


class _Recorder(DispatchMode):
    """Record what storages without memory hold.  values: by storage."""

    def __init__(self, draws: bool, least_bytes: int) -> None:
        super().__init__()
        self.draws = draws
        self.least_bytes = least_bytes
        self.values: dict[int, StorageValue] = {}
        self.storages: dict[int, StorageWeakRef] = {}  # which keep a number from being used again
        self.writes: Counter[int] = Counter()
        self.failed: Unrecordable | None = None
        self.rests = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        ours = Tensor.__torch_dispatch__
        if any(each.__torch_dispatch__ is not ours for each in types):
            return NotImplemented
        if self.rests or op_schema.only_views(func):
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        written = op_schema.find_written(func, args, kwargs)
        places = tuple(k for k, x in enumerate(leaves) if id(x) in written)
        late = [self.defers(leaves[k]) for k in places]
        if not any(late):
            if places or not _makes_alone(func, leaves):
                return self._in_memory(func, leaves, spec)
            return self._record_maker(func, leaves, spec)
        if not all(late):
            raise self.cannot(f"{func} writes to tensors with and without memory")
        return self._record_writer(func, leaves, spec, places)

    # ------------------------------------------------------------------ kinds of ops

    def _in_memory(self, func: OpOverload, leaves: list[object], spec: TreeSpec) -> object:
        """An op as ever, on values."""
        values = self._all(leaves)
        ours = {storage_id(x) for x, made in values if made}
        args, kwargs = tree_unflatten([x for x, _ in values], spec)
        results, out = tree_flatten(func(*args, **kwargs))
        apart = [x.clone() if dense(x) and storage_id(x) in ours else x for x in results]
        return tree_unflatten(apart, out)

    def _should_defer(self, results: Sequence[Tensor | None], leaves: Sequence[object]) -> bool:
        """True if results are dense, and take many bytes or are made of what has no memory."""
        tensors = [x for x in results if x is not None]
        small = sum(x.nbytes for x in tensors) < self.least_bytes
        return all(map(dense, tensors)) and (not small or any(map(self.defers, leaves)))

    def _record_maker(self, func: OpOverload, leaves: list[object], spec: TreeSpec) -> object:
        """Record an op that makes tensors of its own."""
        state = None
        if op_schema.draws(func) and self.draws:
            state = op_schema.generator(leaves).get_state()
            made = self._in_memory(func, leaves, spec)
        else:
            try:
                made = op_schema.run_on_meta(func, leaves, spec)
            except op_schema.UNKNOWN_RESULT:  # or the constructor is wrong
                return self._in_memory(func, leaves, spec)
        results, out = tree_flatten(made)
        if not self._should_defer(results, leaves):
            return made if state is not None else self._in_memory(func, leaves, spec)
        lie = [None if x is None else Geometry.of(x).from_start for x in results]
        del made, results
        call = self._call(func, leaves, spec, (), lie, state)
        empty = op_schema.name_of(func) in op_schema.EMPTY
        bare: list[Tensor | None] = [None] * len(lie)
        for place, geometry in enumerate(lie):
            if geometry is not None:
                value = StorageValue(geometry.num_bytes, None if empty else call, place)
                bare[place] = self._bare(geometry, value)
        return tree_unflatten(bare, out)

    def _record_writer(
        self, func: OpOverload, leaves: list[Any], spec: TreeSpec, places: tuple[int, ...]
    ) -> object:
        """Record an op that writes to tensors without memory."""
        if not op_schema.returns_what_it_writes(func):
            raise self.cannot(f"{func} writes to a tensor and makes another")
        first = leaves[places[0]]
        fills = op_schema.name_of(func) in op_schema.FILLS and places == (0,)
        state = None
        if op_schema.draws(func) and self.draws:
            generator = op_schema.generator(leaves)
            state = generator.get_state()
            self._draw(func, leaves, spec, fills)
        elif not (fills and op_schema.draws(func)):
            try:
                op_schema.run_on_meta(func, leaves, spec)
            except op_schema.UNKNOWN_RESULT as error:
                raise self.cannot(f"{func} is not understood: {error}") from error
        call = self._call(func, leaves, spec, places, [], state, blank=first if fills else None)
        for k in dict.fromkeys(places):
            number = storage_id(leaves[k])
            self.writes[number] += 1
            if self.writes[number] > MOST_WRITES:
                raise self.cannot(f"a tensor is written to {MOST_WRITES} times")
            self.values[number] = StorageValue(self.values[number].num_bytes, call, -1 - k)
        count = len(schema_of(func).returns)
        return None if not count else first if count == 1 else tuple(leaves[k] for k in places)

    def _draw(self, func: OpOverload, leaves: list[Any], spec: TreeSpec, fills: bool) -> None:
        """Execute an op that draws, on memory that is dropped."""
        if fills:
            perform(func, [Geometry.of(leaves[0]).empty(), *leaves[1:]], spec)
        else:
            perform(func, [x.clone() if k else x for x, k in self._all(leaves)], spec)

    # ------------------------------------------------------------------ what is known

    def defers(self, x: object) -> TypeGuard[Tensor]:
        """True if it has no memory."""
        return dense(x) and storage_id(x) in self.values

    def view(self, tensor: Tensor) -> View | None:
        """Return the view that a tensor is of a value; None if it has memory."""
        if not self.defers(tensor):
            return None
        if tensor.is_conj() or tensor.is_neg():
            raise self.cannot("it has a conjugate or negative view")
        return View(self.values[storage_id(tensor)], Geometry.of(tensor))

    def cannot(self, why: str) -> Unrecordable:
        """Make the error that ends the recording."""
        self.failed = Unrecordable(why)
        return self.failed

    def look(
        self, func: Callable[..., object], tensor: Tensor, *args: object, **kwargs: object
    ) -> object:
        """Call a function of Python on the values of a tensor, which are made for it."""
        self.rests = True
        try:
            return func(self._values([tensor])[0], *args, **kwargs)
        finally:
            self.rests = False

    def make_others(self, named: Iterable[Tensor]) -> None:
        """Give memory to all tensors that somebody refers to, but for those that are named."""
        ours = {storage_id(x) for x in named if self.defers(x)}
        if not self._living() - ours:
            return
        gc.collect()
        others: dict[int, list[Tensor]] = {}
        for x in gc.get_objects():
            if issubclass(type(x), Tensor) and self.defers(x):
                number = storage_id(x)
                if number not in ours:
                    others.setdefault(number, []).append(x)
        for alike in others.values():
            for tensor, made in zip(alike, self._values(alike), strict=True):
                tensor.data = made

    def _living(self) -> set[int]:
        gone = [number for number, storage in self.storages.items() if storage.expired()]
        for number in gone:
            del self.storages[number], self.values[number]
        return set(self.storages)

    def _values(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Make the values of tensors for a caller that only reads them."""
        return replay([view for view in map(self.view, tensors) if view])

    def _all(self, leaves: Sequence[object]) -> list[tuple[Any, bool]]:
        """Return arguments that all have memory, and whether it was made for them."""
        made = iter(self._values([x for x in leaves if self.defers(x)]))
        return [(next(made), True) if self.defers(x) else (x, False) for x in leaves]

    def _bare(self, geometry: Geometry, value: StorageValue) -> Tensor:
        storage = storage_without_memory(geometry.num_bytes, op_schema.CPU)
        self.values[storage_id(storage)] = value
        self.storages[storage_id(storage)] = StorageWeakRef(storage)
        return geometry.on(storage)

    def _call(
        self,
        func: OpOverload,
        leaves: Sequence[object],
        spec: TreeSpec,
        written: tuple[int, ...],
        results: Sequence[Geometry | None],
        state: Tensor | None,
        blank: Tensor | None = None,
    ) -> RecordedCall:
        """blank: is written to and not read; if all of its storage, what was there is not kept."""
        kept: list[Any] = []
        for x in leaves:
            if isinstance(x, Tensor):
                kept.append(self.view(x) or _copy(x))
            else:
                kept.append(None if isinstance(x, torch.Generator) else x)
        if blank is not None:
            before = kept[0].value
            whole = kept[0].geometry.fills and kept[0].geometry.num_bytes == before.num_bytes
            if whole and all(x.value is not before for x in kept[1:] if isinstance(x, View)):
                kept[0] = View(StorageValue(before.num_bytes), kept[0].geometry)
        return RecordedCall(
            op=func,
            leaves=tuple(kept),
            spec=spec,
            written=written,
            results=tuple(results),
            state=state,
            dtype=torch.get_default_dtype(),
        )


class _Escapes(TorchFunctionMode):
    """Sees what is done to a tensor without an op."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in op_schema.ESCAPES and any(map(self.recorder.defers, args)):
            raise self.recorder.cannot(f"it asks for the memory of a tensor: {func.__name__}")
        if func in op_schema.LOOKS and self.recorder.defers(args[0]):
            return self.recorder.look(func, *args, **(kwargs or {}))
        if func is Tensor.__deepcopy__ and self.recorder.defers(args[0]) and args[0].is_leaf:
            return _deep_copy(*args)
        return func(*args, **(kwargs or {}))


def _deep_copy(x: Tensor, memo: dict[Any, Any]) -> Tensor:
    """Copy as torch does: copies of tensors that share a storage share one, too."""
    if id(x) in memo:
        return memo[id(x)]  # type: ignore[no-any-return]
    storage, copies = x.untyped_storage(), memo.setdefault("torch", {})
    if storage_id(storage) not in copies:
        whole = Geometry(torch.uint8, (storage.nbytes(),), (1,)).on(storage)
        copies[storage_id(storage)] = whole.clone().untyped_storage()
    made = Geometry.of(x).on(copies[storage_id(storage)]).requires_grad_(x.requires_grad)
    made.__dict__ = copy.deepcopy(x.__dict__, memo)
    memo[id(x)] = made
    return made


@contextmanager
def _no_threads(recorder: _Recorder) -> Iterator[None]:
    """Modes are a thread's own: another would look at memory that is not there."""
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        raise recorder.cannot(f"it starts a thread ({self.name})")

    threading.Thread.start = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


def _copy(x: Tensor) -> Tensor:
    """Copy values that a call keeps, with the same strides: their owner may change them."""
    one = x.detach()[tuple(slice(0, 1) if not stride else slice(None) for stride in x.stride())]
    return Geometry.of(one).from_start.empty().copy_(one).expand(x.shape)


def _makes_alone(func: object, leaves: Sequence[object]) -> bool:
    """True if an op makes tensors, and no argument is of another kind than plain torch's."""
    return op_schema.makes_tensors(func) and all(map(op_schema.ordinary, leaves))
