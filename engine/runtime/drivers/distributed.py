"""The real driver: one rank of a plan in its own process, joined to the others by links.py.

One thread computes and delivers messages.  Communication is asynchronous: it is issued when the
protocol allows, and answers with a message in the inbox when it is done.  What makes batches ready
does the same, from a thread of each reader.  Nothing polls; with nothing to do the thread sleeps on
the inbox, where the other ranks of its host wake it.

On CUDA an act of compute ends when it is enqueued, so the loop runs ahead of the device, by as many
steps as there are slots for what a step tells: a report ends when its numbers are on the host, for
which a thread waits, as threads do for communication (collectives.py).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from flowrun.engine.actors.plan import SEND, Actor, BoxWork, Plan, ReportWork, TransferWork
from flowrun.engine.actors.scheduler import Scheduler
from flowrun.engine.boxing.crossing import Send, route, slices_of_ranks
from flowrun.engine.errors import RunError
from flowrun.engine.ir.placement import Slices
from flowrun.engine.runtime.kernels.kernels import Kernels, eager_kernels
from flowrun.engine.runtime.kernels.live_bytes import LiveBytes
from flowrun.engine.runtime.rank.rank import Rank, Results, There
from flowrun.engine.runtime.rank.readers import BatchSource
from flowrun.engine.runtime.transport.links import Links
from flowrun.engine.runtime.transport.pending import PeerGone, Pending
from flowrun.engine.runtime.transport.shared_weight_memory import SharedMemory, side_by_side, wholes
from flowrun.engine.runtime.transport.transport import cut, join

_METERED_STEPS = 2  # the second runs as all later ones do


class LostPeer(RunError):
    """Communication failed: most likely another rank ended first, and is the one to blame."""


class DistributedRank:
    """One rank of a plan, in a process that has called init_process_group.  sent_bytes: by actor,
    by this rank.

    links: may serve other plans of this process too (evaluation after training).  metered:
    count live bytes in the first steps.  async_device: the host enqueues work and
    does not wait for the device; None: True of CUDA.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        batches: BatchSource,
        initial: Mapping[str, torch.Tensor] | None,
        device: torch.device,
        links: Links,
        metered: bool = False,
        kernels: Kernels = eager_kernels,
        there: There | None = None,
        async_device: bool | None = None,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.device = device
        self.links = links
        self.links.join(plan)
        lying = side_by_side(plan, rank, self._share) if there is None else None
        self.body = Rank(plan, rank, batches, initial, device, kernels, there, lying)
        self.wholes = wholes(plan, self.body.side_by_side)
        placement = self.body.placement
        self.members = [placement.group(rank, axis) for axis in range(len(placement.axes))]
        self.inbox = self.links.inbox
        self.under_way: dict[tuple[int, int], InFlightAct | ThreadAct] = {}
        self.async_device = device.type == "cuda" if async_device is None else async_device
        readers = (
            sum(actor.runs_in_thread for actor in plan.stage_actors(self.body.stage))
            + self.async_device
        )
        self.pool = ThreadPoolExecutor(max(readers, 1), "beside", _enter, (device,))
        self.sent_bytes: dict[int, int] = {}
        self.routes: dict[int, list[PeerMessage]] = {}
        self.current: Actor | None = None
        self.to_end = 0  # acts, until a step is reported
        self.live_bytes = LiveBytes(self.body.variables.values())
        self.to_meter, self.metering = metered, False

    def _share(self, ranks: tuple[int, ...], owner: int, num_bytes: int) -> SharedMemory | None:
        try:
            return self.links.share(ranks, owner, num_bytes)
        except PeerGone as error:
            raise LostPeer(f"rank {self.rank}", f"lost another rank: {error}") from error

    @property
    def shared_bytes(self) -> int:
        """Of the variables that it holds, those in memory that it shares with others."""
        return sum(weight.piece.nbytes for weight in self.body.side_by_side.values())

    @property
    def reports(self) -> bool:
        """True on the one rank whose report counts: the first of the stage that reports."""
        stage = next(a.stage for a in self.plan.actors if a.kind == "report")
        return self.rank == self.plan.placements[stage].ranks[0]

    @torch.no_grad()
    def run(
        self,
        steps: int,
        on_step: Callable[[int, Results, float], None] | None = None,
        first: int = 0,
    ) -> list[Results]:
        """Run from step `first` until `steps` have been done, then come to rest; on_step(step,
        results, seconds since the last) when a step has reported and as many acts as it has have
        ended: a loss may be there early or late in a step.

        A run in pieces is the run in one: acts are counted from step 0.  Raises RunError, naming
        rank and actor, if an act fails; LostPeer if another rank seems to have failed.
        """
        scheduler = Scheduler(self.plan, self.body.stage, steps, first)
        reported, before = first, time.perf_counter()
        of_a_step = sum(scheduler.per_step.values())
        self.to_end = of_a_step
        try:
            metered = self._acts_metered(scheduler)
            self.metering = bool(metered)
            while not scheduler.finished():
                if metered:
                    with self.live_bytes:
                        self._round(scheduler)
                    metered = {k: n for k, n in metered.items() if scheduler.acts[k] < n}
                    self.metering = bool(metered)
                else:
                    self._round(scheduler)
                while on_step and self.to_end <= 0 and reported in self.body.results:
                    now = time.perf_counter()
                    on_step(reported, self.body.results[reported], now - before)
                    reported, before = reported + 1, now
                    self.to_end += of_a_step
            self.links.rest({rank for ranks in self.plan.placements for rank in ranks.ranks})
        except Exception as error:
            failure = self._failure(error)
            if failure is error:
                raise
            raise failure from error
        return [self.body.results[k] for k in range(first, steps) if k in self.body.results]

    def _acts_metered(self, scheduler: Scheduler) -> dict[int, int]:
        """Actor -> act up to which live bytes are counted: two steps, the second into the first."""
        if not self.to_meter:
            return {}
        self.to_meter = False
        return {
            k: scheduler.acts[k] + _METERED_STEPS * self.plan.acts_per_step(actor)
            for k, actor in scheduler.actors.items()
        }

    def _failure(self, error: Exception) -> RunError:
        if isinstance(error, RunError):
            return error
        where = f"rank {self.rank}, actor {self.current.name if self.current else '?'}"
        if isinstance(error, PeerGone):
            return LostPeer(where, f"lost another rank, which says why: {error}")
        return RunError(where, f"{type(error).__name__}: {error}")

    def _round(self, scheduler: Scheduler) -> None:
        """Issue what may be issued, then either run one act or wait for a message."""
        while launched := scheduler.next_communication():
            self._issue(self.plan.actors[launched.actor], launched.act)
        while launched := scheduler.next_supply():
            self._supply(self.plan.actors[launched.actor], launched.act)
        if not self.inbox.empty():
            self._arrived(scheduler, *self.inbox.get())
            return
        if launched := scheduler.next_compute():
            actor = self.plan.actors[launched.actor]
            if self.async_device and isinstance(actor.work, ReportWork):
                self._report(scheduler, actor, launched.act)
                return
            self._compute(actor, launched.act)
            self._ended(scheduler, actor, launched.act)
        elif not scheduler.finished():
            if not self.under_way:
                raise RuntimeError(f"nothing can act and nothing is under way: {scheduler.waits()}")
            self._arrived(scheduler, *self._sleep())

    def _compute(self, actor: Actor, act: int) -> None:
        self.current = actor
        self.body.compute(actor, act)

    def _sleep(self) -> tuple[int, int]:
        """Until something under way is done: which act."""
        return self.inbox.get()

    def _landed(self, actor: int, act: int) -> None:
        """What was under way is done; called from any thread."""
        self.inbox.put((actor, act))

    def _ended(self, scheduler: Scheduler, actor: Actor, act: int) -> None:
        self.body.release(actor, act)
        scheduler.done(actor.id)
        self.to_end -= 1

    def _supply(self, actor: Actor, act: int) -> None:
        """Start an act of a reader in a thread."""
        work: list[Any] = [self.body.readers.supply, actor, act, self.body.inputs(actor, act)]
        if self.metering:
            work.insert(0, self.live_bytes.read)
        self._beside(actor, act, self.pool.submit(*work))

    def _report(self, scheduler: Scheduler, actor: Actor, act: int) -> None:
        """Start an act of a report, and compute on."""
        self.current = actor
        scheduler.aside(actor.id)
        self._beside(actor, act, self.pool.submit(self.body.report(actor, act)))

    def _beside(self, actor: Actor, act: int, future: Future[Any]) -> None:
        """An act goes on in a thread."""
        self.under_way[actor.id, act] = ThreadAct(future)
        future.add_done_callback(lambda _: self._landed(actor.id, act))

    # ------------------------------------------------------------------ communication

    def _issue(self, actor: Actor, act: int) -> None:
        self.current = actor
        flight = (
            self._collective(actor, act)
            if isinstance(actor.work, BoxWork)
            else self._transfer(actor, act)
        )
        self.body.give_up(actor, act)
        self.under_way[actor.id, act] = flight
        self.sent_bytes[actor.id] = self.sent_bytes.get(actor.id, 0) + flight.sent_bytes
        flight.on_done(lambda: self._landed(actor.id, act))

    def _arrived(self, scheduler: Scheduler, actor_id: int, act: int) -> None:
        actor = self.plan.actors[actor_id]
        self.current = actor
        made = self.under_way.pop((actor_id, act)).finish()
        if actor.kind != SEND:
            self.body.store(actor, act, made)
        self.body.acts[actor.id] = act + 1
        self._ended(scheduler, actor, act)

    def _collective(self, actor: Actor, act: int) -> InFlightAct:
        work = actor.work
        assert isinstance(work, BoxWork)
        axis = work.step.axis
        ranks = self.members[axis]
        if actor.id in self.wholes:
            return InFlightAct([self.links.meet(ranks)], lambda: self.wholes[actor.id])
        pending = self.links.start(
            work.step,
            self.body.inputs(actor, act),
            self.body.layouts(actor),
            ranks,
            self.body.coordinate[axis],
        )
        return InFlightAct([pending], pending.wait)

    def _transfer(self, actor: Actor, act: int) -> InFlightAct:
        legs = self.routes.get(actor.id)
        if legs is None:
            legs = self.routes[actor.id] = self._legs(actor)
        if actor.kind == SEND:
            values = self.body.inputs(actor, act)
            sends = [
                self.links.send(
                    [cut(values[k], held, region) for k, held, region in leg.pieces],
                    leg.other,
                    leg.tag,
                )
                for leg in legs
            ]
            return InFlightAct(sends, list)
        received = [
            self.links.receive(
                [tuple(n for _, n in region) for _, _, region in leg.pieces],
                [self.plan.graph.tensors[self._pair(actor, k)[0]].dtype for k, _, _ in leg.pieces],
                leg.other,
                leg.tag,
            )
            for leg in legs
        ]
        return InFlightAct(received, lambda: _joined(legs, received))

    @staticmethod
    def _pair(actor: Actor, k: int) -> tuple[str, str]:
        assert isinstance(actor.work, TransferWork)
        return actor.work.pairs[k]

    def _legs(self, actor: Actor) -> list[PeerMessage]:
        """For each rank at the other end: which regions of which tensors go in its one message."""
        work = actor.work
        assert isinstance(work, TransferWork)
        source, target = (self.plan.placements[s] for s in (work.source_stage, work.target_stage))
        legs: dict[int, list[tuple[int, Slices, Slices]]] = {}
        for k, (sent, received) in enumerate(work.pairs):
            op = self.plan.graph.producer[received]
            shape = self.plan.graph.tensors[sent].shape
            sends = route(source, op.in_sbp[0], target, op.out_sbp[0], shape)
            mine, layout = (source, op.in_sbp[0]) if actor.kind == SEND else (target, op.out_sbp[0])
            held = slices_of_ranks(mine, layout, shape)[self.rank]
            for send in sends:
                if self._here(send, actor) == self.rank:
                    other = send.target if actor.kind == SEND else send.source
                    assert other != self.rank, (
                        "a rank belongs to one stage (launcher/recipe/placement_keys.py sees to it)"
                    )
                    legs.setdefault(other, []).append((k, held, send.region))
        return [PeerMessage(other, work.channel, pieces) for other, pieces in sorted(legs.items())]

    @staticmethod
    def _here(send: Send, actor: Actor) -> int:
        return send.source if actor.kind == SEND else send.target


