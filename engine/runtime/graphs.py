"""CUDA graphs: a region whose tensors lie where they lay before is played, as one launch.

To start an op costs the host microseconds, and a small model on a GPU is made of nothing else.  A
region runs the same kernels in every act; only where its tensors lie may change.  What it makes is
copied to memory that is the recording's own, and written again each time that it is played; what it
reads comes from other recordings, from variables, or from an allocator that hands out the same few
places step after step.  So each region has a recording for each place that its inputs have lain in
more than once, and for each version of what it makes that is there at a time: of a register of n
slots that is n.

What passes within a region lies in memory that all recordings of a rank share, for one is played at
a time.  That is why results are copied out of it: registers keep them while other regions act, in
any order.

Relied on of torch: between capture_begin and capture_end what is enqueued on the stream is recorded
and does not run, and memory for it is of the pool; memory taken on another stream is not;
_storage_Use_Count counts the tensors of a storage.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch

from flowrun.engine.plan import Plan, RegionWork
from flowrun.engine.runtime.kernels import Kernel, Kernels

WARM_STEPS = 3  # op after op: the first two are metered, and load what kernels need
MOST_RECORDINGS = 32  # of one region; where there are more places, acts run op after op
_LATELY = 64  # places that are remembered

Place = tuple[Any, ...]  # of each input that is no variable: address and strides


class Recorder(Protocol):
    """Makes the recordings of one rank."""

    def record(
        self, run: Kernel, inputs: list[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Callable[[], object]]:
        """What `run` makes of the inputs, and what plays it; it has not run yet."""

    def outside(self, like: torch.Tensor) -> torch.Tensor:
        """Within `run`: memory in which nothing passes."""


def graphed(kernels: Kernels, recorder: Callable[[], Recorder] | None = None) -> Kernels:
    """The same kernels, played where they can be.  recorder: called once for each rank."""

    def of_rank(plan: Plan, stage: int, coordinate: tuple[int, ...]) -> Mapping[int, Kernel]:
        own = (recorder or OnCuda)()
        played: dict[int, Kernel] = {}
        for actor_id, kernel in kernels(plan, stage, coordinate).items():
            actor = plan.actors[actor_id]
            assert isinstance(actor.work, RegionWork)
            variables = {k for k, n in enumerate(actor.work.reads) if n in plan.variables}
            warm = WARM_STEPS * plan.acts_per_step(actor)
            played[actor_id] = Played(kernel, variables, warm, own)
        return played

    return of_rank


class Played:
    """The kernel of a region.

    variables: positions of inputs that never move.  warm: acts that run op after op first.
    """

    def __init__(
        self, kernel: Kernel, variables: Collection[int], warm: int, recorder: Recorder
    ) -> None:
        self.kernel = kernel
        self.variables = variables
        self.warm = warm
        self.recorder = recorder
        self.recordings: dict[Place, list[Recording]] = {}
        self.lately: deque[Place] = deque(maxlen=_LATELY)
        self.plays = 0

    @property
    def count(self) -> int:
        """Recordings."""
        return sum(map(len, self.recordings.values()))

    def __call__(self, values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if self.warm:
            self.warm -= 1
            return self.kernel(values)
        recording = self._recording(values)
        if recording is None:
            return self.kernel(values)
        self.plays += 1
        recording.play()
        made = tuple(result.of(values) for result in recording.results)
        values.clear()
        return made

    def _recording(self, values: list[torch.Tensor]) -> Recording | None:
        """One that reads these and writes over nothing that is still read; made if there is none,
        and such inputs were here before.
        """
        place = tuple(
            None if value is None else (value.data_ptr(), value.stride())
            for k, value in enumerate(values)
            if k not in self.variables
        )
        made = self.recordings.get(place, ())
        for recording in made:
            if recording.is_free():
                return recording
        if self.count >= MOST_RECORDINGS:
            return None
        if not made and place not in self.lately:
            self.lately.append(place)
            return None
        recording = recorded(self.kernel, values, self.recorder)
        self.recordings.setdefault(place, []).append(recording)
        return recording


class Recording:
    """A region at one place.  owned: the memory of what it makes, with the tensors that lie in it
    when nobody reads it.
    """

    def __init__(self, play: Callable[[], object], results: Sequence[Own | Handed]) -> None:
        self.play = play
        self.results = results
        storages = [r.tensor.untyped_storage() for r in results if isinstance(r, Own)]
        self.owned = [(storage, _uses(storage)) for storage in storages]

    def is_free(self) -> bool:
        """True if nobody holds what it made."""
        return all(_uses(storage) == alone for storage, alone in self.owned)


class Own(NamedTuple):
    """A result in the recording's own memory."""

    tensor: torch.Tensor

    def of(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """A tensor of its own there: whoever holds it is counted."""
        return self.tensor.detach()


class Handed(NamedTuple):
    """A result that lies in an input.  shift: elements from where the input begins; None: it is
    the input.
    """

    position: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    shift: int | None

    def of(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """This of the inputs of an act."""
        value = inputs[self.position]
        if self.shift is None:
            return value
        return value.as_strided(self.size, self.stride, value.storage_offset() + self.shift)


def recorded(kernel: Kernel, values: Sequence[torch.Tensor], recorder: Recorder) -> Recording:
    """Record it.  Raises RuntimeError if it holds something that cannot be."""
    there = {_address(v): k for k, v in enumerate(values) if v is not None and v.numel()}

    def run(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(
            x if _address(x) in there else recorder.outside(x).copy_(x) for x in kernel(inputs)
        )

    try:
        made, play = recorder.record(run, list(values))
    except Exception as error:
        raise RuntimeError(
            f"a CUDA graph cannot hold this region: {type(error).__name__}: {error}\n"
            "engine.cuda_graphs=false starts its ops one by one."
        ) from error
    results: list[Own | Handed] = []
    for tensor in made:
        position = there.get(_address(tensor))
        if position is None:
            results.append(Own(tensor))
            continue
        value = values[position]
        shift = int(tensor.storage_offset() - value.storage_offset())
        same = not shift and (tensor.shape, tensor.stride()) == (value.shape, value.stride())
        results.append(
            Handed(position, tuple(tensor.shape), tensor.stride(), None if same else shift)
        )
    return Recording(play, results)


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
        """See Recorder."""
        graph = torch.cuda.CUDAGraph()
        self.computing = torch.cuda.current_stream()
        with torch.cuda.stream(self.stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # of views alone
            # threads that read batches, and those of NCCL, call CUDA meanwhile
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                made = run(inputs)
            except Exception:
                with suppress(RuntimeError):  # which tells less
                    graph.capture_end()
                raise
            graph.capture_end()
        return made, graph.replay

    def outside(self, like: torch.Tensor) -> torch.Tensor:
        """See Recorder."""
        with torch.cuda.stream(self.computing):
            return torch.empty_like(like)
