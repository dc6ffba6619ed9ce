"""Pending: communication under way; Transport: the one interface of what carries it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flowrun.engine.boxing.boxing import BoxingStep
from flowrun.engine.ir.placement import Shape
from flowrun.engine.runtime.transport.transport import BucketLayout

Callback = Callable[[], None]
Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """A step that moves bytes, as a member of its group takes part in it.

    layouts: one for each tensor of a bucket (transport.layout_of).  ranks: the group, in order of
    their coordinate on the axis.  index: this rank's.
    """

    step: BoxingStep
    layouts: BucketLayout
    ranks: Ranks
    index: int

    @property
    def after(self) -> list[Shape]:
        """Shapes of what this member holds after the step."""
        return self.layouts.after(self.index)


class PeerGone(RuntimeError):
    """Another rank is not there any more, or cannot be reached."""


class Pending:
    """A step of a boxing for a bucket of tensors, or one message, that has begun.

    This one has nothing to wait for.  sent_bytes: what this rank sends for it, as the tables count;
    0 for a receive.
    """

    def __init__(self, finish: Callable[[], list[Tensor]], sent_bytes: int = 0) -> None:
        """finish: makes the tensors, once it is done."""
        self.sent_bytes = sent_bytes
        self._finish: Callable[[], list[Tensor]] | None = finish
        self._result: list[Tensor] = []

    def wait(self) -> list[Tensor]:
        """The tensors after the step (of a send: none), again at every call.

        Blocks the host until then.  Raises PeerGone.
        """
        if self._finish is not None:
            self._block()
            self._result = self._finish()
            self._finish = None  # what it holds may go
        return self._result

    def _block(self) -> None:
        pass

    def on_done(self, callback: Callback) -> None:
        """Call back, once, when `wait` will not block any more (it may raise).

        At once if that is so already.
        """
        callback()


class Transport(Protocol):
    """A carrier of messages between ranks: shared memory of a host, or torch.distributed."""

    def reaches(self, ranks: Ranks) -> bool:
        """Return whether it carries messages between these ranks; all ranks answer alike."""

    def join(self, ranks: Ranks) -> None:
        """Make a group that it reaches; all ranks make all groups, in one order."""

    def has_group(self, ranks: Ranks) -> bool:
        """Return whether `join` has made the group."""

    def start(self, collective: Collective, bucket: Sequence[Tensor]) -> Pending:
        """Begin a step for a bucket of tensors of one dtype and kind of step.

        All members begin the steps of a group in one order.
        """

    def send(self, tensors: Sequence[Tensor], target_rank: int, tag: int) -> Pending:
        """Begin one message to `target_rank`, of tensors of any dtypes; messages of one tag arrive
        in order.
        """

    def receive(
        self, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], source_rank: int, tag: int
    ) -> Pending:
        """Post the slot for one message of `send` from `source_rank` with this tag; both sides know
        its shapes and dtypes.
        """

    def close(self) -> None:
        """Leave; every message must be done."""


# ---- messages of tensors of any dtypes ----------------------------------------------------------


def put_tensors(message: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write tensors into a message (bytes, flat)."""
    views = tensors_in(message, [t.shape for t in tensors], [t.dtype for t in tensors])
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)


def tensors_in(
    message: Tensor, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """Return the tensors of a message (bytes), of these shapes and dtypes, as views of it."""
    out, start = [message] * len(shapes), 0
    for k in _widest_first(dtypes):
        size = math.prod(shapes[k]) * dtypes[k].itemsize
        out[k] = message[start : start + size].view(dtypes[k]).view(shapes[k])
        start += size
    return out


def num_bytes(shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> int:
    """Count the bytes of a message of tensors of these shapes and dtypes."""
    pairs = zip(shapes, dtypes, strict=True)
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in pairs)


def _widest_first(dtypes: Iterable[torch.dtype]) -> list[int]:
    """Return the order of tensors in a message: each starts where its dtype may start."""
    sizes = [dtype.itemsize for dtype in dtypes]
    return sorted(range(len(sizes)), key=lambda k: -sizes[k])
