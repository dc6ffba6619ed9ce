"""CUDA graphs: a region is one launch, played from a recording of its kernels.

To start an op costs the host microseconds, and a small model on a GPU is made of nothing else.  A
region runs the same kernels in every act; only where its tensors lie may change.  What it makes is
copied to slots of the region's own, of which it gets one more whenever all are held.  Slots and
variables never move, so a region has a recording for each combination of slots that it reads and
fills.  All else that it reads (batches, what another rank sent) lies elsewhere in every act, and is
copied first to where the recording looks for it: an allocator repeats itself too seldom.

What passes within a region lies in memory that all recordings of a rank share, for one is played at
a time.  That is why results are copied out of it: registers keep them while other regions act, in
any order.

Relied on of torch: between capture_begin and capture_end what is enqueued on the stream is recorded
and does not run, and memory for it is of the pool; memory taken on another stream is not;
_storage_Use_Count counts the tensors of a storage.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch

from flowrun.engine.actors.plan import Plan, RegionWork
from flowrun.engine.actors.sums import sums_of
from flowrun.engine.runtime.kernels.kernels import Kernel, Kernels

WARM_STEPS = 3  # op after op: the first two are metered, and load what kernels need
MOST_PLACES = 16  # of one region; beyond them all that moves is copied

# Of each input that is no variable: its address, None if it is copied first, and its strides; None
# if it is not there.
InputAddresses = tuple[tuple[int | None, tuple[int, ...]] | None, ...]


class Grapher(Protocol):
    """Makes the recordings of one rank."""

    def record(
        self, run: Kernel, inputs: list[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Callable[[], object]]:
        """What `run` makes of the inputs, and what plays it; it has not run yet."""

    def outside(self, like: torch.Tensor) -> torch.Tensor:
        """Memory that stays, for a `twin` of this: nothing passes there, within `run` or before."""


def graphed(kernels: Kernels, grapher: Callable[[], Grapher] | None = None) -> Kernels:
    """The same kernels, played where they can be.  grapher: called once for each rank."""

    def of_rank(
        plan: Plan, stage: int, coordinate: tuple[int, ...], device: torch.device
    ) -> Mapping[int, Kernel]:
        lasting = Lasting((grapher or OnCuda)())
        played: dict[int, Kernel] = {}
        for actor_id, kernel in kernels(plan, stage, coordinate, device).items():
            actor = plan.actors[actor_id]
            assert isinstance(actor.work, RegionWork)
            inputs = (*actor.work.reads, *sums_of(plan, actor.work))
            moving = [k for k, name in enumerate(inputs) if name not in plan.variables]
            warm = WARM_STEPS * plan.acts_per_step(actor)
            played[actor_id] = Played(kernel, moving, warm, lasting)
        return played

    return of_rank


class Lasting:
    """The memory of a rank that stays where it is until the end."""

    def __init__(self, grapher: Grapher) -> None:
        self.grapher = grapher
        self.addresses: set[int] = set()
        self.lent: dict[Hashable, list[torch.Tensor]] = {}  # inputs, by how they lie

    def twin(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor there that lies as this one does."""
        own = self.grapher.outside(like)
        self.addresses.add(_address(own))
        return own

    def copies(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where inputs of one recording are copied to, right before it is played: other regions use
        the same memory.
        """
        taken: Counter[Hashable] = Counter()
        found = []
        for value in values:
            how = (value.dtype, value.size(), value.stride())
            there = self.lent.setdefault(how, [])
            if taken[how] == len(there):
                there.append(self.twin(value))
            found.append(there[taken[how]])
            taken[how] += 1
        return found

    def holds(self, value: torch.Tensor) -> bool:
        """True if it lies there."""
        return _address(value) in self.addresses


class Played:
    """The kernel of a region.

    moving: positions of inputs that are no variables, which never move.  warm: acts that run op
    after op first.
    """

    def __init__(self, kernel: Kernel, moving: Sequence[int], warm: int, lasting: Lasting) -> None:
        self.kernel = kernel
        self.moving = moving
        self.warm = warm
        self.lasting = lasting
        self.slots: list[Slot] = []
        self.recordings: dict[InputAddresses, dict[int, Recording]] = {}  # by slot
        self.plays = 0

    def __call__(self, values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if self.warm:
            self.warm -= 1
            return self.kernel(values)
        recording = self._recording(values)
        for position, copy in recording.copied:
            write(copy, values[position])
        recording.play()
        self.plays += 1
        made = tuple(result.of(values) for result in recording.results)
        values.clear()
        return made

    def _recording(self, values: list[torch.Tensor]) -> Recording:
        """One that reads these and writes over nothing that is still held; made if there is
        none.
        """
        place = self._place(values)
        if place not in self.recordings and len(self.recordings) >= MOST_PLACES:
            place = tuple(None if lies is None else (None, lies[1]) for lies in place)
        there = self.recordings.setdefault(place, {})
        for recording in there.values():
            if recording.is_free():
                return recording
        free = (k for k, slot in enumerate(self.slots) if slot.is_free())
        slot = next(free, len(self.slots))
        if slot == len(self.slots):
            self.slots.append(Slot(self.lasting))
        moved = [
            k
            for k, lies in zip(self.moving, place, strict=True)
            if lies is not None and lies[0] is None
        ]
        copies = self.lasting.copies([values[k] for k in moved])
        copied = list(zip(moved, copies, strict=True))
        there[slot] = recorded(self.kernel, values, copied, self.lasting, self.slots[slot])
        return there[slot]

    def _place(self, values: list[torch.Tensor]) -> InputAddresses:
        return tuple(
            None
            if (value := values[k]) is None
            else (value.data_ptr() if self.lasting.holds(value) else None, value.stride())
            for k in self.moving
        )


class Slot:
    """Memory for one version of what a region makes, result by result, as they are first needed."""

    def __init__(self, lasting: Lasting) -> None:
        self.lasting = lasting
        self.tensors: dict[int, torch.Tensor] = {}
        self.storages: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def fill(self, result: int, value: torch.Tensor) -> torch.Tensor:
        """Copy a result there."""
        if result not in self.tensors:
            own = self.tensors[result] = self.lasting.twin(value)
            storage = own.untyped_storage()
            self.storages[result] = (storage, _uses(storage))
        write(self.tensors[result], value)
        return self.tensors[result]

    def is_free(self, results: Collection[int] | None = None) -> bool:
        """True if nobody holds these, or any."""
        wanted = self.storages if results is None else results
        return all(_uses(self.storages[k][0]) == self.storages[k][1] for k in wanted)


class Recording(NamedTuple):
    """A region at one place, filling one slot.  copied: inputs, and where they are copied to before
    it is played.
    """

    play: Callable[[], object]
    copied: tuple[tuple[int, torch.Tensor], ...]
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
    kernel: Kernel,
    values: Sequence[torch.Tensor],
    copied: Sequence[tuple[int, torch.Tensor]],
    lasting: Lasting,
    slot: Slot,
) -> Recording:
    """Record it.  Raises RuntimeError if it holds something that cannot be."""
    given = list(values)
    for position, copy in copied:
        given[position] = copy
    copies = {position for position, _ in copied}
    there = {
        _address(v): k
        for k, v in enumerate(given)
        if v is not None and v.numel() and k not in copies
    }

    def run(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        made = enumerate(kernel(inputs))
        return tuple(x if _address(x) in there else slot.fill(k, x) for k, x in made)

    try:
        made, play = lasting.grapher.record(run, list(given))
    except Exception as error:
        raise RuntimeError(
            f"a CUDA graph cannot hold this region: {type(error).__name__}: {error}\n"
            "engine.cuda_graphs=false starts its ops one by one."
        ) from error
    handed = {
        k: _handed(x, given, there[_address(x)]) for k, x in enumerate(made) if _address(x) in there
    }
    fills = tuple(k for k in range(len(made)) if k not in handed)
    results = tuple(handed[k] if k in handed else Own(slot.tensors[k]) for k in range(len(made)))
    return Recording(play, tuple(copied), results, slot, fills)


def _handed(result: torch.Tensor, values: Sequence[torch.Tensor], position: int) -> Handed:
    """position: of an input in the same storage."""
    how = (result.dtype, tuple(result.shape), result.stride())
    for k, value in enumerate(values):
        if value is None or value.data_ptr() != result.data_ptr():
            continue
        if (value.dtype, tuple(value.shape), value.stride()) == how:
            return Handed(k, None, *how)
    return Handed(position, result.data_ptr() - values[position].data_ptr(), *how)


def twin(like: torch.Tensor) -> torch.Tensor:
    """New memory for a tensor that lies as this one does, elements that are shown more than once
    included (expand).
    """
    once = _once(like)
    own = torch.empty_strided(once.size(), once.stride(), dtype=like.dtype, device=like.device)
    return own.as_strided(like.size(), like.stride())


def write(own: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a tensor to its twin."""
    _once(own).copy_(_once(value))


def _once(value: torch.Tensor) -> torch.Tensor:
    """Each of its elements once."""
    if 0 not in value.stride():
        return value
    size = [1 if stride == 0 else n for n, stride in zip(value.size(), value.stride(), strict=True)]
    return value.as_strided(size, value.stride())


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
            return twin(like)
