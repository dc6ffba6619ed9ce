"""CUDA graphs: a region is one launch that replays a recording of its kernels.

Launching an op costs the host microseconds, which dominate the step of a small model on a GPU.  A
region runs the same kernels in every act; only the addresses of its tensors may change.  Results
are copied to slots that the region owns; it gets another slot whenever all are held.  Slots and
variables never move, so a region has one recording for each combination of slots that it reads and
fills.  Other inputs (batches, what another rank sent) have new addresses in every act, as an
allocator rarely repeats itself, and are first copied to the addresses of the recording.

Intermediate tensors lie in memory that all recordings of a rank share, as one plays at a time.
That is why results are copied out: registers hold them while other regions act, in any order.

Relied upon of torch: between capture_begin and capture_end, work enqueued on the stream is recorded
and does not run, and its memory comes from the pool, while memory allocated on another stream does
not; _storage_Use_Count counts the tensors of a storage.
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

WARM_STEPS = 3  # steps that run op after op: memory is counted in the first two, kernels are loaded
MAX_ADDRESS_SETS = 16  # sets of input addresses of a region; beyond them every input is copied

# for each input that is no variable: (its address, None if it is copied first; its strides), or
# None if the input is absent
InputAddresses = tuple[tuple[int | None, tuple[int, ...]] | None, ...]


class Grapher(Protocol):
    """A maker of one rank's recordings."""

    def record(
        self, run: Kernel, inputs: list[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Callable[[], object]]:
        """Record `run` on the inputs; return (its results, a function that replays it).

        Nothing has run yet.
        """

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor like this one in memory of its own, outside of the shared pool."""


def record_kernels(kernels: Kernels, grapher: Callable[[], Grapher] | None = None) -> Kernels:
    """Return the same kernels with recordings, made after some steps by a `grapher` for each rank.

    grapher: None: CUDA's.
    """

    def kernels_of_rank(
        plan: Plan, stage: int, coordinate: tuple[int, ...], device: torch.device
    ) -> Mapping[int, Kernel]:
        memory = LastingMemory((grapher or CudaGrapher)())
        recorded: dict[int, Kernel] = {}
        for actor_id, kernel in kernels(plan, stage, coordinate, device).items():
            actor = plan.actors[actor_id]
            assert isinstance(actor.work, RegionWork)
            inputs = (*actor.work.reads, *sums_of(plan, actor.work))
            moving = [k for k, name in enumerate(inputs) if name not in plan.variables]
            warm = WARM_STEPS * plan.acts_per_step(actor)
            recorded[actor_id] = RecordedKernel(kernel, moving, warm, memory)
        return recorded

    return kernels_of_rank


class LastingMemory:
    """Tensors of a rank that keep their addresses until the end of the run."""

    def __init__(self, grapher: Grapher) -> None:
        self.grapher = grapher
        self.addresses: set[int] = set()
        self.lent: dict[Hashable, list[torch.Tensor]] = {}  # (dtype, size, strides) -> tensors

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return a new lasting tensor with the dtype, size and strides of this one."""
        own = self.grapher.allocate(like)
        self.addresses.add(_address(own))
        return own

    def lend(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors to which one recording copies its inputs right before it plays.

        Other regions use the same memory.
        """
        taken: Counter[Hashable] = Counter()
        found = []
        for value in values:
            how = (value.dtype, value.size(), value.stride())
            there = self.lent.setdefault(how, [])
            if taken[how] == len(there):
                there.append(self.allocate(value))
            found.append(there[taken[how]])
            taken[how] += 1
        return found

    def holds(self, value: torch.Tensor) -> bool:
        """Return whether the tensor is lasting."""
        return _address(value) in self.addresses


class RecordedKernel:
    """The kernel of a region, which replays recordings after some acts.

    moving: positions of inputs that are no variables, as variables never move.  warm: number of
    first acts that run op after op.
    """

    def __init__(
        self, kernel: Kernel, moving: Sequence[int], warm: int, memory: LastingMemory
    ) -> None:
        self.kernel = kernel
        self.moving = moving
        self.warm = warm
        self.memory = memory
        self.slots: list[Slot] = []
        self.recordings: dict[InputAddresses, dict[int, Recording]] = {}  # by slot
        self.plays = 0

    def __call__(self, values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if self.warm:
            self.warm -= 1
            return self.kernel(values)
        recording = self._choose_recording(values)
        for position, copy in recording.copied:
            copy_elements(copy, values[position])
        recording.play()
        self.plays += 1
        made = tuple(result.of(values) for result in recording.results)
        values.clear()
        return made

    def _choose_recording(self, values: list[torch.Tensor]) -> Recording:
        """Return a recording that reads these values and overwrites nothing that is still held.

        It is made if there is none.
        """
        addresses = self._addresses(values)
        if addresses not in self.recordings and len(self.recordings) >= MAX_ADDRESS_SETS:
            addresses = tuple(None if each is None else (None, each[1]) for each in addresses)
        there = self.recordings.setdefault(addresses, {})
        for recording in there.values():
            if recording.is_free():
                return recording
        free = (k for k, slot in enumerate(self.slots) if slot.is_free())
        slot = next(free, len(self.slots))
        if slot == len(self.slots):
            self.slots.append(Slot(self.memory))
        moved = [
            k
            for k, each in zip(self.moving, addresses, strict=True)
            if each is not None and each[0] is None
        ]
        copies = self.memory.lend([values[k] for k in moved])
        copied = list(zip(moved, copies, strict=True))
        there[slot] = record(self.kernel, values, copied, self.memory, self.slots[slot])
        return there[slot]

    def _addresses(self, values: list[torch.Tensor]) -> InputAddresses:
        return tuple(
            None
            if (value := values[k]) is None
            else (value.data_ptr() if self.memory.holds(value) else None, value.stride())
            for k in self.moving
        )


class Slot:
    """Memory for one version of a region's results; each is allocated when it is first needed."""

    def __init__(self, memory: LastingMemory) -> None:
        self.memory = memory
        self.tensors: dict[int, torch.Tensor] = {}
        self.storages: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def fill(self, result: int, value: torch.Tensor) -> torch.Tensor:
        """Copy the value of a result into the slot; return the copy."""
        if result not in self.tensors:
            own = self.tensors[result] = self.memory.allocate(value)
            storage = own.untyped_storage()
            self.storages[result] = (storage, _uses(storage))
        copy_elements(self.tensors[result], value)
        return self.tensors[result]

    def is_free(self, results: Collection[int] | None = None) -> bool:
        """Return whether nobody holds these results; None: any result."""
        wanted = self.storages if results is None else results
        return all(_uses(self.storages[k][0]) == self.storages[k][1] for k in wanted)


class Recording(NamedTuple):
    """A recording of a region for one set of input addresses, which fills one slot.

    play: replays it.
    copied: (position of an input, the tensor to which it is copied first).
    results: one for each result of the region.
    fills: numbers of the results that lie in the slot.
    """

    play: Callable[[], object]
    copied: tuple[tuple[int, torch.Tensor], ...]
    results: tuple[OwnResult | InputResult, ...]
    slot: Slot
    fills: tuple[int, ...]

    def is_free(self) -> bool:
        """Return whether nobody holds what it would overwrite."""
        return self.slot.is_free(self.fills)


class OwnResult(NamedTuple):
    """A result in the slot."""

    tensor: torch.Tensor

    def of(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a new tensor on the slot's storage, so that its holders are counted."""
        return self.tensor.detach()


class InputResult(NamedTuple):
    """A result in the memory of an input.

    position: of the input.  shift: bytes from the input's beginning; None: it is the input itself.
    dtype, size, stride: of the result.
    """

    position: int
    shift: int | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the result among the inputs of an act."""
        value = inputs[self.position]
        if self.shift is None:
            return value
        begin = int(value.storage_offset()) * value.itemsize + self.shift
        own = torch.empty(0, dtype=self.dtype, device=value.device)
        return own.set_(
            value.untyped_storage(), begin // self.dtype.itemsize, self.size, self.stride
        )


def record(
    kernel: Kernel,
    values: Sequence[torch.Tensor],
    copied: Sequence[tuple[int, torch.Tensor]],
    memory: LastingMemory,
    slot: Slot,
) -> Recording:
    """Record a region's kernel.

    values: its inputs.  copied: (position, tensor) of inputs that are copied to another tensor.
    memory: gives the grapher.  slot: holds the results.  Raise RuntimeError if the kernel does
    something that a CUDA graph cannot record.
    """
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
        made, play = memory.grapher.record(run, list(given))
    except Exception as error:
        raise RuntimeError(
            f"this region cannot be recorded as a CUDA graph: {type(error).__name__}: {error}\n"
            "engine.cuda_graphs=false launches its ops one by one."
        ) from error
    results = tuple(
        _input_result(x, given, there[_address(x)])
        if _address(x) in there
        else OwnResult(slot.tensors[k])
        for k, x in enumerate(made)
    )
    fills = tuple(k for k, result in enumerate(results) if isinstance(result, OwnResult))
    return Recording(play, tuple(copied), results, slot, fills)


def _input_result(
    result: torch.Tensor, values: Sequence[torch.Tensor], position: int
) -> InputResult:
    """Locate a result that lies in the storage of the input at `position`."""
    how = (result.dtype, tuple(result.shape), result.stride())
    for k, value in enumerate(values):
        if value is None or value.data_ptr() != result.data_ptr():
            continue
        if (value.dtype, tuple(value.shape), value.stride()) == how:
            return InputResult(k, None, *how)
    return InputResult(position, result.data_ptr() - values[position].data_ptr(), *how)


def empty_twin(like: torch.Tensor) -> torch.Tensor:
    """Return new memory with the size and strides of a tensor, strides of 0 (expand) included."""
    once = _drop_repeats(like)
    own = torch.empty_strided(once.size(), once.stride(), dtype=like.dtype, device=like.device)
    return own.as_strided(like.size(), like.stride())


def copy_elements(own: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a tensor to its twin."""
    _drop_repeats(own).copy_(_drop_repeats(value))


def _drop_repeats(value: torch.Tensor) -> torch.Tensor:
    """Return a view that shows each element of a tensor once."""
    if 0 not in value.stride():
        return value
    size = [1 if stride == 0 else n for n, stride in zip(value.size(), value.stride(), strict=True)]
    return value.as_strided(size, value.stride())


def _address(value: torch.Tensor) -> int:
    """Return the address of the tensor's storage; 0 if it has none."""
    return value.untyped_storage().data_ptr()


def _uses(storage: torch.UntypedStorage) -> int:
    count: int = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return count


class CudaGrapher:
    """A grapher of torch's CUDA graphs.

    It does not use torch.cuda.graph, which first waits for the device: a receive may be in flight
    there whose sender waits for this rank's next act.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self.computing = torch.cuda.current_stream()

    def record(
        self, run: Kernel, inputs: list[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Callable[[], object]]:
        """Record as Grapher.record says."""
        graph = torch.cuda.CUDAGraph()
        self.computing = torch.cuda.current_stream()
        with torch.cuda.stream(self.stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # if all ops are views
            # other threads call CUDA at the same time, and `allocate` may ask it for memory
            graph.capture_begin(pool=self.pool, capture_error_mode="relaxed")
            try:
                made = run(inputs)
            except Exception:
                with suppress(RuntimeError):  # less helpful than the error of `run`
                    graph.capture_end()
                raise
            graph.capture_end()
        return made, graph.replay

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Allocate as Grapher.allocate says."""
        with torch.cuda.stream(self.computing):
            return empty_twin(like)
