"""Bytes that communication holds on one rank beside the tensors it reads.

What runtime/collectives.py allocates, kind by kind: packed messages, what arrives, and what is
made of it.  Memory of the transport's own (gloo, NCCL) is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowrun.engine.boxing import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

# On the CPU, two members that exchange what they have send the bytes of an all-reduce in a tenth to
# two thirds of the time of gloo's (1 kB: 130 us, not 1270; 128 kB: 360, not 580); of 1 MB in more.
EXCHANGE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Staging:
    """begin: most while it is issued.  held: until it is done.  end: most while it is unpacked.

    shared: what it makes are views of one message, not tensors of their own.
    """

    begin: int
    held: int
    end: int
    shared: bool


def collective(kind: str, parts: int, before: Sequence[int], after: Sequence[int]) -> Staging:
    """before, after: bytes of every tensor of the bucket on this rank."""
    read, made = sum(before), sum(after)
    if kind == ALL_REDUCE and parts == 2 and read <= EXCHANGE_BYTES:
        return Staging(2 * read, 2 * read, 3 * read, shared=True)
    if kind == ALL_REDUCE:
        return Staging(read, read, read, shared=True)
    if kind == ALL_GATHER:
        return Staging(read + made, read + made, read + 2 * made, shared=False)
    others = (parts - 1) / parts
    arrives = round(others * (made * parts if kind == REDUCE_SCATTER else made))
    leaves, own = round(others * read), read - round(others * read)
    held = own + leaves + arrives
    return Staging(max(own + 2 * leaves, held), held, held + made, kind == REDUCE_SCATTER)


def send(num_bytes: int) -> Staging:
    """Pieces are cut, then packed into the message."""
    return Staging(2 * num_bytes, num_bytes, num_bytes, shared=True)


def receive(num_bytes: int) -> Staging:
    """What arrives is the message, as views."""
    return Staging(num_bytes, num_bytes, num_bytes, shared=True)
