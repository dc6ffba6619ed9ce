"""torch.distributed and shared memory against the virtual transport: same values, and the bytes of
the table.

Each number of ranks starts its processes once for each of the two; they run every case and leave
what they got.
"""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flowrun.engine.boxing.boxing import BoxingStep, step_bytes
from flowrun.engine.ir.sbp import P_LOGSUMEXP, P_MAX, P_MIN, B, Owned, P, S
from flowrun.engine.runtime.transport import collectives
from flowrun.engine.runtime.transport.links import Links
from flowrun.engine.runtime.transport.pending import Collective, PeerGone
from flowrun.engine.runtime.transport.transport import (
    BucketLayout,
    GroupLayout,
    layout_of,
    run_group,
)
from support.layouts.gloo import start_ranks
from support.layouts.logical import lay_out, line, whole_numbers

pytestmark = pytest.mark.processes

EXCHANGED = BoxingStep(0, P, B, exchanged=True)
# name: (step of each tensor, shape of each tensor, dtype).  A bucket mixes dims, not kinds.
Case = tuple[list[BoxingStep], list[tuple[int, ...]], torch.dtype]
CASES: dict[str, Case] = {
    "all_reduce": ([BoxingStep(0, P, B)], [(6, 4)], torch.float32),
    "all_reduce of a scalar and a matrix": ([BoxingStep(0, P, B)] * 2, [(), (5, 3)], torch.float32),
    "all_reduce max int64": ([BoxingStep(0, P_MAX, B)], [(5,)], torch.int64),
    "all_reduce min bfloat16": ([BoxingStep(0, P_MIN, B)], [(4, 3)], torch.bfloat16),
    "all_reduce logsumexp": ([BoxingStep(0, P_LOGSUMEXP, B)], [(5, 1)], torch.float32),
    "all_reduce of much": ([BoxingStep(0, P, B)] * 2, [(5,), (160, 130)], torch.float32),
    "exchange": ([EXCHANGED], [(6, 4)], torch.float32),
    "exchange of sizes that do not divide": ([EXCHANGED] * 3, [(), (7, 3), (5,)], torch.float32),
    "exchange max int64": ([BoxingStep(0, P_MAX, B, exchanged=True)], [(5,)], torch.int64),
    "exchange logsumexp": (
        [BoxingStep(0, P_LOGSUMEXP, B, exchanged=True)], [(5, 1)], torch.float32,
    ),
    "exchange of nothing": ([EXCHANGED], [(0, 3)], torch.float32),
    "reduce_scatter": ([BoxingStep(0, P, S(0))], [(12, 4)], torch.float32),
    "reduce_scatter uneven": ([BoxingStep(0, P, S(1))], [(3, 7)], torch.float32),
    "reduce_scatter max int64": ([BoxingStep(0, P_MAX, S(0))], [(7, 2)], torch.int64),
    "reduce_scatter bucket": (
        [BoxingStep(0, P, S(0)), BoxingStep(0, P, S(1))], [(6, 1), (2, 5)], torch.float64
    ),
    "all_gather": ([BoxingStep(0, S(1), B)], [(2, 12)], torch.float32),
    "all_gather uneven": ([BoxingStep(0, S(0), B)], [(7, 3)], torch.float32),
    "all_gather bucket": (
        [BoxingStep(0, S(0), B), BoxingStep(0, S(1), B)],
        [(5, 2), (2, 6)],
        torch.int64,
    ),
    "all_to_all": ([BoxingStep(0, S(0), S(1))], [(12, 12)], torch.float32),
    "all_to_all uneven": ([BoxingStep(0, S(1), S(0))], [(5, 7)], torch.float32),
    "all_to_all bool bucket": (
        [BoxingStep(0, S(0), S(1)), BoxingStep(0, S(1), S(0))], [(6, 7), (5, 4)], torch.bool
    ),
    "turn": ([BoxingStep(0, S(1), S(1))] * 2, [(2, 12), (3, 24)], torch.float32),
    "swap": ([BoxingStep(0, S(1), S(1), swapped=True)] * 2, [(2, 24), (3, 48)], torch.float32),
    "to owners bucket": (
        [BoxingStep(0, S(0), Owned(1)), BoxingStep(0, S(1), Owned(0)), BoxingStep(0, S(0), S(1))],
        [(6, 3), (4, 5), (5, 4)],
        torch.bfloat16,
    ),
    "to one owner uneven": ([BoxingStep(0, S(1), Owned(1))], [(6, 3)], torch.float32),
    "from owners bucket": (
        [BoxingStep(0, Owned(1), S(0)), BoxingStep(0, Owned(0), S(1))],
        [(6, 3), (4, 5)],
        torch.float32,
    ),
    "reduced to owners bucket": (
        [BoxingStep(0, P, Owned(0)), BoxingStep(0, P, Owned(1))], [(6, 3), (6, 3)], torch.float32
    ),
    "from owners to all bucket": (
        [BoxingStep(0, Owned(0), B), BoxingStep(0, Owned(1), B)], [(6, 3), (6, 3)], torch.float32
    ),
    "from one owner to all uneven": ([BoxingStep(0, Owned(1), B)], [(6, 3)], torch.float32),
    "nothing in it": ([BoxingStep(0, P, B)], [(0, 3)], torch.float32),
}  # fmt: skip
CALLS = {  # what torch is asked for on CUDA
    "all_reduce": "all_reduce",
    "all_reduce logsumexp": "all_to_all",
    "all_gather": "all_gather",
    "all_gather uneven": "all_to_all",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter uneven": "all_to_all",
    "all_to_all": "all_to_all",
}
UNORDERED = (1.0, 1e8, -1e8, 1.0)  # in fp32 the sum depends on the order
EVEN = [name for name in CASES if "uneven" not in name and "bucket" not in name]

