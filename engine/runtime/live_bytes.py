"""LiveBytes: the bytes of tensors that are alive in this process, measured exactly.

A mode under which every torch op reports what it returns; a storage counts from the op that made it
until its last owner is gone, whoever that is (a register, a view, a message under way).  It slows
ops down, so drivers measure the first steps of a run alone.  What an op allocates and frees within
itself is not seen, nor what libraries take: that is the process's anonymous memory less this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """peak: most bytes at once while the mode was on.  known: tensors that are there already."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._add(known)

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
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.live += storage.nbytes()
        if self.live > self.peak:  # at most: some may have gone
            self._drop_dead()
            self.peak = max(self.peak, self.live)

    def _drop_dead(self) -> None:
        for key, (reference, num_bytes) in list(self._storages.items()):
            if reference.expired():
                del self._storages[key]
                self.live -= num_bytes
