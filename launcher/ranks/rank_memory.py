"""What ranks measure: their memory, figures of all ranks of a host by step, and of a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from flowrun.engine.runtime.drivers.distributed import DistributedRank
from flowrun.engine.runtime.drivers.pulse import Pulse
from flowrun.engine.runtime.process.process_memory import most_taken, taken

_LOOK_S = 1.0  # from one look at the memory of processes to the next


class RankMemory:
    """The memory of a rank, without what it inherited from the launcher, though a write copies some
    30 MB of its pages: they are anonymous before the fork and after it.

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
    def of_training(self, *ranks: DistributedRank) -> Iterator[None]:
        """Around a segment of training: what others take between two of them is left out.

        ranks: this one in each plan of a step.
        """
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        yield
        most_live = max(rank.live_bytes.peak for rank in ranks)
        here = torch.cuda.max_memory_allocated(self.device) if cuda else most_live
        self.peak = max(self.peak, here)
        most = max(0, most_taken() - self.inherited)
        most = torch.cuda.max_memory_reserved(self.device) if cuda else most
        self.process_peak = self.process_peak or most


class RankGauges:
    """Figures of the ranks of a host when a step has ended, by tag (launcher/listeners).

    pulses: of the ranks.  on_cpu: their waits are counted.  clock: in seconds.
    """

    def __init__(
        self, pulses: Sequence[Pulse], on_cpu: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pulses, self._on_cpu, self._clock = pulses, on_cpu, clock
        self._waited = [0.0 for _ in pulses]
        self._due = 0.0

    def read(self) -> dict[str, float]:
        """Return the longest wait since the last call, and once a second the most memory."""
        found: dict[str, float] = {}
        if self._on_cpu:
            before, self._waited = self._waited, [pulse.waited_s for pulse in self._pulses]
            waits = (now - then for then, now in zip(before, self._waited, strict=True))
            found["waited_s"] = max(waits, default=0.0)
        if self._clock() >= self._due:
            self._due = self._clock() + _LOOK_S
            found["memory_bytes"] = float(max(map(_memory_of, self._pulses), default=0))
        return found


def _memory_of(pulse: Pulse) -> int:
    return pulse.device_bytes or (taken(pulse.process) if pulse.process else 0)