_MESSAGE = [
    torch.tensor([True, False, True]),
    torch.tensor(7),
    torch.arange(6.0).reshape(2, 3),
    torch.arange(3, dtype=torch.bfloat16),
]


# As oneDNN leaves gradients: columns one behind the other.
BY_COLUMNS = {
    f"{name} by columns": CASES[name]
    for name in ("all_reduce", "exchange", "reduce_scatter", "reduce_scatter uneven")
}
ON_ONE_RANK = "reduce_scatter bucket, rank 0 by columns"
CASES.update(BY_COLUMNS)
CASES[ON_ONE_RANK] = ([BoxingStep(0, P, S(0))] * 3, [(9, 4), (5,), (8, 3)], torch.float32)


def _bucket(name: str, parts: int) -> tuple[list[list[torch.Tensor]], BucketLayout]:
    """The pieces of each member and the layouts of a case."""
    steps, shapes, dtype = CASES[name]
    laid = [
        lay_out(whole_numbers(shape, dtype), (step.source,), line(parts))
        for step, shape in zip(steps, shapes, strict=True)
    ]
    layouts = BucketLayout(
        tuple(
            layout_of(step, shape, (step.source,), (parts,), (0,))
            for step, shape in zip(steps, shapes, strict=True)
        )
    )
    if name in BY_COLUMNS:
        laid = [{rank: _by_columns(x) for rank, x in pieces.items()} for pieces in laid]
        assert not any(x.is_contiguous() for pieces in laid for x in pieces.values())
    if name == ON_ONE_RANK:
        laid = [{**pieces, 0: _by_columns(pieces[0])} for pieces in laid]
    return [[pieces[rank] for pieces in laid] for rank in range(parts)], layouts


def test_what_torch_says_of_other_ranks_is_told_from_what_a_device_says_of_this_one() -> None:
    with pytest.raises(PeerGone, match="RuntimeError: closed"), collectives._others():
        raise RuntimeError("closed")
    with pytest.raises(torch.OutOfMemoryError), collectives._others():
        raise torch.OutOfMemoryError("no room")


