"""calibration: measure the device of a rank and the links between ranks.

They are used as in a run: one thread a rank, the kernels of regions, the transport of collectives
and messages.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from flowrun.engine.boxing.boxing import ALL_REDUCE, EXCHANGE, BoxingStep, step_bytes
from flowrun.engine.ir.sbp import B, P, S
from flowrun.engine.runtime.calibration.calibrated import (
    ATTENTION,
    BACKWARD,
    BATCHED,
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    ELEMENTS,
    FORWARD,
    WEIGHT_GRAD,
    Moved,
    TimedWork,
)
from flowrun.engine.runtime.calibration.probes import (
    Probe,
    batched_probes,
    convolution_probes,
    element_probes,
    few_convolution_probes,
)
from flowrun.engine.runtime.kernels.overrides import kernel_of
from flowrun.engine.runtime.process import heap
from flowrun.engine.runtime.transport.links import Links
from flowrun.engine.runtime.transport.pending import Collective, Pending
from flowrun.engine.runtime.transport.transport import BucketLayout, layout_of
from flowrun.engine.torch_internals import cpu_attention, cpu_attention_backward

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_COLD_BYTES = 1 << 26  # of operands used in turn, as in a step, so that no cache holds them
_CALLS_PER_TIMING = 4  # calls between ops that are timed together
_MIN_ADDED_S = 1e-5
_PATIENCE = timedelta(seconds=60)  # for the other processes
_ROWS_PER_RANK = 64  # of a tensor that is moved
FEW = tuple(
    f"aten.{name}.default"
    for name in ("gelu", "gelu_backward", "native_layer_norm", "native_layer_norm_backward")
)
FEW_HEADS = (32, 64), (64, 512)  # width, keys
_HEADS = (32, 64), (32, 128), (32, 512), (64, 64), (64, 128), (64, 512), (128, 512)
_HEAD_NUMBERS = 1 << 16  # of a query, at least
_KEPT_RESULTS = 8  # of one kind of work
_PROBE_SETS = 8  # sets of a probe's tensors, used in turn
_EXCHANGED = BoxingStep(0, P, B, exchanged=True)
_STEPS = (
    BoxingStep(0, P, B),
    BoxingStep(0, P, S(0)),
    BoxingStep(0, S(0), B),
    BoxingStep(0, S(0), S(1)),
)
_aten = torch.ops.aten
Operands = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class ProbeSizes:
    """The sizes and numbers of measurements.

    products: (tokens, in, out) of each product.  dtypes: names of DTYPES.
    stream_bytes: size of each of three vectors that are added.
    moved_bytes: sizes of tensors that are moved, at least 1 KiB for two ranks and 4 KiB for four,
        so that each rank has a part of rows and columns.
    trials: calls of each.  rounds: repetitions of everything.  The median of both counts.
    counted: another call than the median: the one that is slower than this part of them.
    few: time one convolution and FEW single ops, in place of all.
    product_sets: most sets of tensors of a product, used in turn.
    pace_s: seconds for which ranks that are more than cores compute at a time, `pace_rounds` times.
    """

    products: tuple[tuple[int, int, int], ...]
    dtypes: tuple[str, ...]
    stream_bytes: int
    moved_bytes: tuple[int, ...]
    trials: int
    pace_s: float = 0.0
    pace_rounds: int = 0
    rounds: int = 1
    counted: float = 0.5
    few: bool = False
    product_sets: int = 32


def measure_alone() -> None:
    """Let this process, which was forked to measure, compute as a rank does."""
    heap.keep_pages()
    torch.set_num_threads(1)


@contextmanager
def meeting(rank: int, ranks: int, file: str, shared: bool = True) -> Iterator[Links]:
    """Within, this process is one of `ranks` that measure their links; give its own.

    file: by which they meet; it is not there yet.  shared: see Links.
    """
    measure_alone()
    dist.init_process_group("gloo", f"file://{file}", _PATIENCE, ranks, rank)
    links = Links(rank, torch.device("cpu"), shared=shared)
    yield links
    dist.barrier()  # gloo aborts at random if a peer has gone when groups are destroyed
    links.close()
    dist.destroy_process_group()


def device_times(sizes: ProbeSizes) -> list[TimedWork]:
    """Measure this rank's core."""
    timed: list[TimedWork] = []
    for name, (tokens, wide, out) in itertools.product(sizes.dtypes, sizes.products):
        timed += _products(name, tokens, wide, out, sizes)
    timed += _attention(sizes)
    timed += _time_probes(sizes)
    count = sizes.stream_bytes // 4
    vectors = [torch.ones(count) for _ in range(3)]
    few = torch.zeros(16)
    for what, work, run in (
        ("stream", 12.0 * count, lambda k: torch.add(vectors[k % 3], vectors[(k + 1) % 3])),
        ("op", 200.0, lambda _: [_aten.add.Tensor(few, few) for _ in range(200)]),
    ):
        timed.append(TimedWork(what, work, _core_seconds(run, sizes)))
    return timed


