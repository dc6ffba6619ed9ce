"""Staging: bytes that communication holds on one rank, in addition to the tensors that it reads.

Communication copies its inputs when it is issued; inputs that no other act reads are free then.

Counted are the buffers that transport/collectives.py allocates, kind by kind: packed messages,
those received, and the outputs made from them; and the messages that transport/shared_memory.py
writes into an arena whose pages stay (transport/arena.py).  Memory that gloo or NCCL keep is not
counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from flowrun.engine.boxing.boxing import (
    ALL_GATHER,
    ALL_REDUCE,
    EXCHANGE,
    REDUCE_SCATTER,
    SWAP,
    TURN,
)


@dataclass(frozen=True, slots=True)
class Staging:
    """Bytes of one communication.

    begin: most while it is issued.  held: until it is done.  end: most while it is unpacked.
    shared: its outputs are views of one message, not tensors of their own.
    keeps: it reads from its inputs themselves until it is done.
    written: into shared memory, until it is done.
    """

    begin: int
    held: int
    end: int
    shared: bool
    _: KW_ONLY
    keeps: bool = False
    written: int = 0


IN_PLACE = Staging(0, 0, 0, shared=True, keeps=True)


def collective(kind: str, parts: int, before: Sequence[int], after: Sequence[int]) -> Staging:
    """Return the staging of a collective by torch.distributed.

    before, after: bytes on this rank of every tensor of the bucket, before and after.
    """
    read, result = sum(before), sum(after)
    if kind == EXCHANGE:
        moved = 2 * (parts - 1) * read
        return Staging(moved, moved, moved + result, shared=True)
    if kind == ALL_REDUCE:
        return Staging(read, read, read, shared=True)
    if kind == ALL_GATHER:
        return Staging(read + result, read + result, read + 2 * result, shared=False)
    if kind == TURN:
        return Staging(2 * read, read + result, read + 2 * result, shared=False)
    others = 0.5 if kind == SWAP else (parts - 1) / parts
    arrives = round(others * (result * parts if kind == REDUCE_SCATTER else result))
    leaves, own = round(others * read), read - round(others * read)
    held = own + leaves + arrives
    return Staging(max(own + 2 * leaves, held), held, held + result, kind == REDUCE_SCATTER)


def shared_collective(
    kind: str, parts: int, before: Sequence[int], after: Sequence[int]
) -> Staging:
    """Return the staging of a collective in shared memory.

    before, after: bytes on this rank of every tensor of the bucket.  A rank writes the parts that
    others need and builds its outputs from what the others wrote.  It copies nothing else.  A
    tensor that goes to a single member takes one byte more.
    """
    read, result = sum(before), sum(after)
    if kind in (ALL_REDUCE, EXCHANGE, ALL_GATHER):
        return Staging(0, 0, result, shared=False, written=read)
    if kind in (TURN, SWAP):
        written = read // (2 if kind == SWAP else 1) + len(before)
        return Staging(0, 0, result, shared=False, keeps=True, written=written)
    written = round((parts - 1) / parts * read) + (parts - 1) * len(before)
    return Staging(0, 0, result, shared=False, keeps=True, written=written)


def send(num_bytes: int, shared_memory: bool = False) -> Staging:
    """Return the staging of a send: the pieces are copied into a message."""
    if shared_memory:
        return Staging(0, 0, 0, shared=True, written=num_bytes)
    return Staging(num_bytes, num_bytes, num_bytes, shared=True)


def receive(num_bytes: int, shared_memory: bool = False) -> Staging:
    """Return the staging of a receive: outputs are views of the message.  In shared memory it is
    the sender's until it is copied.
    """
    held = 0 if shared_memory else num_bytes
    return Staging(held, held, num_bytes, shared=True)
