"""count_reserved: the memory of a device that torch's allocator reserves for a rank.

Two steps run on the rehearsal's clock, and every tensor takes its place by the rules of torch's
allocator with expandable segments (c10/cuda/CUDACachingAllocator.cpp): each stream has one range of
addresses, in which a tensor takes the smallest hole that fits, or else new memory at the end.  So
what is reserved is more than what tensors take at once: holes are too small, and memory that one
stream has freed serves no other.
"""

from __future__ import annotations

from collections import defaultdict

from flowrun.engine.actors.plan import BoxWork, Plan, RegionWork, TransferWork
from flowrun.engine.boxing.boxing import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from flowrun.engine.cost.first_fit import BestFit
from flowrun.engine.cost.live import Live, StorageVersion
from flowrun.engine.rehearsal.clock import Clock

_COMPUTES, _GATHERS, _REDUCES = "compute", (ALL_GATHER,), (REDUCE_SCATTER, ALL_REDUCE)
_STEPS = 2  # holes that the first step leaves meet the second
_Address = tuple[str, int]  # a stream, and where in its range


def count_reserved(plan: Plan, *, streams_of_fsdp: bool = False) -> int:
    """Return the most bytes that are reserved for a rank; what CUDA and libraries take for
    themselves comes on top.

    streams_of_fsdp: weights are gathered, and gradients reduced, into memory of streams of their
    own, as by torch's FSDP; else all is allocated on the stream that computes, as flowrun does.
    """
    clock = Clock(plan, lambda actor: actor.seconds, _STEPS, skip_repeats=False)
    ranks = [_Allocated(plan, k, streams_of_fsdp) for k in range(len(plan.placements))]
    clock.count_memory, clock.state.memory = True, [*ranks]
    clock.run()
    return max(rank.reserved for rank in ranks)


class _Allocated(Live):
    """Live bytes, each tensor with its place.

    made: region under way -> storage -> the place of what it leaves.  buffers: communication under
    way -> the place of its message.  places: of what registers hold.  ending: the actor that ends.
    """

    def __init__(self, plan: Plan, stage: int, streams_of_fsdp: bool) -> None:
        super().__init__(plan, stage)
        self.streams_of_fsdp = streams_of_fsdp
        self.ranges: dict[str, BestFit] = defaultdict(lambda: BestFit(1 << 60))
        self.made: dict[int, dict[str, _Address]] = {}
        self.buffers: dict[int, _Address] = {}
        self.places: dict[StorageVersion, _Address] = {}
        self.ending = -1

    @property
    def reserved(self) -> int:
        """Variables, and the ranges of all streams."""
        ranges = sum(each.touched for each in self.ranges.values())
        return sum(self.footprint.kind_bytes.values()) + ranges

    def begin(self, actor: int, act: int) -> None:
        super().begin(actor, act)
        work, freed = self.plan.actors[actor].work, self.freed_after(self._read[actor])
        if isinstance(work, RegionWork):
            self._run(actor, work, dict(freed), self.is_first(actor, act))
            return
        if isinstance(work, BoxWork | TransferWork):
            message = self.footprint.message(self.plan.actors[actor])
            stream = self._stream(actor, _GATHERS)
            self.buffers[actor] = self._take(message.held, stream)
            for held in () if message.keeps else freed:
                self._free(held)

    def end(self, actor: int, act: int) -> None:
        self.ending = actor
        super().end(actor, act)
        for place in self.made.pop(actor, {}).values():
            self._give(place)
        if actor in self.buffers:
            self._give(self.buffers.pop(actor))

    def _run(self, actor: int, work: RegionWork, freed: dict[str, int], first: bool) -> None:
        """Give each op of a region a place for what it makes, and free what it reads last.

        freed: storage -> its version, of what nobody reads after the region.
        """
        made = self.made.setdefault(actor, {})
        for fresh, workspace, dead in self.footprint.ops_of(work, frozenset(freed), first):
            made |= {storage: self._take(self._size(storage)) for storage in sorted(fresh)}
            self._give(self._take(workspace))
            for storage in sorted(dead):
                if storage in made:
                    self._give(made.pop(storage))
                elif storage in freed:
                    self._free((storage, freed[storage]))

    def _add(self, storage: str, version: int, count: int) -> None:
        super()._add(storage, version, count)
        if count < 0:
            self._free((storage, version))
            return
        place = self.made.get(self.ending, {}).pop(storage, None)
        stream = self._stream(self.ending, _REDUCES)
        self.places[storage, version] = place or self._take(self._size(storage), stream)

    def _stream(self, actor: int, kinds: tuple[str, ...]) -> str:
        """Return the stream on which an actor allocates: boxings of `kinds` may have their own."""
        work = self.plan.actors[actor].work
        apart = self.streams_of_fsdp and isinstance(work, BoxWork) and work.step.kind in kinds
        return kinds[0] if apart else _COMPUTES

    def _free(self, held: StorageVersion) -> None:
        if held in self.places:
            self._give(self.places.pop(held))

    def _take(self, num_bytes: int, stream: str = _COMPUTES) -> _Address:
        return stream, self.ranges[stream].take(num_bytes)

    def _give(self, place: _Address) -> None:
        self.ranges[place[0]].give(place[1])