def _products(
    name: str, tokens: int, wide: int, out: int, sizes: ProbeSizes
) -> Iterator[TimedWork]:
    """Time the product of a linear layer and those of both its gradients."""
    dtype, mm, addmm = DTYPES[name], kernel_of(_aten.mm.default), kernel_of(_aten.addmm.default)
    each = (tokens * wide + out * wide + tokens * out) * dtype.itemsize
    sets = [
        [torch.ones(shape, dtype=dtype) for shape in shapes]
        for shapes in [((tokens, wide), (out, wide), (tokens, out), (out,))]
        * max(1, min(sizes.product_sets, _COLD_BYTES // each))
    ]
    work: dict[str, Callable[[Operands], object]] = {
        FORWARD: lambda t: addmm(t[3], t[0], t[1].t()),
        BACKWARD: lambda t: mm(t[2], t[1]),
        WEIGHT_GRAD: lambda t: mm(t[2].t(), t[0]),
    }
    for phase, run in work.items():
        taken = _core_seconds(lambda k, run=run: run(sets[k % len(sets)]), sizes)  # type: ignore[misc]
        yield TimedWork(f"{name} {phase}", 2.0 * tokens * wide * out, taken)


def _attention(sizes: ProbeSizes) -> Iterator[TimedWork]:
    """Time causal attention, forward and backward, without autograd, which fails in a fork of a
    process that has used it.

    op_cost counts 4 (forward) and 10 for each number of a query and each key that is computed: of
    so few keys, a CPU leaves none out.
    """
    forward, backward = kernel_of(cpu_attention), kernel_of(cpu_attention_backward)
    for width, keys in FEW_HEADS if sizes.few else _HEADS:
        given = [_draw_heads(width, keys) for _ in range(_PROBE_SETS)]
        made = [(*heads, *forward(*heads, 0.0, True)) for heads in given]

        def attend(k: int, given: Sequence[Operands] = given) -> object:
            return forward(*given[k % _PROBE_SETS], 0.0, True)

        def differentiate(k: int, made: Sequence[Operands] = made) -> object:
            one = made[k % _PROBE_SETS]
            return backward(one[3], *one, 0.0, True)

        work = float(given[0][0].numel() * keys)
        for way, count, run in ((FORWARD, 4.0, attend), (BACKWARD, 10.0, differentiate)):
            what = f"{ATTENTION} {way} {width} {keys}"
            yield TimedWork(what, count * work, _core_seconds(run, sizes))


def _draw_heads(width: int, keys: int) -> Operands:
    """Draw query, key and value: (samples, 4 heads, keys, width), views of one tensor."""
    samples = max(1, _HEAD_NUMBERS // (4 * keys * width))
    numbers = torch.randn(samples, keys, 3, 4, width)
    return [one.transpose(1, 2) for one in numbers.unbind(2)]


def _time_probes(sizes: ProbeSizes) -> Iterator[TimedWork]:
    """Time convolutions, products of heads, and ops that take longer than their bytes."""
    for forward, backward in few_convolution_probes() if sizes.few else convolution_probes():
        yield _time_probe(CONVOLUTION, forward, sizes)
        yield _time_probe(CONVOLUTION_BACKWARD, backward, sizes)
    for probe in () if sizes.few else batched_probes():
        yield _time_probe(BATCHED, probe, sizes)
    for target, probe in element_probes().items():
        if not sizes.few or target in FEW:
            yield _time_probe(f"{ELEMENTS} {target}", probe, sizes)


def _time_probe(what: str, probe: Probe, sizes: ProbeSizes) -> TimedWork:
    sets = [probe.arguments() for _ in range(_PROBE_SETS)]
    taken = _core_seconds(lambda k: probe.run(*sets[k % _PROBE_SETS]), sizes)
    return TimedWork(what, probe.work, taken)


def paces(
    rank: int, cores: int, seconds: float, rounds: int, meet: Callable[[], object]
) -> list[tuple[float, float]]:
    """Measure how often per second this rank runs all probes of single ops, `rounds` times.

    rank, cores: of this host.  seconds: least length of each phase.  meet: returns when all ranks
    have called it.  Each result is (pace while all ranks run, pace while one rank a core runs; 0
    for ranks that pause).  Ranks that share a core take turns, and find another's tensors in its
    caches.
    """
    probes = [*itertools.chain(*convolution_probes()), *element_probes().values()]
    sets = [(probe.run, probe.arguments()) for probe in probes]

    def once() -> None:
        for run, arguments in sets:
            run(*arguments)

    once()  # libraries create their kernels in the first call
    measured = []
    for _ in range(rounds):
        meet()
        crowded = _pace(once, seconds)
        meet()
        measured.append((crowded, _pace(once, seconds) if rank < cores else 0.0))
    return measured


def _pace(once: Callable[[], object], seconds: float) -> float:
    """Return calls per second; one more call keeps the core busy until slower ranks end."""
    begin, calls, spent = time.perf_counter(), 0, 0.0
    while not calls or spent < seconds:
        once()
        calls, spent = calls + 1, time.perf_counter() - begin
    once()
    return calls / spent


def link_times(
    links: Links, rank: int, ranks: Sequence[int], sizes: ProbeSizes, exchanged: bool
) -> list[Moved]:
    """Measure every collective, and messages between two ranks; all ranks of the group call this.

    exchanged: measure all-reduces as exchanges, too, and both ways between ops for all sizes; ranks
    that share memory do not use exchanges.  Operands that are summed are column-major, as the
    gradients of weights are: transposing takes longer than copying.
    """
    group, parts = tuple(ranks), len(ranks)
    links.join_groups([group])
    moved: list[Moved] = []
    steps = (_EXCHANGED, *_STEPS) if exchanged else _STEPS
    for num_bytes, step in itertools.product(sizes.moved_bytes, steps):
        shape = (_ROWS_PER_RANK * parts, max(parts, num_bytes // (4 * _ROWS_PER_RANK * parts)))
        layouts = BucketLayout((layout_of(step, shape, (step.source,), (parts,), (0,)),))
        rows = shape[0] // parts if step.source == S(0) else shape[0]
        pieces = _cold_tensors((rows, shape[1]), column_major=step.source == P)
        member = Collective(step, layouts, group, group.index(rank))

        def collective(k: int, member: Collective = member, pieces: Operands = pieces) -> None:
            _wait(links, links.start(member, [pieces[k % len(pieces)]]))

        total = 4 * math.prod(shape)
        sent = step_bytes(step, (step.source,), (parts,), total) / parts
        dist.barrier()
        one = Moved(
            kind=step.kind,
            members=parts,
            message_bytes=total,
            sent_bytes=sent,
            seconds=_call_seconds(collective, sizes),
        )
        moved.append(one)
        both_ways = exchanged and step.kind in (ALL_REDUCE, EXCHANGE)
        if both_ways or num_bytes == min(sizes.moved_bytes):
            added, busy_s = _time_between_ops(collective, sizes.trials)
            moved.append(replace(one, seconds=added, between_ops=True, busy_s=busy_s))
    dist.barrier()
    return moved + time_messages(links, rank, sizes) if parts == 2 else moved


def time_messages(links: Links, rank: int, sizes: ProbeSizes) -> list[Moved]:
    """Time messages from rank 0 to rank 1 and back, and halve the seconds."""
    moved = []
    for num_bytes in sizes.moved_bytes:
        vectors = _cold_tensors((num_bytes // 4,))

        def there_and_back(k: int, vectors: Operands = vectors) -> None:
            vector = vectors[k % len(vectors)]
            for sender in (0, 1):
                if rank == sender:
                    _wait(links, links.send([vector], 1 - rank, 0))
                else:
                    _wait(links, links.receive([vector.shape], [vector.dtype], 1 - rank, 0))

        taken = _call_seconds(there_and_back, sizes)
        moved.append(
            Moved(
                kind="message",
                members=2,
                message_bytes=num_bytes,
                sent_bytes=float(num_bytes),
                seconds=taken / 2,
            )
        )
    return moved


def _time_between_ops(run: Callable[[int], object], trials: int) -> tuple[float, float]:
    """Return (seconds that a call adds to the ops around it, CPU seconds of this process in it).

    As in a step, the ops have replaced its tensors in the caches, and the ranks that it waits for
    may be late, or wait for a core.
    """
    wide = _cold_tensors((256, 1024))
    narrow = torch.ones(1024, 256)

    def ops(k: int) -> None:
        _aten.gelu.default(torch.mm(wide[k % len(wide)], narrow))
        torch.add(wide[k % len(wide)], wide[(k + 1) % len(wide)])

    def both(k: int) -> None:
        ops(k)
        begin = time.process_time()
        run(k)
        busy.append(time.process_time() - begin)

    added: list[float] = []
    busy: list[float] = []
    for _ in range(trials):
        taken = []
        for each in (both, ops):
            begin = time.perf_counter()
            for k in range(_CALLS_PER_TIMING):
                each(k)
            taken.append(time.perf_counter() - begin)
        added.append((taken[0] - taken[1]) / _CALLS_PER_TIMING)
    return max(_MIN_ADDED_S, median(added)), median(busy)


def _cold_tensors(shape: tuple[int, ...], column_major: bool = False) -> list[torch.Tensor]:
    """Return more tensors than a cache holds: in a run, a tensor was made some ops ago."""
    each = 4 * math.prod(shape)
    count = max(1, min(32, _COLD_BYTES // each))
    vectors = [torch.ones(math.prod(shape)) for _ in range(count)]  # zeros would all be one page
    return [v.view(shape[::-1]).t() if column_major else v.view(shape) for v in vectors]


def _wait(links: Links, pending: Pending) -> list[torch.Tensor]:
    """Wait for communication as a rank's loop does, asleep until another rank wakes it."""
    pending.on_done(lambda: links.inbox.put((0, 0)))
    links.inbox.get()
    return pending.wait()


def _core_seconds(run: Callable[[int], object], sizes: ProbeSizes) -> float:
    """Like _call_seconds, by the clock of the core: what else runs on it does not count."""
    return _call_seconds(run, sizes, time.thread_time)


def _call_seconds(
    run: Callable[[int], object], sizes: ProbeSizes, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Time calls that follow some uncounted ones.  Their results stay for a while, as a step keeps
    what backward reads: a call that writes where the last one wrote finds its lines in a cache.
    """
    taken = []
    kept: deque[object] = deque(maxlen=_KEPT_RESULTS)
    for k in range(sizes.trials + _KEPT_RESULTS):
        start = clock()
        result = run(k)
        taken.append(clock() - start)
        kept.append(result)
    return sorted(taken[_KEPT_RESULTS:])[int(sizes.trials * sizes.counted)]