def _by_columns(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


def _rank(rank: int, parts: int, carrier: str, folder: str) -> None:
    """One process: every case, then messages; leaves its results in a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=parts
    )
    out: dict[str, Any] = {}
    links = Links(rank, torch.device("cpu"), **SETUPS[carrier])
    links.join_groups([tuple(range(parts))])
    for name, (steps, _, _) in CASES.items():
        pieces, layouts = _bucket(name, parts)
        done = threading.Event()
        member = Collective(steps[0], layouts, tuple(range(parts)), rank)
        pending = links.start(member, pieces[rank])
        pending.on_done(done.set)
        _await(links, done, name)
        out[name] = ([tensor.clone() for tensor in pending.wait()], pending.sent_bytes)
        untouched, _ = _bucket(name, parts)
        assert all(map(torch.equal, pieces[rank], untouched[rank])), f"{name} wrote to its input"
    layouts = BucketLayout((GroupLayout((1,), parts, P, B),))
    mine = [torch.tensor([UNORDERED[rank]])]
    member = Collective(EXCHANGED, layouts, tuple(range(parts)), rank)
    out["unordered"] = links.start(member, mine).wait()[0]
    out["messages"] = _messages(links, rank, parts)
    torch.save(out, f"{folder}/{rank}.pt")
    dist.barrier()
    links.close()
    dist.destroy_process_group()


def _await(links: Links, done: threading.Event, what: str) -> None:
    """As the loop does: sleep where other processes and other threads wake it."""
    until = time.monotonic() + 30
    while not done.is_set() and time.monotonic() < until:
        links.inbox.empty()
    assert done.is_set(), f"{what} never called back"


def _messages(links: Links, rank: int, parts: int) -> dict[str, Any]:
    """Around the ring, on two tags; the later tag is received first."""
    ahead, behind = (rank + 1) % parts, (rank - 1) % parts
    shapes, dtypes = [t.shape for t in _MESSAGE], [t.dtype for t in _MESSAGE]
    sends = [links.send(_MESSAGE, ahead, tag) for tag in (1, 2)]
    sends.append(links.send([torch.tensor([rank])], ahead, 2))
    done = threading.Event()
    second = links.receive(shapes, dtypes, behind, 2)
    third = links.receive([(1,)], [torch.int64], behind, 2)
    third.on_done(done.set)
    got = [second.wait()]
    _await(links, done, "a message")
    got.append(links.receive(shapes, dtypes, behind, 1).wait())
    nothing = [pending.wait() for pending in sends]
    return {
        "whole": [[tensor.clone() for tensor in tensors] for tensors in got],
        "small": (third.wait(), third.wait()),
        "sent": [pending.sent_bytes for pending in sends],
        "nothing": nothing,
    }


SETUPS: dict[str, dict[str, Any]] = {"gloo": {"shared": False}, "shared memory": {}}  # of Links
IDS = [f"{parts} ranks, {carrier}" for carrier in SETUPS for parts in (2, 3, 4)]


@pytest.fixture(scope="module", params=IDS)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("ranks"))
    number, carrier = request.param.split(" ranks, ")
    start_ranks(_rank, parts := int(number), parts, carrier, folder)
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(parts)]


@pytest.mark.parametrize("name", list(CASES))
def test_real_ranks_get_what_the_virtual_transport_gives(results: Any, name: str) -> None:
    pieces, layouts = _bucket(name, len(results))
    virtual, _ = run_group(CASES[name][0][0], pieces, layouts)
    for real, expected in zip(results, virtual, strict=True):
        for one, other in zip(real[name][0], expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", EVEN)
def test_bytes_sent_are_the_table(results: Any, name: str) -> None:
    steps, shapes, dtype = CASES[name]
    pairs = zip(steps, shapes, strict=True)
    num_bytes = [(step, torch.Size(shape).numel() * dtype.itemsize) for step, shape in pairs]
    foretold = sum(step_bytes(step, (step.source,), (len(results),), n) for step, n in num_bytes)
    assert sum(real[name][1] for real in results) == foretold


def test_an_exchange_sums_in_order_of_the_members(results: Any) -> None:
    expected = torch.tensor(UNORDERED[: len(results)])
    total = expected[:1].clone()
    for each in expected[1:]:
        total += each
    assert all(torch.equal(real["unordered"], total) for real in results)


def test_messages_arrive_whole_whatever_the_order_of_tags(results: Any) -> None:
    for real in results:
        for got in real["messages"]["whole"]:
            assert all(map(torch.equal, got, _MESSAGE))


def test_messages_of_one_tag_arrive_in_the_order_sent(results: Any) -> None:
    for rank, real in enumerate(results):
        first, again = real["messages"]["small"]
        assert first[0].item() == again[0].item() == (rank - 1) % len(results)


def test_a_message_costs_its_bytes_and_gives_the_sender_nothing(results: Any) -> None:
    size = sum(tensor.nbytes for tensor in _MESSAGE)
    for real in results:
        assert real["messages"]["sent"] == [size, size, 8]
        assert real["messages"]["nothing"] == [[], [], []]


@pytest.mark.parametrize("name", CALLS)
def test_a_group_is_connected_pairwise_for_an_all_to_all_alone(name: str) -> None:
    (step, *_), (shape, *_), dtype = CASES[name]
    layouts = BucketLayout((layout_of(step, shape, (step.source,), (2,), (0,)),))
    found = collectives.call_of(Collective(step, layouts, (0, 1), 0), dtype, on_cuda=True)
    assert found == CALLS[name]
