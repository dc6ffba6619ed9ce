"""What goes between a host and a device that computes behind it, without either waiting.

The host enqueues a step on CUDA long before it is computed.  A copy from or to memory that may be
paged out would hold it up until the device has come to it; from and to pinned memory it is enqueued
like any other work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def on_device(value: Tensor, device: torch.device) -> Tensor:
    """The same on the device."""
    if device.type == "cuda" and value.is_cpu:
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A scalar, which on CUDA is a kernel's argument and no copy."""
    return torch.full((), value, dtype=dtype, device=device)


class HostReadback:
    """Scalars, or lists of them, on their way to the host: as they are at this moment of the
    stream.
    """

    def __init__(self, values: Iterable[Tensor]) -> None:
        self._values: Sequence[Tensor] = list(values)
        self._event: Any = None
        if any(value.is_cuda for value in self._values):
            self._values = [_pinned(value) for value in self._values]
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[Any]:
        """Sleeps until they are there; from any thread."""
        if self._event is not None:
            self._event.synchronize()
        return [value.tolist() for value in self._values]


def _pinned(value: Tensor) -> Tensor:
    there = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
    return there.copy_(value, non_blocking=True)
