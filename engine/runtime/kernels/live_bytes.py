"""LiveBytes: the bytes of tensors that are alive in this process, measured exactly.

A mode under which every torch op reports what it returns; a storage counts from the op that made it
until its last owner is gone, whoever that is (a register, a view, a message under way).  A mode is
one thread's: threads that read samples enter one of their own, over the same count, and report
samples that are no tensors too.  It slows ops down, so drivers measure the first steps of a run
alone.  What an op allocates and frees within itself is not seen, nor what libraries take: that is
the process's anonymous memory less this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts while it is on.  known: tensors that are there already.  count: of another thread's
    mode, to add to.
    """

    def __init__(self, known: Iterable[torch.Tensor] = (), count: _Count | None = None) -> None:
        super().__init__()
        self.count = count or _Count()
        self._add(known)

    @property
    def peak(self) -> int:
        """Most bytes at once while any mode over this count was on."""
        return self.count.peak

    @property
    def live(self) -> int:
        """Bytes that are counted now; at most, some of their owners may have gone."""
        return self.count.live

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch asks: True would import the compiler with the first op of each rank, 0.8 s."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        read = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        old = {x.untyped_storage()._cdata for x in read}
        self._add(x for x in made if x.untyped_storage()._cdata not in old)
        return out

    def _add(self, tensors: Iterable[torch.Tensor]) -> None:
        self.count.add(tensors)

    def read(self, supply: Callable[..., list[Any]], *args: Any) -> list[Any]:
        """supply(*args), in a thread of its own: what it makes counts, tensors and lists of samples
        that are anything.
        """
        with LiveBytes(count=self.count):
            made = [_ByteSamples(x) if isinstance(x, list) else x for x in supply(*args)]
        leaves = tree_leaves([list(x) if isinstance(x, _ByteSamples) else x for x in made])
        self._add(x for x in leaves if isinstance(x, torch.Tensor))
        for samples in (x for x in made if isinstance(x, _ByteSamples)):
            self.count.add_samples(samples)
        return made


class _ByteSamples(list[Any]):
    """Samples of a micro-batch: unlike a plain list, one whose end can be waited for."""


@dataclass(slots=True, kw_only=True)
class _Count:
    """Bytes that are alive, whichever thread made them.

    storages: by address, with the bytes.  samples: lists, with the bytes of what is no tensor.
    """

    live: int = 0
    peak: int = 0
    storages: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)
    samples: list[tuple[weakref.ref[_ByteSamples], int]] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Storages that are not counted yet."""
        with self.lock:
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.storages:
                    self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                    self.live += storage.nbytes()
            self._reach()

    def add_samples(self, samples: _ByteSamples) -> None:
        """Arrays and bytes in a list of samples, as long as the list is there."""
        num_bytes = sum(map(_held_bytes, tree_leaves(list(samples))))
        with self.lock:
            self.samples.append((weakref.ref(samples), num_bytes))
            self.live += num_bytes
            self._reach()

    def _reach(self) -> None:
        if self.live > self.peak:  # at most: some may have gone
            self.drop_dead()
            self.peak = max(self.peak, self.live)

    def drop_dead(self) -> None:
        """Forget what has no owner any more."""
        for key, (reference, num_bytes) in list(self.storages.items()):
            if reference.expired():
                del self.storages[key]
                self.live -= num_bytes
        self.live -= sum(num_bytes for samples, num_bytes in self.samples if samples() is None)
        self.samples = [held for held in self.samples if held[0]() is not None]


def _held_bytes(value: Any) -> int:
    """Bytes of what a data set hands on and is no tensor."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    return len(value) if isinstance(value, bytes | bytearray) else 0
