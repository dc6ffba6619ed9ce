"""What the device of a rank does, and the links between ranks, measured as a run uses them: one
thread a rank, the kernels of regions, the transport of collectives and messages.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from flowrun.engine.boxing.boxing import ALL_REDUCE, EXCHANGE, BoxingStep, step_bytes
from flowrun.engine.ir.sbp import B, P, S
from flowrun.engine.runtime.calibration.calibrated import (
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
)
from flowrun.engine.runtime.kernels.overrides import kernel_of
from flowrun.engine.runtime.transport.links import Links
from flowrun.engine.runtime.transport.transport import BucketLayout, layout_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_COLD_BYTES = 1 << 26  # operands in turn: a training step has swept the caches in between
_IN_A_ROW = 4  # calls between ops, timed together
_LEAST_S = 1e-5
_ROWS = 64  # of what is moved, for each rank
_SETS = 8  # of a probe's tensors, in turn
_CPU = torch.device("cpu")
_EXCHANGED = BoxingStep(0, P, B, exchanged=True)
_STEPS = (
    BoxingStep(0, P, B),
    BoxingStep(0, P, S(0)),
    BoxingStep(0, S(0), B),
    BoxingStep(0, S(0), S(1)),
)
_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSizes:
    """How much is measured.

    products: (tokens, in, out) of each; dtypes: names, of DTYPES.  stream_bytes: of each of three
    vectors.  moved_bytes: of the tensors that are moved, at least a kilobyte for two ranks and four
    for four (rows and columns that each rank has a part of).  trials: of each.  pace_s: for how
    long ranks that are more than cores compute at a time; pace_rounds: how often.  rounds: of
    everything; of each figure the median counts.
    """

    products: tuple[tuple[int, int, int], ...]
    dtypes: tuple[str, ...]
    stream_bytes: int
    moved_bytes: tuple[int, ...]
    trials: int
    pace_s: float
    pace_rounds: int
    rounds: int


def device_times(device: torch.device, sizes: ProbeSizes) -> list[TimedWork]:
    """Of this rank's device."""
    timed: list[TimedWork] = []
    for name, (tokens, wide, out) in itertools.product(sizes.dtypes, sizes.products):
        timed += _products(name, tokens, wide, out, device, sizes.trials)
    timed += _attention(device, sizes.trials)
    timed += _probed(sizes.trials)
    count = sizes.stream_bytes // 4
    vectors = [torch.randn(count, device=device) for _ in range(3)]
    taken = _seconds(lambda k: torch.add(vectors[k % 3], vectors[(k + 1) % 3]), device, sizes)
    timed.append(TimedWork("stream", 12.0 * count, taken))
    few = torch.zeros(16, device=device)
    taken = _seconds(lambda _: [_aten.add.Tensor(few, few) for _ in range(200)], device, sizes)
    timed.append(TimedWork("op", 200.0, taken))
    return timed