class PeerMessage:
    """What goes between this rank and one other in a transfer: (index of the tensor, what this rank
    holds, region).
    """

    def __init__(self, other: int, tag: int, pieces: list[tuple[int, Slices, Slices]]) -> None:
        self.other = other
        self.tag = tag
        self.pieces = pieces


def _joined(legs: list[PeerMessage], received: list[Pending]) -> list[torch.Tensor]:
    """What the messages of a transfer make, tensor by tensor."""
    parts: dict[int, list[tuple[Slices, torch.Tensor]]] = {}
    held: dict[int, Slices] = {}
    for leg, pending in zip(legs, received, strict=True):
        for (k, mine, region), value in zip(leg.pieces, pending.wait(), strict=True):
            parts.setdefault(k, []).append((region, value))
            held[k] = mine
    return [join(parts[k], held[k]) for k in sorted(parts)]


def _enter(device: torch.device) -> None:
    """A thread begins, which knows no device of its own.  It must not hold the rank."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class ThreadAct:
    """An act of a reader or of a report, in its thread."""

    def __init__(self, future: Future[list[Any] | None]) -> None:
        self.future = future

    def finish(self) -> list[Any]:
        """What it made; raises what it failed with."""
        return self.future.result() or []


class InFlightAct:
    """Messages under way for one act; done when all are."""

    def __init__(self, pendings: list[Pending], finish: Callable[[], list[torch.Tensor]]) -> None:
        self.pendings = pendings
        self.finish_made = finish

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank puts on the wire."""
        return sum(p.sent_bytes for p in self.pendings)

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call back once, when every message is done.

        Messages end in any order, from several threads.
        """
        countdown = itertools.count(1)  # one next() is atomic
        last = len(self.pendings)

        def one() -> None:
            if next(countdown) == last:
                callback()

        if not self.pendings:
            callback()
        for pending in self.pendings:
            pending.on_done(one)

    def finish(self) -> list[torch.Tensor]:
        """Unpack; raises what a message failed with."""
        for pending in self.pendings:
            pending.wait()
        return self.finish_made()
