"""The memory of a rank while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flowrun.engine.runtime.drivers.distributed import DistributedRank
from flowrun.engine.runtime.process.process_memory import most_taken, taken


class RankMemory:
    """The memory of a rank, without what it inherited from the launcher.

    peak: most bytes of tensors at once: on the CPU those of the first steps, counted one by one; on
    CUDA what torch has handed out.  process_peak: most bytes of anonymous memory, with what
    allocator and libraries keep, on CUDA what the allocator has taken, up to the first evaluation
    or checkpoint: after that theirs are in the same number.  Shared memory comes on top: messages
    (Links.message_bytes) to both figures, variables (DistributedRank.shared_bytes) to the second.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.inherited = taken()
        self.peak = self.process_peak = 0

    @contextmanager
    def of_training(self, rank: DistributedRank) -> Iterator[None]:
        """Around a segment of training: what others take between two of them is left out."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        yield
        here = torch.cuda.max_memory_allocated(self.device) if cuda else rank.metering.peak
        self.peak = max(self.peak, here)
        most = torch.cuda.max_memory_reserved(self.device) if cuda else self._most_taken()
        self.process_peak = self.process_peak or most

    def _most_taken(self) -> int:
        return max(0, most_taken() - self.inherited)