def _products(
    name: str, tokens: int, wide: int, out: int, device: torch.device, trials: int
) -> Iterator[TimedWork]:
    """Of a layer and of both its gradients."""
    dtype, mm, addmm = DTYPES[name], kernel_of(_aten.mm.default), kernel_of(_aten.addmm.default)
    each = (tokens * wide + out * wide + tokens * out) * dtype.itemsize
    sets = [
        [torch.randn(shape, device=device).to(dtype) for shape in shapes]
        for shapes in [((tokens, wide), (out, wide), (tokens, out), (out,))]
        * max(1, min(32, _COLD_BYTES // each))
    ]
    work: dict[str, Callable[[Sequence[torch.Tensor]], Any]] = {
        FORWARD: lambda t: addmm(t[3], t[0], t[1].t()),
        BACKWARD: lambda t: mm(t[2], t[1]),
        WEIGHT_GRAD: lambda t: mm(t[2].t(), t[0]),
    }
    for phase, run in work.items():
        taken = _repeated(lambda k, run=run: run(sets[k % len(sets)]), device, trials)  # type: ignore[misc]
        yield TimedWork(f"{name} {phase}", 2.0 * tokens * wide * out, taken)


def _attention(device: torch.device, trials: int) -> Iterator[TimedWork]:
    """Causal, as op_flops counts it: forward 4, backward 10 for each of a query's numbers."""
    heads, length, width = 8, 128, 32
    q, k, v = (torch.randn(4, heads, length, width, device=device) for _ in "qkv")
    forward = kernel_of(_aten._scaled_dot_product_flash_attention_for_cpu.default)
    backward = kernel_of(_aten._scaled_dot_product_flash_attention_for_cpu_backward.default)

    def both(_: int) -> None:  # no autograd: it does not work in a fork of who has used it
        out, logsumexp = forward(q, k, v, 0.0, True)
        backward(out, q, k, v, out, logsumexp, 0.0, True)

    flop = 14.0 * q.numel() * length
    yield TimedWork("attention fp32", flop, _repeated(both, device, trials))


def _probed(trials: int) -> Iterator[TimedWork]:
    """Convolutions, products of heads, and ops that take longer than their bytes."""
    for forward, backward in convolution_probes():
        yield _timed(CONVOLUTION, forward, trials)
        yield _timed(CONVOLUTION_BACKWARD, backward, trials)
    for probe in batched_probes():
        yield _timed(BATCHED, probe, trials)
    for target, probe in element_probes().items():
        yield _timed(f"{ELEMENTS} {target}", probe, trials)


def _timed(what: str, probe: Probe, trials: int) -> TimedWork:
    sets = [probe.tensors() for _ in range(_SETS)]
    taken = _repeated(lambda k: probe.run(*sets[k % _SETS]), _CPU, trials)
    return TimedWork(what, probe.work, taken)


def paces(
    rank: int, cores: int, seconds: float, rounds: int, meet: Callable[[], object]
) -> list[tuple[float, float]]:
    """How often a second this rank runs all probes of single ops, so many times in turn: beside all
    ranks, and beside one a core (0 of those that stand aside then).  Ranks that share a core take
    turns, and find another's tensors in its caches; a slow minute of the machine hits both.

    seconds: of each, at least.  meet: returns when all ranks have called it.
    """
    probes = [*itertools.chain(*convolution_probes()), *element_probes().values()]
    sets = [(probe.run, probe.tensors()) for probe in probes]

    def once() -> None:
        for run, tensors in sets:
            run(*tensors)

    once()  # the library makes its kernels
    found = []
    for _ in range(rounds):
        meet()
        crowded = _pace(once, seconds)
        meet()
        found.append((crowded, _pace(once, seconds) if rank < cores else 0.0))
    return found


def _pace(once: Callable[[], object], seconds: float) -> float:
    """Calls a second; with one more at the end, beside which slower ranks end theirs."""
    begin, calls, spent = time.perf_counter(), 0, 0.0
    while not calls or spent < seconds:
        once()
        calls, spent = calls + 1, time.perf_counter() - begin
    once()
    return calls / spent


def link_times(
    links: Links, rank: int, ranks: Sequence[int], sizes: ProbeSizes, exchanged: bool
) -> list[Moved]:
    """Of every collective, and of messages to the next rank; all ranks of the group call it.

    exchanged: also of all-reduces as exchanges, which ranks that share memory have no use for; of
    both ways, messages of all sizes between ops.

    What is summed lies by columns, as the gradients of weights do: to turn them takes longer than
    to copy them.
    """
    group, parts = tuple(ranks), len(ranks)
    links.join_groups([group])
    moved: list[Moved] = []
    steps = (_EXCHANGED, *_STEPS) if exchanged else _STEPS
    for num_bytes, step in itertools.product(sizes.moved_bytes, steps):
        shape = (_ROWS * parts, max(parts, num_bytes // (4 * _ROWS * parts)))
        layouts = BucketLayout((layout_of(step, shape, (step.source,), (parts,), (0,)),))
        rows = shape[0] // parts if step.source == S(0) else shape[0]
        pieces = _in_turn((rows, shape[1]), by_columns=step.source == P)

        def collective(k: int, step=step, pieces=pieces, layouts=layouts) -> None:  # type: ignore[no-untyped-def]
            piece = [pieces[k % len(pieces)]]
            pending = links.start(step, piece, layouts, group, group.index(rank))
            _settled(links, pending)

        total = 4 * math.prod(shape)
        sent = step_bytes(step, (step.source,), (parts,), total) / parts
        dist.barrier()
        taken = _repeated(collective, _CPU, sizes.trials)
        moved.append(
            Moved(
                kind=step.kind, members=parts, message_bytes=total, sent_bytes=sent, seconds=taken
            )
        )
        both_ways = exchanged and step.kind in (ALL_REDUCE, EXCHANGE)
        if both_ways or num_bytes == min(sizes.moved_bytes):
            added, busy_s = _between_ops(collective, sizes.trials)
            moved.append(
                Moved(
                    kind=step.kind,
                    members=parts,
                    message_bytes=total,
                    sent_bytes=sent,
                    seconds=added,
                    between_ops=True,
                    busy_s=busy_s,
                )
            )
    dist.barrier()
    return moved + _messages(links, rank, sizes) if parts == 2 else moved


def _messages(links: Links, rank: int, sizes: ProbeSizes) -> list[Moved]:
    """There and back between ranks 0 and 1, halved."""
    moved = []
    for num_bytes in sizes.moved_bytes:
        vectors = _in_turn((num_bytes // 4,))

        def there_and_back(k: int, vectors=vectors) -> None:  # type: ignore[no-untyped-def]
            vector = vectors[k % len(vectors)]
            for sender in (0, 1):
                if rank == sender:
                    _settled(links, links.send([vector], 1 - rank, 0))
                else:
                    shapes, dtypes = [vector.shape], [vector.dtype]
                    _settled(links, links.receive(shapes, dtypes, 1 - rank, 0))

        taken = _repeated(there_and_back, _CPU, sizes.trials)
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


def _between_ops(run: Callable[[int], Any], trials: int) -> tuple[float, float]:
    """Seconds that a call adds to ops that it stands between, as in a step: its caches are
    theirs, and who it waits for may be late, or wait for a core.  And those in which all threads of
    this process compute while it lasts.
    """
    wide = _in_turn((256, 1024))
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
            for k in range(_IN_A_ROW):
                each(k)
            taken.append(time.perf_counter() - begin)
        added.append((taken[0] - taken[1]) / _IN_A_ROW)
    return max(_LEAST_S, median(added)), median(busy)


def _in_turn(shape: tuple[int, ...], by_columns: bool = False) -> list[torch.Tensor]:
    """As many as no cache holds: what is sent was made some ops ago."""
    each = 4 * math.prod(shape)
    count = max(1, min(32, _COLD_BYTES // each))
    vectors = [torch.ones(math.prod(shape)) for _ in range(count)]  # zeros would all be one page
    return [v.view(shape[::-1]).t() if by_columns else v.view(shape) for v in vectors]


def _settled(links: Links, pending: Any) -> list[torch.Tensor]:
    """As the loop does: sleep where others wake it."""
    pending.on_done(lambda: links.inbox.put((0, 0)))
    links.inbox.get()
    return pending.wait()  # type: ignore[no-any-return]


def _seconds(run: Callable[[int], Any], device: torch.device, sizes: ProbeSizes) -> float:
    return _repeated(run, device, sizes.trials)


def _repeated(run: Callable[[int], Any], device: torch.device, trials: int) -> float:
    """Median seconds of one call; the first two are not counted."""
    taken = []
    for k in range(trials + 2):
        start = time.perf_counter()
        run(k)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return median(taken[2:])
