"""The real driver: one rank of a plan in a process of its own, which links.py joins to the others.

One thread computes and delivers messages.  Communication is asynchronous: it is issued when the
protocol allows, and puts a message into the inbox when it is done.  Readers, which make batches
ready, do the same, each from a thread of its own.  Nothing polls: the thread sleeps on the inbox,
where the other ranks of its host wake it.

On CUDA an act of compute ends when it is enqueued, so the loop runs ahead of the device, by one
step: a register that changes once a step, as those of a report, has one slot (add_registers.py).  A
collective of a blocking axis ends then, too: what is enqueued after it waits for it, and not the
host.  Any other of a micro-batch ends so once as much compute has been enqueued as had begun when
it ended in the rehearsal, or none is left; but where a message between stages may bring more,
the host waits for what comes first.  A report ends when its numbers are on the host; a thread waits
for them, as threads wait for other communication (collectives.py).  Each thread of readers and
copies has a stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import cast

import torch

from flowrun.engine.actors.plan import RECEIVE, SEND, Actor, CopyWork, Plan, ReportWork
from flowrun.engine.actors.scheduler import Scheduler
from flowrun.engine.actors.standstill import describe_owed, find_owed
from flowrun.engine.errors import RunError
from flowrun.engine.runtime.drivers.communication import Communication, InFlightAct
from flowrun.engine.runtime.drivers.pulse import Activity, Pulse
from flowrun.engine.runtime.kernels.kernels import Kernels, eager_kernels
from flowrun.engine.runtime.kernels.live_bytes import LiveBytes
from flowrun.engine.runtime.rank.rank import LentVariables, Rank, Results
from flowrun.engine.runtime.rank.readers import BatchSource, Supplied
from flowrun.engine.runtime.transport.arena import ArenaPiece
from flowrun.engine.runtime.transport.links import Links
from flowrun.engine.runtime.transport.pending import PeerGone
from flowrun.engine.runtime.transport.shared_weight_memory import side_by_side

_METERED_STEPS = 2  # counting is slow; the second step runs as all later ones do


class LostPeer(RunError):
    """The error of communication that failed, most likely because another rank ended first."""


class DistributedRank:
    """A rank of a plan, in a process that has called init_process_group.

    plan, rank, batches, initial, kernels, lent: see Rank.  device: the device that computes.
    links: the communication of this process; they may serve several plans (evaluation after
    training).  metered: True to count live bytes in the first steps.
    async_device: True if the host enqueues work and does not wait for the device; None means True
    on CUDA only.  pulse: where its acts are counted; None: nobody looks.
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
        lent: LentVariables | None = None,
        async_device: bool | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self.plan = plan
        self.pulse = pulse or Pulse.private(plan)
        self.rank = rank
        self.device = device
        self.links = links
        links.join(plan)
        lying = side_by_side(plan, rank, self._share) if lent is None else None
        self.body = Rank(plan, rank, batches, initial, device, kernels, lent, lying)
        self.communication = Communication(plan, self.body, links)
        self.live_bytes = LiveBytes(self.body.variables.values())
        self._metered_steps = _METERED_STEPS if metered else 0
        self._metered_until: dict[int, int] = {}  # actor -> the act up to which bytes are counted
        self.inbox = links.inbox
        # (actor, act) -> what waits for it and returns what it makes
        self.under_way: dict[tuple[int, int], Callable[[], Sequence[Supplied]]] = {}
        # of these, the collectives that end as in the rehearsal, while nobody watches them
        self.foreseen: dict[tuple[int, int], InFlightAct] = {}
        self.async_device = device.type == "cuda" if async_device is None else async_device
        threads = sum(actor.runs_in_thread for actor in plan.stage_actors(self.body.stage))
        threads = max(1, threads + self.async_device)  # one thread waits for reports of a device
        self.pool = ThreadPoolExecutor(threads, "reader", _use_device, (device,))
        self.current: Actor | None = None
        self.to_end = 0  # acts that have still to end before the next step is reported

    def _share(self, ranks: tuple[int, ...], owner: int, num_bytes: int) -> ArenaPiece | None:
        try:
            return self.links.share(ranks, owner, num_bytes)
        except PeerGone as error:
            raise LostPeer(f"rank {self.rank}", f"lost another rank: {error}") from error

    @property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes that this rank has sent, by actor."""
        return self.communication.sent_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of this rank's variables that lie in memory shared with other ranks."""
        return sum(weight.piece.nbytes for weight in self.body.side_by_side.values())

    @property
    def reporter(self) -> int:
        """The one rank whose report counts: the first of the stage that reports."""
        stage = next(a.stage for a in self.plan.actors if a.kind == "report")
        return self.plan.placements[stage].ranks[0]

    @property
    def reports(self) -> bool:
        return self.rank == self.reporter

    @torch.no_grad()
    def run(
        self,
        steps: int,
        on_step: Callable[[int, Results, float], None] | None = None,
        first: int = 0,
        may_begin: Callable[[int], bool] | None = None,
    ) -> list[Results]:
        """Run steps `first` to `steps` - 1, come to rest and return the results of each step that
        `on_step` has not taken.  Several runs in a row give the same numbers as one run.

        may_begin: see Scheduler; all ranks must be refused the same step.  on_step: called with
        (step, results, seconds since the last call) when a step has reported and as many acts as a
        step has have ended, for a loss may come early or late in a step.  Raises RunError, which
        names rank and actor, if an act fails; LostPeer if another rank seems to have failed.
        """

        def ask(granted: int) -> bool:
            begins = may_begin is None or may_begin(granted)
            if not begins:
                self.pulse.end_after(granted - 1)
            return begins

        scheduler = Scheduler(self.plan, self.body.stage, steps, first, may_begin and ask)
        reported, before = first, time.perf_counter()
        of_a_step = sum(scheduler.per_step.values())
        self.to_end = of_a_step
        self.pulse.enter_steps(scheduler, first)
        try:
            self._begin_metering(scheduler)
            while not scheduler.is_finished():
                if until := self._metered_until:
                    with self.live_bytes:
                        self._round(scheduler)
                    self._metered_until = {k: n for k, n in until.items() if scheduler.acts[k] < n}
                else:
                    self._round(scheduler)
                while on_step and self.to_end <= 0 and reported in self.body.results:
                    now = time.perf_counter()
                    on_step(reported, self.body.results.pop(reported), now - before)
                    reported, before = reported + 1, now
                    self.to_end += of_a_step
            self.pulse.enter(Activity.RESTING)
            self.links.rest({rank for ranks in self.plan.placements for rank in ranks.ranks})
            self.pulse.enter(Activity.STEPS_ENDED)
        except Exception as error:
            failure = self._failure(error)
            if failure is error:
                raise
            raise failure from error
        return [self.body.results.pop(k) for k in range(first, steps) if k in self.body.results]

    def _begin_metering(self, scheduler: Scheduler) -> None:
        """Count live bytes from here on, if that is wanted and has not been done before."""
        if steps := self._metered_steps:
            per_step = scheduler.per_step.items()
            self._metered_until = {k: scheduler.acts[k] + steps * acts for k, acts in per_step}
            self._metered_steps = 0

    def _failure(self, error: Exception) -> RunError:
        if isinstance(error, RunError):
            return error
        where = f"rank {self.rank}, actor {self.current.name if self.current else '?'}"
        if isinstance(error, PeerGone):
            return LostPeer(where, f"lost another rank, which says why: {error}")
        return RunError(where, f"{type(error).__name__}: {error}")

    def _round(self, scheduler: Scheduler) -> None:
        """Issue communication and reading that may begin; then run one act or take a message."""
        for each in [each for each in self.foreseen if scheduler.ends_after(*each) <= 0]:
            self._end_ahead(each)
        while launched := scheduler.next_communication():
            self._issue(self.plan.actors[launched.actor], launched.act)
        while launched := scheduler.next_supply():
            self._supply(self.plan.actors[launched.actor], launched.act)
        if not self.inbox.empty():
            self._take(scheduler, *self.inbox.get())
            return
        if launched := scheduler.next_compute():
            actor = self.plan.actors[launched.actor]
            if self.async_device and isinstance(actor.work, ReportWork):
                self._report(scheduler, actor, launched.act)
                return
            self._compute(actor, launched.act)
            self._end(scheduler, actor, launched.act)
        elif not scheduler.is_finished():
            if not self.under_way:
                raise RuntimeError(f"nothing is under way. {self._describe_end()}")
            if self.foreseen and not self._meets_others():
                self._end_ahead(min(self.foreseen, key=lambda each: scheduler.ends_after(*each)))
                return
            while self.foreseen:  # a message may bring what goes before them
                each, started = self.foreseen.popitem()
                started.on_done(partial(self._announce, *each))
            self._take(scheduler, *self._sleep())

    def _describe_end(self) -> str:
        """Say what this rank could do where it waits for itself."""
        self.pulse.sleep()
        here = {self.rank: self.pulse.state()}
        standstill = find_owed(here)
        return " ".join([describe_owed(owed, here) for owed in standstill.owed]) or str(
            standstill.waits
        )

    def _compute(self, actor: Actor, act: int) -> None:
        self.current = actor
        self.pulse.begin(actor.id, act)
        self.body.compute(actor, act)

    def _sleep(self) -> tuple[int, int]:
        """Return what is done first, actor and act, of that which is under way."""
        self.pulse.sleep()
        done = self.inbox.get()
        self.pulse.wake(self.plan.actors[done[0]])
        return done

    def _announce(self, actor: int, act: int) -> None:
        """Put an act that is done into the inbox, from any thread."""
        self.inbox.put((actor, act))

    def _end(self, scheduler: Scheduler, actor: Actor, act: int) -> None:
        self.body.release(actor, act)
        scheduler.end_act(actor.id)
        self.pulse.end(actor.id, act)
        self.to_end -= 1

    def _supply(self, actor: Actor, act: int) -> None:
        supply: Callable[..., list[Supplied]] = self.body.readers.deliver
        if isinstance(actor.work, CopyWork):
            supply = cast(Callable[..., list[Supplied]], self.body.copy)
        if self._metered_until:
            supply = partial(self.live_bytes.read, supply)
        inputs = self.body.inputs(actor, act)
        self._run_in_thread(actor, act, self.pool.submit(supply, actor, act, inputs))

    def _report(self, scheduler: Scheduler, actor: Actor, act: int) -> None:
        """Start an act of a report in a thread, so that this one computes on."""
        self.current = actor
        scheduler.release_compute(actor.id)
        self._run_in_thread(actor, act, self.pool.submit(self.body.report(actor, act)))

    def _run_in_thread(
        self, actor: Actor, act: int, future: Future[list[Supplied]] | Future[None]
    ) -> None:
        self.pulse.begin_in_thread(actor.id, act)
        self.under_way[actor.id, act] = lambda: future.result() or []
        future.add_done_callback(lambda _: self._announce(actor.id, act))

    # ------------------------------------------------------------------ communication

    def _issue(self, actor: Actor, act: int) -> None:
        self.current = actor
        self.pulse.begin(actor.id, act)
        started = self.communication.start(actor, act)
        self.body.give_up(actor, act)
        self.under_way[actor.id, act] = started.finish
        if self.async_device and self.plan.blocks(actor):
            self._announce(actor.id, act)
        elif self.async_device and self.plan.foresees_end(actor):
            self.foreseen[actor.id, act] = started
        else:
            started.on_done(partial(self._announce, actor.id, act))

    def _end_ahead(self, each: tuple[int, int]) -> None:
        """End a collective for the host: its `finish` lets the stream wait."""
        del self.foreseen[each]
        self._announce(*each)

    def _meets_others(self) -> bool:
        """Return whether a message between stages is under way."""
        return any(self.plan.actors[actor].kind in (SEND, RECEIVE) for actor, _ in self.under_way)

    def _take(self, scheduler: Scheduler, actor_id: int, act: int) -> None:
        actor = self.plan.actors[actor_id]
        self.current = actor
        self.pulse.take(actor_id)
        results = self.under_way.pop((actor_id, act))()
        if actor.kind != SEND:
            self.body.store(actor, act, cast(list[torch.Tensor], results))
        self._end(scheduler, actor, act)


def _use_device(device: torch.device) -> None:
    """Choose device and a stream of its own for a thread that begins: a function, so that it keeps
    no reference to the rank.
    """
    if device.type == "cuda":  # what threads do at one time, the device does at one time
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))
