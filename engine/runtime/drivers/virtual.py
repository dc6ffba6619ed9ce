"""The virtual cluster: all ranks of a plan in one process, with real tensors.

It follows the same protocol as the real driver.  Messages and acts may be taken in any order
(`order_seed`): the numbers must not depend on it.  The virtual transport copies and counts every
byte that goes from one rank to another.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import torch

from flowrun.engine.actors.deadlock import deadlock
from flowrun.engine.actors.plan import SEND, Actor, BoxWork, Plan, TransferWork
from flowrun.engine.actors.protocol import LaunchAct, violations
from flowrun.engine.actors.scheduler import Scheduler
from flowrun.engine.boxing.crossing import slices_of_ranks
from flowrun.engine.errors import FlowrunError, RunError
from flowrun.engine.runtime.kernels.kernels import Kernels, eager_kernels
from flowrun.engine.runtime.rank.rank import LentVariables, Rank, Results
from flowrun.engine.runtime.rank.readers import BatchSource
from flowrun.engine.runtime.transport.arena import Arena, ArenaPiece
from flowrun.engine.runtime.transport.shared_weight_memory import Share, side_by_side, wholes
from flowrun.engine.runtime.transport.transport import run_group, run_route


class VirtualCluster:
    """All ranks of a plan in this process.

    plan, batches, initial, kernels: see Rank.  lent: by rank, variables of another plan that it
    reads.  order_seed: seed of a random order of acts and messages; None: a fixed order.
    check: True to check the invariants of the protocol after each act.
    sent_bytes: by actor, of all ranks together, over the whole run.
    """

    def __init__(
        self,
        plan: Plan,
        batches: BatchSource,
        initial: Mapping[str, torch.Tensor] | None,
        order_seed: int | None = None,
        check: bool = False,
        kernels: Kernels = eager_kernels,
        lent: Mapping[int, LentVariables] | None = None,
    ) -> None:
        self.plan = plan
        self.check = check
        self.random = None if order_seed is None else random.Random(order_seed)
        ranks = sorted(rank for placement in plan.placements for rank in placement.ranks)
        device = torch.device("cpu")
        lent_to = lent or {}
        memory = _VirtualSharedMemory()
        self.ranks: dict[int, Rank] = {}
        for rank in ranks:
            lying = None if rank in lent_to else side_by_side(plan, rank, memory.make_share())
            self.ranks[rank] = Rank(
                plan, rank, batches, initial, device, kernels, lent_to.get(rank), lying
            )
        self.wholes = {rank: wholes(plan, body.side_by_side) for rank, body in self.ranks.items()}
        self.schedulers: dict[int, Scheduler] = {}
        self.sent_bytes: dict[int, int] = {}
        self.current: tuple[int, Actor] | None = None  # the rank and actor that act now
        self.posted: dict[tuple[int, int, int], dict[int, Actor]] = {}  # meeting -> who has come

    @torch.no_grad()
    def run(
        self,
        steps: int,
        on_step: Callable[[int, Results], None] | None = None,
        first: int = 0,
        may_begin: Callable[[int, int], bool] | None = None,
    ) -> list[Results]:
        """Run steps `first` to `steps` - 1, come to rest and return the results of each step.
        Several runs in a row give the same numbers as one run.

        may_begin: asked with a rank and a number of steps (see Scheduler); all ranks must be
        refused the same step.  on_step: called with (step, results) when a step has reported.
        Raises PlanError if nothing can act before the end; RunError, which names rank and actor, if
        an act fails.
        """
        self.schedulers = {
            rank: Scheduler(
                self.plan, body.stage, steps, first, may_begin and partial(may_begin, rank)
            )
            for rank, body in self.ranks.items()
        }
        reporter = self.reporter()
        reported = first
        while self._advance():
            while reported in self.ranks[reporter].results:
                if on_step:
                    on_step(reported, self.ranks[reporter].results[reported])
                reported += 1
        if not all(scheduler.is_finished() for scheduler in self.schedulers.values()):
            firsts = [self.schedulers[p.ranks[0]] for p in self.plan.placements]
            raise deadlock(self.plan, firsts)
        done = self.schedulers[reporter].granted
        return [self.ranks[reporter].results[k] for k in range(first, done)]

    def reporter(self) -> int:
        """Return the rank whose report counts: the first of the stage that reports."""
        stage = next(a.stage for a in self.plan.actors if a.kind == "report")
        return self.plan.placements[stage].ranks[0]

    # ------------------------------------------------------------------ one round

    def _advance(self) -> bool:
        """Run one round; return False if nothing happened.  Raises RunError for a failed act."""
        try:
            return self._run_round()
        except FlowrunError:
            raise
        except Exception as error:
            rank, actor = self.current or ("?", None)
            raise RunError(
                f"rank {rank}, actor {actor.name if actor else '?'}",
                f"{type(error).__name__}: {error}",
            ) from error

    def _run_round(self) -> bool:
        """Let every rank issue its communication and do one act; False if nothing happened."""
        happened = False
        order = list(self.schedulers)
        if self.random:
            self.random.shuffle(order)
        for rank in order:
            scheduler = self.schedulers[rank]
            while launched := scheduler.next_communication():
                happened = True
                actor = self.plan.actors[launched.actor]
                self.current = rank, actor
                self._post(rank, actor, launched.act)
            while launched := scheduler.next_supply():
                happened = True
                self._act(rank, launched)
            if self.random and self.random.random() < 0.5:
                happened = happened or scheduler.may_compute
                continue
            if launched := scheduler.next_compute():
                happened = True
                self._act(rank, launched)
        return happened

    def _act(self, rank: int, launched: LaunchAct) -> None:
        actor = self.plan.actors[launched.actor]
        self.current = rank, actor
        self.ranks[rank].compute(actor, launched.act)
        self._end(rank, actor, launched.act)

    def _end(self, rank: int, actor: Actor, act: int) -> None:
        self.ranks[rank].release(actor, act)
        self.schedulers[rank].end_act(actor.id)
        if self.check:
            scheduler = self.schedulers[rank]
            busy = scheduler.busy()
            broken = [
                violation
                for k, spec in scheduler.specs.items()
                for violation in violations(spec, scheduler.states[k], running=k in busy)
            ]
            assert not broken, broken

    # ------------------------------------------------------------------ meetings

    def _post(self, rank: int, actor: Actor, act: int) -> None:
        """Note that a rank has come to a collective or transfer, and run it when all have come."""
        work = actor.work
        if isinstance(work, TransferWork):
            meeting = (-1 - work.channel, act, 0)
            ends = (work.source_stage, work.target_stage)
            expected = sum(len(self.plan.placements[stage].ranks) for stage in ends)
        else:
            assert isinstance(work, BoxWork)
            group = self.ranks[rank].placement.group(rank, work.step.axis)
            meeting, expected = (actor.id, act, group[0]), len(group)
        here = self.posted.setdefault(meeting, {})
        here[rank] = actor
        if len(here) < expected:
            return
        del self.posted[meeting]
        if isinstance(work, TransferWork):
            results = self._transfer(work, here, act)
        else:
            results = self._collective(actor, work, act, group)
        for member, posted in here.items():
            if member in results:
                self.ranks[member].store(posted, act, results[member])
            self._end(member, posted, act)

    def _collective(
        self, actor: Actor, work: BoxWork, act: int, group: tuple[int, ...]
    ) -> dict[int, list[torch.Tensor]]:
        if actor.id in self.wholes[group[0]]:
            return {rank: self.wholes[rank][actor.id] for rank in group}
        pieces = [self.ranks[rank].inputs(actor, act) for rank in group]
        results, sent = run_group(work.step, pieces, self.ranks[group[0]].find_layouts(actor))
        self._count(actor.id, sum(sent))
        return dict(zip(group, results, strict=True))

    def _transfer(
        self, work: TransferWork, here: Mapping[int, Actor], act: int
    ) -> dict[int, list[torch.Tensor]]:
        senders = {rank: actor for rank, actor in here.items() if actor.kind == SEND}
        inputs = {rank: self.ranks[rank].inputs(actor, act) for rank, actor in senders.items()}
        source, target = (self.plan.placements[s] for s in (work.source_stage, work.target_stage))
        received: dict[int, list[torch.Tensor]] = {rank: [] for rank in here.keys() - senders}
        for k, (move, sends) in enumerate(zip(work.moves, self.plan.routes(work), strict=True)):
            out, counts = run_route(
                sends,
                {rank: values[k] for rank, values in inputs.items()},
                slices_of_ranks(source, move.source.nd_sbp, move.shape),
                slices_of_ranks(target, move.target.nd_sbp, move.shape),
            )
            self._count(next(iter(senders.values())).id, sum(counts.values()))
            for rank, value in out.items():
                received[rank].append(value)
        return received

    def _count(self, actor: int, sent: int) -> None:
        self.sent_bytes[actor] = self.sent_bytes.get(actor, 0) + sent


class _VirtualSharedMemory:
    """The memory that groups of ranks share: the first rank of a group that asks makes it."""

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, ...], int], ArenaPiece] = {}

    def make_share(self) -> Share:
        """Return the function by which a rank asks for memory; requests count in order."""
        asked: Counter[tuple[int, ...]] = Counter()

        def share(ranks: tuple[int, ...], _: int, num_bytes: int) -> ArenaPiece:
            asked[ranks] += 1
            piece = ArenaPiece(Arena(bytearray(num_bytes)), 0)
            return self._made.setdefault((ranks, asked[ranks]), piece)

        return share
