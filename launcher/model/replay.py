"""replay: tensors made from what is known of their making (deferred.py), one at a time.

A Value is what a storage holds between two ops that write to it.  It never changes, so that who
read it stays right when the storage is written to again.  A Call is an op with all that its result
depends on: its arguments, the state of the generator before it, the default dtype.  To replay is to
do again, in order, the calls that a tensor depends on, and no others; what only the next call reads
is written over, so that most weights take their own memory and no more.

Relied upon of torch (tests/launcher/model/test_deferred.py): the same op, at the same strides, on
one thread, from the same state of the generator, makes the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrun.engine import torch_internals
from flowrun.engine.torch_internals import OpOverload, TreeSpec

Storages = dict["StorageValue", torch.UntypedStorage]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape, strides and offset of a tensor in its storage, in elements."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @staticmethod
    def of(tensor: Tensor) -> Geometry:
        """Return the geometry of a tensor."""
        offset = int(tensor.storage_offset())
        return Geometry(tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

    @property
    def num_bytes(self) -> int:
        """The bytes from the start of the storage to the last element."""
        if 0 in self.size:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize

    @property
    def from_start(self) -> Geometry:
        """The same in a storage of its own."""
        return Geometry(self.dtype, self.size, self.stride)

    @property
    def fills(self) -> bool:
        """True if it has each place up to its last, once."""
        expected = 1
        for stride, count in sorted(zip(self.stride, self.size, strict=True)):
            if count != 1 and stride != expected:
                return False
            expected *= count
        return not self.offset

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor that lies so in a storage."""
        bare = torch.empty(0, dtype=self.dtype, device=storage.device)
        return bare.set_(storage, self.offset, self.size, self.stride)  # type: ignore[call-overload,no-any-return]

    def empty(self, device: str = "cpu") -> Tensor:
        """Make a tensor of this shape at the start of a storage of its own."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RecordedCall:
    """An op as it was called.

    leaves: arguments and named arguments, flat by `spec`; a tensor is a View, or itself where its
    values belong to the call.  written: leaves that it writes to.  results: of each of its results
    that is a tensor of its own.  state: of the generator, before it; None if it draws nothing.
    dtype: torch's default, which factories look up.
    """

    op: OpOverload
    leaves: tuple[Any, ...]
    spec: TreeSpec
    written: tuple[int, ...]
    results: tuple[Geometry | None, ...]
    state: Tensor | None
    dtype: torch.dtype

    @property
    def reads(self) -> list[StorageValue]:
        """Each once."""
        return list(dict.fromkeys(x.value for x in self.leaves if isinstance(x, View)))


@dataclass(frozen=True, eq=False, slots=True)
class StorageValue:
    """The content of a storage: result `place` of a call, or its leaf `-1 - place` as the call
    changed it; zeros without a call.
    """

    num_bytes: int
    call: RecordedCall | None = None
    place: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """A tensor on a Value."""

    value: StorageValue
    geometry: Geometry


def replay(wanted: Sequence[View]) -> list[Tensor]:
    """Make the `wanted` tensors on the CPU; those of one StorageValue share its storage."""
    storages: Storages = {}
    calls, made, readers = _find_needed(wanted)
    with _recorded_settings(), torch.no_grad():
        for call in calls:
            _run(call, made[call], storages, readers)
    return [view.geometry.on(_storage(storages, view.value)) for view in wanted]


def perform(op: OpOverload, leaves: Sequence[object], spec: TreeSpec) -> list[Any]:
    """Call `op` with flat arguments `leaves` in the structure `spec`; return flat results."""
    args, kwargs = torch_internals.tree_unflatten(leaves, spec)
    return torch_internals.tree_leaves(op(*args, **kwargs))


def _find_needed(
    wanted: Sequence[View],
) -> tuple[list[RecordedCall], dict[RecordedCall, list[StorageValue]], Counter[StorageValue]]:
    """Sort needed calls, each after those that it depends on; count readers of values."""
    calls: list[RecordedCall] = []
    made: dict[RecordedCall, list[StorageValue]] = {}
    readers = Counter(view.value for view in wanted)
    found: set[StorageValue] = set()
    todo: list[StorageValue | RecordedCall] = [view.value for view in wanted]
    while todo:
        each = todo.pop()
        if isinstance(each, RecordedCall):
            calls.append(each)
        elif each.call is not None and each not in found:
            found.add(each)
            if each.call not in made:
                made[each.call] = []
                todo.append(each.call)
                todo += each.call.reads
                readers.update(each.call.reads)
            made[each.call].append(each)
    return calls, made, readers


def _run(
    call: RecordedCall,
    made: Sequence[StorageValue],
    storages: Storages,
    readers: Counter[StorageValue],
) -> None:
    """Do one call again: storages afterwards hold its Values, and no more those that were read for
    the last time.
    """
    written = {call.leaves[k].value for k in call.written}
    here: Storages = {}
    for value in call.reads:
        here[value] = _storage(storages, value)
        readers[value] -= 1
        if not readers[value]:
            del storages[value]
        elif value in written:
            here[value] = here[value].clone()
    leaves = [x.geometry.on(here[x.value]) if isinstance(x, View) else x for x in call.leaves]
    if call.state is not None:
        torch.default_generator.set_state(call.state)
    torch.set_default_dtype(call.dtype)
    results = perform(call.op, leaves, call.spec)
    taken = {torch_internals.storage_id(storage) for storage in here.values()}
    for value in made:
        if value.place < 0:
            storages[value] = here[call.leaves[-1 - value.place].value]
        else:
            geometry = call.results[value.place]
            assert geometry is not None
            storages[value] = _own(results[value.place], geometry, taken)


def _storage(storages: Storages, value: StorageValue) -> torch.UntypedStorage:
    if value not in storages:
        zeros = torch.zeros(value.num_bytes, dtype=torch.uint8, device="cpu")
        storages[value] = zeros.untyped_storage()
    return storages[value]


def _own(result: Tensor, geometry: Geometry, taken: set[int]) -> torch.UntypedStorage:
    """The storage of a result; a copy, if another tensor has it or it is not as was foreseen."""
    storage = result.untyped_storage()
    as_foreseen = Geometry.of(result) == geometry and storage.nbytes() == geometry.num_bytes
    if not as_foreseen or torch_internals.storage_id(storage) in taken:
        storage = geometry.empty().copy_(result).untyped_storage()
    taken.add(torch_internals.storage_id(storage))
    return storage


@contextmanager
def _recorded_settings() -> Iterator[None]:
    """Use one thread, as the launcher does, and restore the generator and the default dtype."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    if threads > 1:  # a launcher never had more: its workers are forked
        torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if threads > 1:
            torch.set_num_threads(threads)
