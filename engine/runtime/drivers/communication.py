"""Communication: the collectives and transfers that one rank of a plan takes part in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flowrun.engine.actors.plan import SEND, Actor, BoxWork, Plan, TransferWork
from flowrun.engine.boxing.crossing import slices_of_ranks
from flowrun.engine.ir.placement import Slices
from flowrun.engine.runtime.rank.rank import Rank
from flowrun.engine.runtime.transport.links import Links
from flowrun.engine.runtime.transport.pending import Collective, Pending
from flowrun.engine.runtime.transport.shared_weight_memory import wholes
from flowrun.engine.runtime.transport.transport import cut, join, within


class InFlightAct:
    """An act whose messages are under way.  It is done when all of its messages are done."""

    def __init__(
        self, pendings: Sequence[Pending], finish: Callable[[], list[torch.Tensor]]
    ) -> None:
        """finish: makes the act's tensors once all messages (`pendings`) are done."""
        self.pendings = pendings
        self._finish = finish

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to other ranks."""
        return sum(pending.sent_bytes for pending in self.pendings)

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call back once, when every message is done.  Messages end in any order and in several
        threads; the last to end calls back in its thread.
        """
        countdown = itertools.count(1)  # one next() is atomic
        last = len(self.pendings)

        def count_one() -> None:
            if next(countdown) == last:
                callback()

        if not self.pendings:
            callback()
        for pending in self.pendings:
            pending.on_done(count_one)

    def finish(self) -> list[torch.Tensor]:
        """Return the tensors, after all messages.  Raises the error of a failed one."""
        for pending in self.pendings:
            pending.wait()
        return self._finish()


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """The message of a transfer between this rank and one other, with the pieces of all tensors.

    pieces: (index of the move, slices that this rank holds, region that is sent), in order.
    """

    other: int
    pieces: tuple[tuple[int, Slices, Slices], ...]


class Communication:
    """The collectives and transfers of one rank.

    sent_bytes: bytes that this rank has sent, by actor.
    """

    def __init__(self, plan: Plan, body: Rank, links: Links) -> None:
        self.plan = plan
        self.body = body
        self.links = links
        self.sent_bytes: dict[int, int] = {}
        self._wholes = wholes(plan, body.side_by_side)
        axes = range(len(body.placement.axes))
        self._members = [body.placement.group(body.rank, axis) for axis in axes]
        self._messages: dict[int, list[PeerMessage]] = {}

    def start(self, actor: Actor, act: int) -> InFlightAct:
        """Issue one act (from step 0) of a collective or a transfer.  Raises PeerGone if a peer has
        ended.
        """
        match actor.work:
            case BoxWork() as work:
                started = self._start_collective(actor, work, act)
            case TransferWork() as work if actor.kind == SEND:
                started = self._send(actor, work, act)
            case TransferWork() as work:
                started = self._receive(actor, work)
            case other:
                raise AssertionError(other)
        self.sent_bytes[actor.id] = self.sent_bytes.get(actor.id, 0) + started.sent_bytes
        return started

    def _start_collective(self, actor: Actor, work: BoxWork, act: int) -> InFlightAct:
        axis = work.step.axis
        ranks = self._members[axis]
        if actor.id in self._wholes:
            return InFlightAct([self.links.meet(ranks)], lambda: self._wholes[actor.id])
        layouts, index = self.body.find_layouts(actor), self.body.coordinate[axis]
        collective = Collective(work.step, layouts, ranks, index)
        pending = self.links.start(collective, self.body.inputs(actor, act))
        return InFlightAct([pending], pending.wait)

    def _send(self, actor: Actor, work: TransferWork, act: int) -> InFlightAct:
        values = self.body.inputs(actor, act)
        sends = [
            self.links.send(
                [cut(values[k], within(region, held)) for k, held, region in message.pieces],
                message.other,
                work.channel,
            )
            for message in self._messages_of(actor, work)
        ]
        return InFlightAct(sends, list)

    def _receive(self, actor: Actor, work: TransferWork) -> InFlightAct:
        messages = self._messages_of(actor, work)
        received = [
            self.links.receive(
                [tuple(length for _, length in region) for _, _, region in message.pieces],
                [work.moves[k].dtype for k, _, _ in message.pieces],
                message.other,
                work.channel,
            )
            for message in messages
        ]
        return InFlightAct(received, lambda: _join_messages(messages, received))

    def _messages_of(self, actor: Actor, work: TransferWork) -> list[PeerMessage]:
        """Return one message for each rank at the other end; they are found at the first act."""
        if actor.id in self._messages:
            return self._messages[actor.id]
        rank, sends_it = self.body.rank, actor.kind == SEND
        pieces: dict[int, list[tuple[int, Slices, Slices]]] = {}
        for k, (move, sends) in enumerate(zip(work.moves, self.plan.routes(work), strict=True)):
            nd_sbp = (move.source if sends_it else move.target).nd_sbp
            held = slices_of_ranks(self.body.placement, nd_sbp, move.shape)[rank]
            for send in sends:
                ends = send.source, send.target
                here, other = ends if sends_it else ends[::-1]
                if here == rank:
                    assert other != rank, "a rank belongs to one stage"
                    pieces.setdefault(other, []).append((k, held, send.region))
        messages = [PeerMessage(other, tuple(parts)) for other, parts in sorted(pieces.items())]
        self._messages[actor.id] = messages
        return messages


def _join_messages(
    messages: Sequence[PeerMessage], received: Sequence[Pending]
) -> list[torch.Tensor]:
    """Return the tensors of a transfer, in order of moves, of the pieces of all its messages."""
    parts: dict[int, list[tuple[Slices, torch.Tensor]]] = {}
    held: dict[int, Slices] = {}
    for message, pending in zip(messages, received, strict=True):
        for (k, mine, region), value in zip(message.pieces, pending.wait(), strict=True):
            parts.setdefault(k, []).append((region, value))
            held[k] = mine
    return [join(parts[k], held[k]) for k in sorted(parts)]
