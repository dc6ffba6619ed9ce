"""Bytes that communication holds on one rank beside the tensors it reads.

It copies them when it is issued; what no other act will read is free from then on.

What transport/collectives.py allocates, kind by kind: packed messages, what arrives, and what is
made of it; and what transport/shared_memory.py writes for others, into an arena whose pages stay
(transport/arena.py).  Memory of gloo's or NCCL's own is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowrun.engine.boxing.boxing import ALL_GATHER, ALL_REDUCE, EXCHANGE, REDUCE_SCATTER


@dataclass(frozen=True, slots=True)
class Staging:
    """begin: most while it is issued.  held: until it is done.  end: most while it is unpacked.

    shared: what it makes are views of one message, not tensors of their own.  keeps: it reads from
    the tensors themselves until it is done.  written: into shared memory, until it is done.
    """

    begin: int
    held: int
    end: int
    shared: bool
    keeps: bool = False
    written: int = 0


IN_PLACE = Staging(0, 0, 0, shared=True, keeps=True)


def collective(kind: str, parts: int, before: Sequence[int], after: Sequence[int]) -> Staging:
    """before, after: bytes of every tensor of the bucket on this rank."""
    read, made = sum(before), sum(after)
    if kind == EXCHANGE:
        moved = 2 * (parts - 1) * read
        return Staging(moved, moved, moved + made, shared=True)
    if kind == ALL_REDUCE:
        return Staging(read, read, read, shared=True)
    if kind == ALL_GATHER:
        return Staging(read + made, read + made, read + 2 * made, shared=False)
    others = (parts - 1) / parts
    arrives = round(others * (made * parts if kind == REDUCE_SCATTER else made))
    leaves, own = round(others * read), read - round(others * read)
    held = own + leaves + arrives
    return Staging(max(own + 2 * leaves, held), held, held + made, kind == REDUCE_SCATTER)


def shared_collective(
    kind: str, parts: int, before: Sequence[int], after: Sequence[int]
) -> Staging:
    """A rank writes what others want, and makes its tensors of what lies there.  Of what they do
    not want it has no copy; with each tensor of a message that is one member's goes a byte.

    All-reduces of up to 64 kB make views of one message; that is left out.
    """
    read, made = sum(before), sum(after)
    if kind in (ALL_REDUCE, EXCHANGE, ALL_GATHER):
        return Staging(0, 0, made, shared=False, written=read)
    written = round((parts - 1) / parts * read) + (parts - 1) * len(before)
    return Staging(0, 0, made, shared=False, keeps=True, written=written)


def send(num_bytes: int, shared_memory: bool = False) -> Staging:
    """Pieces are copied into the message."""
    if shared_memory:
        return Staging(0, 0, 0, shared=True, written=num_bytes)
    return Staging(num_bytes, num_bytes, num_bytes, shared=True)


def receive(num_bytes: int, shared_memory: bool = False) -> Staging:
    """What arrives is the message, as views; in shared memory it is the sender's until copied."""
    held = 0 if shared_memory else num_bytes
    return Staging(held, held, num_bytes, shared=True)
