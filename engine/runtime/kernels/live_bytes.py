"""LiveBytes: the exact number of bytes of the tensors that are alive in this process.

Under this dispatch mode every torch op reports what it returns; a storage counts from the op that
made it until its last owner (a register, a view, a message in flight) is gone.  A mode belongs to
one thread: threads that read samples enter a mode of their own with the same count, and also report
samples that are no tensors.  The mode slows ops down, so drivers measure only the first steps of a
run.  It does not see what an op allocates and frees within itself, nor what libraries allocate;
that is the process's anonymous memory less this count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeVar, cast

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from flowrun.engine.torch_internals import DispatchMode, OpOverload, storage_id, tree_leaves

T = TypeVar("T")


class LiveBytes(DispatchMode):
    """A dispatch mode that counts bytes while it is on.

    known: tensors that are alive already.  count: the count of another thread's mode, to add to.
    """

    def __init__(self, known: Iterable[torch.Tensor] = (), count: _Count | None = None) -> None:
        super().__init__()
        self.count = count or _Count()
        self._add(known)

    @property
    def peak(self) -> int:
        """The most at a time while any mode with this count was on."""
        return self.count.peak

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        read = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        old = {storage_id(x) for x in read}
        self._add(x for x in results if storage_id(x) not in old)
        return out

    def _add(self, tensors: Iterable[torch.Tensor]) -> None:
        self.count.add(tensors)

    def read(self, supply: Callable[..., list[T]], *args: object) -> list[T]:
        """Call supply(*args) in its own thread; count its tensors and lists of samples."""
        with LiveBytes(count=self.count):
            results = [
                cast(T, _ByteSamples(x)) if isinstance(x, list) else x for x in supply(*args)
            ]
        leaves = tree_leaves([list(x) if isinstance(x, _ByteSamples) else x for x in results])
        self._add(x for x in leaves if isinstance(x, torch.Tensor))
        for samples in (x for x in results if isinstance(x, _ByteSamples)):
            self.count.add_samples(samples)
        return results


class _ByteSamples(list[object]):
    """A list of the samples of a micro-batch that, unlike a plain list, has weak references."""


@dataclass(slots=True, kw_only=True)
class _Count:
    """The bytes that are alive, of all threads.

    storages: address -> (storage, bytes).  samples: (list, bytes of its items without tensors).
    """

    live: int = 0
    peak: int = 0
    storages: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)
    samples: list[tuple[weakref.ref[_ByteSamples], int]] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        with self.lock:
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage_id(storage) not in self.storages:
                    self.storages[storage_id(storage)] = (StorageWeakRef(storage), storage.nbytes())
                    self.live += storage.nbytes()
            self._raise_peak()

    def add_samples(self, samples: _ByteSamples) -> None:
        """Add the arrays and bytes in a list of samples for as long as the list is alive."""
        num_bytes = sum(map(_held_bytes, tree_leaves(list(samples))))
        with self.lock:
            self.samples.append((weakref.ref(samples), num_bytes))
            self.live += num_bytes
            self._raise_peak()

    def _raise_peak(self) -> None:
        if self.live > self.peak:  # an upper bound: some owners may be gone
            self.drop_dead()
            self.peak = max(self.peak, self.live)

    def drop_dead(self) -> None:
        """Drop everything that has no owner any more."""
        for key, (reference, num_bytes) in list(self.storages.items()):
            if reference.expired():
                del self.storages[key]
                self.live -= num_bytes
        self.live -= sum(num_bytes for samples, num_bytes in self.samples if samples() is None)
        self.samples = [held for held in self.samples if held[0]() is not None]


def _held_bytes(value: object) -> int:
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    return len(value) if isinstance(value, bytes | bytearray) else 0
