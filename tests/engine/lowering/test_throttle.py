from dataclasses import replace

import torch

from flowrun.engine.actors.plan import (
    BOX,
    RECEIVE,
    REGION,
    SEND,
    Actor,
    BoxWork,
    RegionWork,
    TensorMove,
    TransferWork,
    Work,
)
from flowrun.engine.boxing.boxing import BoxingStep
from flowrun.engine.ir.graph import BACKWARD, FORWARD, Op
from flowrun.engine.ir.location import Location
from flowrun.engine.ir.sbp import S
from flowrun.engine.lowering.add_registers import Throttle


def moved(read: str, made: str) -> TensorMove:
    here = Location(0, ())
    return TensorMove(read=read, made=made, shape=(), dtype=torch.float32, source=here, target=here)


def actor(name: str, kind: str, reads: str, makes: str, sums: tuple[str, ...] = ()) -> Actor:
    moves = tuple(map(moved, reads.split() or [""], makes.split()))
    work: Work = RegionWork(
        ops=(), reads=(*reads.split(),), makes=(*makes.split(),), accumulates=sums
    )
    if kind != REGION:
        work = BoxWork((), moves) if kind == BOX else TransferWork(0, 1, 0, moves)
    return Actor(0, name, kind, 0, phase=BACKWARD, per_step=False, work=work)


def throttle(*actors: Actor) -> Throttle:
    readers: dict[str, list[int]] = {}
    for k, each in enumerate(actors):
        for name in each.reads:
            readers.setdefault(name, []).append(k)
    maker = {name: k for k, each in enumerate(actors) for name in each.makes}
    return Throttle(actors, maker, readers, ())


REGIONS = tuple(actor(f"region {k}", REGION, "", f"g{k}") for k in range(3))
REDUCED = tuple(actor(f"reduce {k}", BOX, f"g{k}", f"r{k}") for k in range(3))


def added_up(more: str = "") -> Actor:
    return actor("sums", REGION, f"r0 r1 r2 {more}", "total", ("total",))


def test_a_region_waits_for_the_reduction_of_one_before() -> None:
    actors = (*REGIONS, *REDUCED, added_up())
    assert list(throttle(*actors).pairs(ahead=1)) == [(3, 1), (4, 2)]
    assert list(throttle(*actors).pairs(ahead=2)) == [(3, 2)]


def test_of_a_ring_one_block_comes_while_another_is_computed() -> None:
    turn = BoxingStep(0, S(2), S(2))
    turns = [actor(f"turn {k}", BOX, f"k{k - 1}", f"k{k}") for k in (1, 2, 3)]
    turns = [replace(each, work=BoxWork((turn,), each.work.moves)) for each in turns]
    blocks = (actor(f"block {k}", REGION, f"k{k}", f"o{k}") for k in range(4))
    first = actor("keys", REGION, "", "k0")
    # block 1 (actor 2) has read what it needs before turn 3 (actor 7) may begin
    assert list(throttle(first, *blocks, *turns).pairs(ahead=1)) == [(2, 7)]


def test_what_backward_gathers_of_stored_shards_comes_after_the_reader_before() -> None:
    stored = (replace(actor(f"s{k}", REGION, "", f"s{k}"), phase=FORWARD) for k in range(2))
    gathers = (actor(f"gather {k}", BOX, f"s{k}", f"k{k}") for k in range(2))
    first = (*stored, *gathers)
    loss = actor("loss", REGION, "", "g")
    readers = (actor("block 1", REGION, "k1 g", "g1"), actor("block 0", REGION, "k0 g1", "g0"))
    # the source of the gradient (actor 4), then the reader of k1 (actor 5)
    assert list(throttle(*first, loss, *readers).pairs(ahead=2)) == [(4, 3), (5, 2)]
    received = actor("receive", RECEIVE, "", "g")
    assert list(throttle(*first, received, *readers).pairs(ahead=2)) == [(5, 2)]


def test_what_backward_boxes_to_be_sent_is_not_held_back() -> None:
    """The other stage may wait for it, and this one's backward for that stage."""
    stored = replace(actor("stored", REGION, "", "s0 s1"), phase=FORWARD)
    boxes = (actor(f"gather {k}", BOX, f"s{k}", f"k{k}") for k in range(2))
    sends = (actor(f"send {k}", SEND, f"k{k}", f"k{k}@1") for k in range(2))
    assert list(throttle(stored, *boxes, *sends).pairs(ahead=1)) == []


def test_no_chunk_waits_for_another() -> None:
    """Micro-batches come to the next chunk after many others were in this one."""
    of_chunk = (Op("g2", "", (), (), outputs=("g2",), chunk=1),)
    last = replace(REGIONS[2], work=replace(REGIONS[2].work, ops=of_chunk))
    actors = (*REGIONS[:2], last, *REDUCED, added_up())
    assert list(throttle(*actors).pairs(ahead=1)) == [(3, 1)]


def test_what_another_stage_sends_is_not_held_back() -> None:
    """A gradient that is gathered as it came, for a sum: of a bias, where a block is cut."""
    received = actor("receive", RECEIVE, "", "v")
    gathered = actor("gather", BOX, "v", "w")
    actors = (*REGIONS, *REDUCED, added_up("w"), received, gathered)
    assert list(throttle(*actors).pairs(ahead=1)) == [(3, 1), (4, 2)]


def test_of_what_one_message_reduces_the_last_region_counts() -> None:
    received = actor("receive", RECEIVE, "", "v")
    mixed = actor("reduce", BOX, "g0 g1 v", "r0 r1 w")
    last = actor("reduce last", BOX, "g2", "r2")
    actors = (*REGIONS, mixed, last, added_up("w"), received)
    assert list(throttle(*actors).pairs(ahead=1)) == [(3, 2)]


def test_what_is_made_of_weights_once_a_step_is_not_held_back_as_a_gradient() -> None:
    """A norm of a weight, which is gathered for a sum of gradients under ZeRO 3."""
    norm = replace(actor("norm", REGION, "", "v"), per_step=True)
    gathered = actor("gather", BOX, "v", "w")
    actors = (norm, *REGIONS, *REDUCED, gathered, added_up("w"))
    assert list(throttle(*actors).pairs(ahead=1)) == [(4, 2), (5, 3)]
