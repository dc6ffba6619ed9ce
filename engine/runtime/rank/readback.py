"""Copies between a host and a device that computes later, without a wait of either.

The host enqueues a step on CUDA long before it is computed.  A copy from or to memory that may be
paged out would stop the host until the device has come to it; a copy from or to pinned memory is
enqueued like any other work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def copy_to_device(value: Tensor, device: torch.device) -> Tensor:
    """Return a tensor's copy on the device, without a wait; or the tensor itself if it is on it."""
    if device.type == "cuda" and value.is_cpu:
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def await_copies(tensors: Iterable[object], device: torch.device) -> None:
    """Sleep until this thread's stream has made tensors on the device, which the stream that
    computes reads: their memory is free when that has done so.
    """
    if device.type == "cuda":
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                tensor.record_stream(torch.cuda.default_stream(device))
        reached = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        reached.record()
        reached.synchronize()


def copy_between(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy tensors into others of the other memory: after what the stream that
    computes has been given so far, and, on CUDA, when the copies are there.
    """
    device = next((x.device for x in (*sources, *targets) if x.is_cuda), torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
    await_copies((x for x in targets if x.is_cuda), device)


def make_scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a scalar tensor; on CUDA its value is an argument of a kernel: nothing is copied."""
    return torch.full((), value, dtype=dtype, device=device)


class HostReadback:
    """Scalars or vectors that are copied to the host at this moment of the stream."""

    def __init__(self, values: Iterable[Tensor]) -> None:
        self._values: Sequence[Tensor] = list(values)
        self._event: torch.cuda.Event | None = None
        if any(value.is_cuda for value in self._values):
            self._values = [_copy_to_host(value) for value in self._values]
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[Any]:
        """Sleep until the copies are done, in any thread, and return the numbers."""
        if self._event is not None:
            self._event.synchronize()
        return [value.tolist() for value in self._values]


def _copy_to_host(value: Tensor) -> Tensor:
    pinned = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(value, non_blocking=True)
