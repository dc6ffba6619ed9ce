"""CUDA graphs: a region whose tensors lie where they lay before is played, as one launch.

To start an op costs the host microseconds, and a small model on a GPU is made of nothing else.  A
region runs the same kernels in every act; only where its tensors lie may change.  What it makes is
copied to slots of the region's own, of which it gets one more whenever all are held; what it reads
comes from slots of other regions, from variables, or from an allocator that hands out the same few
places step after step.  So a region has a recording for each slot, and each place that its inputs
have lain in more than once.

What passes within a region lies in memory that all recordings of a rank share, for one is played at
a time.  That is why results are copied out of it: registers keep them while other regions act, in
any order.

Relied on of torch: between capture_begin and capture_end what is enqueued on the stream is recorded
and does not run, and memory for it is of the pool; memory taken on another stream is not;
_storage_Use_Count counts the tensors of a storage.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch

from flowrun.engine.plan import Plan, RegionWork
from flowrun.engine.runtime.kernels import Kernel, Kernels
from flowrun.engine.sums import sums_of

WARM_STEPS = 3  # op after op: the first two are metered, and load what kernels need
MOST_RECORDINGS = 32  # of one region; at other places its ops run one by one
STALE = 128  # acts of a region without a play, after which a recording makes room for another
_LATELY = 64  # places that are remembered

Place = tuple[Any, ...]  # of each input that is no variable: address and strides


class Grapher(Protocol):
    """Makes the recordings of one rank."""

    def record(
        self, run: Kernel, inputs: list[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Callable[[], object]]:
        """What `run` makes of the inputs, and what plays it; it has not run yet."""

    def outside(self, like: torch.Tensor) -> torch.Tensor:
        """Within `run`: memory in which nothing passes."""


def graphed(kernels: Kernels, grapher: Callable[[], Grapher] | None = None) -> Kernels:
    """The same kernels, played where they can be.  grapher: called once for each rank."""

    def of_rank(plan: Plan, stage: int, coordinate: tuple[int, ...]) -> Mapping[int, Kernel]:
        own = (grapher or OnCuda)()
        played: dict[int, Kernel] = {}
        for actor_id, kernel in kernels(plan, stage, coordinate).items():
            actor = plan.actors[actor_id]
            assert isinstance(actor.work, RegionWork)
            inputs = (*actor.work.reads, *sums_of(plan, actor.work))
            moving = [k for k, name in enumerate(inputs) if name not in plan.variables]
            warm = WARM_STEPS * plan.acts_per_step(actor)
            played[actor_id] = Played(kernel, moving, warm, own)
        return played

    return of_rank


class Played:
    """The kernel of a region.

    moving: positions of inputs that are no variables, which never move.  warm: acts that run op
    after op first.
    """

    def __init__(self, kernel: Kernel, moving: Sequence[int], warm: int, grapher: Grapher) -> None:
        self.kernel = kernel
        self.moving = moving
        self.warm = warm
        self.grapher = grapher
        self.slots: list[Slot] = []
        self.recordings: OrderedDict[tuple[Place, int], Recording] = OrderedDict()  # by slot
        self.played: dict[tuple[Place, int], int] = {}  # the act in which each was played last
        self.lately: deque[Place] = deque(maxlen=_LATELY)
        self.acts = 0
        self.plays = 0

    def __call__(self, values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if self.warm:
            self.warm -= 1
            return self.kernel(values)
        self.acts += 1
        recording = self._recording(values)
        if recording is None:
            return self.kernel(values)
        self.plays += 1
        recording.play()
        made = tuple(result.of(values) for result in recording.results)
        values.clear()
        return made

    def _recording(self, values: list[torch.Tensor]) -> Recording | None:
        """One that reads these and writes over nothing that is still held; made if there is none,
        and such inputs were here before.
        """
        place = tuple(
            None if (value := values[k]) is None else (value.data_ptr(), value.stride())
            for k in self.moving
        )
        for k in range(len(self.slots)):
            found = self.recordings.get((place, k))
            if found is not None and found.is_free():
                self.recordings.move_to_end((place, k))
                self.played[place, k] = self.acts
                return found
        if place not in self.lately:
            self.lately.append(place)
            return None
        if len(self.recordings) >= MOST_RECORDINGS and not self._forget():
            return None
        slot = next((k for k, slot in enumerate(self.slots) if slot.is_free()), len(self.slots))
        if slot == len(self.slots):
            self.slots.append(Slot(self.grapher))
        recording = recorded(self.kernel, values, self.grapher, self.slots[slot])
        self.recordings[place, slot], self.played[place, slot] = recording, self.acts
        return recording

    def _forget(self) -> bool:
        """The recording that was not played for longest goes, if it is stale: were one forgotten
        that will be played again, more places in turn than there is room for would be recorded in
        every act.
        """
        oldest = next(iter(self.recordings))
        if self.acts - self.played[oldest] < STALE:
            return False
        del self.recordings[oldest], self.played[oldest]
        return True


class Slot:
    """Memory for one version of what a region makes, result by result, as they are first needed."""

    def __init__(self, grapher: Grapher) -> None:
        self.grapher = grapher
        self.tensors: dict[int, torch.Tensor] = {}
        self.storages: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def fill(self, result: int, value: torch.Tensor) -> torch.Tensor:
        """Copy a result there."""
        if result not in self.tensors:
            own = self.tensors[result] = self.grapher.outside(value)
            storage = own.untyped_storage()
            self.storages[result] = (storage, _uses(storage))
        return self.tensors[result].copy_(value)

    def is_free(self, results: Collection[int] | None = None) -> bool:
        """True if nobody holds these, or any."""
        wanted = self.storages if results is None else results
        return all(_uses(self.storages[k][0]) == self.storages[k][1] for k in wanted)


class Recording(NamedTuple):
    """A region at one place, filling one slot."""

    play: Callable[[], object]
    results: tuple[Own | Handed, ...]
    slot: Slot
    fills: tuple[int, ...]

    def is_free(self) -> bool:
        """True if nobody holds what it would write over."""
        return self.slot.is_free(self.fills)


class Own(NamedTuple):
    """A result in the slot."""

    tensor: torch.Tensor

    def of(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """A tensor of its own there: whoever holds it is counted."""
        return self.tensor.detach()


class Handed(NamedTuple):
    """A result that lies in an input.  shift: bytes from where the input begins; None: it is the
    input.
    """

    position: int
    shift: int | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """This of the inputs of an act."""
        value = inputs[self.position]
        if self.shift is None:
            return value
        begin = int(value.storage_offset()) * value.itemsize + self.shift
        own = torch.empty(0, dtype=self.dtype, device=value.device)
        return own.set_(
            value.untyped_storage(), begin // self.dtype.itemsize, self.size, self.stride
        )


def recorded(
    kernel: Kernel, values: Sequence[torch.Tensor], grapher: Grapher, slot: Slot
) -> Recording:
    """Record it.  Raises RuntimeError if it holds something that cannot be."""
    there = {_address(v): k for k, v in enumerate(values) if v is not None and v.numel()}

    def run(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        made = enumerate(kernel(inputs))
        return tuple(x if _address(x) in there else slot.fill(k, x) for k, x in made)

    try:
        made, play = grapher.record(run, list(values))
    except Exception as error:
        raise RuntimeError(
            f"a CUDA graph cannot hold this region: {type(error).__name__}: {error}\n"
            "engine.cuda_graphs=false starts its ops one by one."
        ) from error
    handed = {
        k: _handed(x, values, there[_address(x)])
        for k, x in enumerate(made)
        if _address(x) in there
    }
    fills = tuple(k for k in range(len(made)) if k not in handed)
    results = tuple(handed[k] if k in handed else Own(slot.tensors[k]) for k in range(len(made)))
    return Recording(play, results, slot, fills)


def _handed(result: torch.Tensor, values: Sequence[torch.Tensor], position: int) -> Handed:
    """position: of an input in the same storage."""
    how = (result.dtype, tuple(result.shape), result.stride())
    for k, value in enumerate(values):
        if value is None or value.data_ptr() != result.data_ptr():
            continue
        if (value.dtype, tuple(value.shape), value.stride()) == how:
            return Handed(k, None, *how)
    return Handed(position, result.data_ptr() - values[position].data_ptr(), *how)


def _address(value: torch.Tensor) -> int:
    """Of its storage; 0 without one."""
    return value.untyped_storage().data_ptr()


def _uses(storage: torch.UntypedStorage) -> int:
    count: int = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return count


class OnCuda:
    """CUDA's own.

    Not by torch.cuda.graph, which first waits for the device: there a receive may be under way
    whose sender waits for what this rank would do next.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self.computing = torch.cuda.current_stream()

    def record(
        self, run: Kernel, inputs: list[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Callable[[], object]]:
        """See Grapher."""
        graph = torch.cuda.CUDAGraph()
        self.computing = torch.cuda.current_stream()
        with torch.cuda.stream(self.stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # of views alone
            # other threads call CUDA meanwhile, and `outside` may have to ask it for memory
            graph.capture_begin(pool=self.pool, capture_error_mode="relaxed")
            try:
                made = run(inputs)
            except Exception:
                with suppress(RuntimeError):  # which tells less
                    graph.capture_end()
                raise
            graph.capture_end()
        return made, graph.replay

    def outside(self, like: torch.Tensor) -> torch.Tensor:
        """See Grapher."""
        with torch.cuda.stream(self.computing):
            return torch.empty_like(like)
