"""Graphs on the CPU: a stand-in that holds to what CUDA graphs hold to: what is recorded has
not run, what was read is found by its address and not kept, what was made is written again by each
play.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowrun.engine.runtime.kernels.cuda_graphs import empty_twin
from flowrun.engine.runtime.kernels.kernels import Kernel


class OnCpu:
    """Of one rank."""

    def __init__(self) -> None:
        self.lasting: set[int] = set()  # addresses; nobody frees what lies there

    def allocate(self, like: Tensor) -> Tensor:
        """Memory in which nothing passes; zeros, for `record` runs what it records."""
        own = empty_twin(like)
        storage = own.untyped_storage()
        ctypes.memset(storage.data_ptr(), 0, storage.nbytes())  # no op that would be recorded
        self.lasting.add(storage.data_ptr())
        return own

    def record(
        self, run: Kernel, inputs: list[Tensor]
    ) -> tuple[Sequence[Tensor], Callable[[], object]]:
        """See graphs.Grapher."""
        there: dict[int, Tensor] = {}
        lent = [None if x is None else _lent(x, there) for x in inputs]
        inputs.clear()
        before = {address: whole.clone() for address, whole in there.items()}
        log = _Log()
        with log:
            made = run(lent)
        for result in made:  # nobody may read this before it is played
            result.untyped_storage().fill_(0xFF)
        log.close({*there, *self.lasting})
        for address, whole in there.items():
            whole.copy_(before[address])
        return made, log.play


def _lent(value: Tensor, there: dict[int, Tensor]) -> Tensor:
    """The same memory, not kept: as addresses in the arguments of a kernel."""
    storage = value.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    if not size:
        return value.clone()
    if address not in there:
        memory = (ctypes.c_char * size).from_address(address)
        there[address] = torch.frombuffer(memory, dtype=torch.uint8)
    own = torch.empty(0, dtype=value.dtype)
    whole = there[address].untyped_storage()
    return own.set_(whole, value.storage_offset(), value.shape, value.stride())


class _Log(TorchDispatchMode):
    """Every op that runs, with the tensors that it was given and has made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.passing: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, _tensors(out)))
        return out

    def close(self, lasting: Collection[int]) -> None:
        """No op follows.  lasting: addresses at which nothing passes."""
        made = [x.untyped_storage() for *_, tensors in self.calls for x in tensors]
        passing = {x.data_ptr(): x for x in made if x.data_ptr() not in lasting}
        self.passing = list(passing.values())

    def play(self) -> None:
        """Run them again, where they ran; then others use the memory of what passed."""
        for func, args, kwargs, made in self.calls:
            for old, new in zip(made, _tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        for storage in self.passing:
            storage.fill_(0xFF)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]
