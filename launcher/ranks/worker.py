"""The worker of launch=local: a forked process that is one rank, from its first line to its exit.

It inherits job and plans from the launcher, and reports over a pipe.  A worker that fails leaves at
once, without a regular exit that would wait for its peers; one that merely lost a peer lingers, so
that the peer is blamed.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NoReturn

import torch

from flowrun.engine.compile import Rehearsed
from flowrun.engine.runtime.drivers import logical_checkpoint
from flowrun.engine.runtime.drivers.distributed import DistributedRank, LostPeer
from flowrun.engine.runtime.drivers.pulse import Phase, Pulse, Pulses
from flowrun.engine.runtime.drivers.recorder import RecordedRank
from flowrun.engine.runtime.kernels.kernels import Kernels
from flowrun.engine.runtime.process import heap
from flowrun.engine.runtime.process.core import pin_to_core
from flowrun.engine.runtime.process.lifetime import end_with
from flowrun.engine.runtime.process.outputs import ProcessOutputs
from flowrun.engine.runtime.process.stacks import Stacks
from flowrun.engine.runtime.rank.rank import Results
from flowrun.engine.runtime.rank.readers import BatchSource, item_rows
from flowrun.engine.runtime.transport.links import Links
from flowrun.launcher.data.data_workers import DataWorkers
from flowrun.launcher.data.open_files import reopen_files
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.segments import RankRows, ReadingOrder
from flowrun.launcher.ranks.failure import describe, with_peers
from flowrun.launcher.ranks.finite import (
    NotFinite,
    StepJudge,
    check_numbers,
    compare_replicas,
    explain,
    find_broken,
)
from flowrun.launcher.ranks.pipes import EventSender
from flowrun.launcher.ranks.rank_events import (
    BadStep,
    Evaluated,
    NumbersSeen,
    RankEnded,
    RankFailed,
    Reason,
    StepDone,
)
from flowrun.launcher.ranks.rank_figures import acts_by_name, max_stashed
from flowrun.launcher.ranks.rank_memory import RankGauges, RankMemory
from flowrun.launcher.ranks.rank_saves import RankSaves
from flowrun.launcher.ranks.snapshot_memory import MemorySnapshot, SnapshotMemory
from flowrun.launcher.ranks.snapshots import SnapshotWriter
from flowrun.launcher.ranks.step_gate import StepGate

OnStep = Callable[[int, Results, float], None]

_LINGER_S = 2.0  # elastic's agent looks every 0.1 s who died first
_BORN_S = 300  # until all ranks of a host are forked; elastic ends all if one has gone


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A worker runs in each forked process.  kernels: of training's regions.  gate: says which
    steps the local ranks may begin.  pipes: to the launcher, one for each local rank.  born: a
    barrier for all local ranks, before any of them talks to the launcher's store.  pulses, stacks:
    what the launcher's watch looks at (watch.py).  outputs: what it prints goes there.
    silence_s: see find_silence in watch.py.
    interface: of the network between the hosts, for gloo.
    """

    job: Job
    training: Rehearsed
    evaluation: Rehearsed | None
    kernels: Kernels
    folder: Path
    launcher: int
    silence_s: float
    gate: StepGate | None = None
    snapshots: SnapshotMemory | None = None
    pipes: tuple[int, ...] = ()
    born: Barrier | None = None
    pulses: Pulses | None = None
    stacks: Stacks | None = None
    outputs: ProcessOutputs | None = None
    interface: str = ""

    def live(self) -> None:
        """Run from the fork to the exit."""
        end_with(self.launcher)
        reopen_files()
        heap.keep_pages()
        rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        for k, pipe in enumerate(self.pipes):
            if k != local:
                os.close(pipe)
        if self.stacks:
            self.stacks.register(local)
        self.pulse.start(rank)
        events = EventSender(self.pipes[local])
        try:
            # The store's thread looks up the name of a process that connects, under a lock of the C
            # library. A rank that is forked at that moment would find it locked for ever.
            assert self.born is not None
            self.born.wait(_BORN_S)
            if self.outputs:
                self.outputs.enter(local)
            self._log(self._describe(rank))
            self._run(rank, events)
        except BaseException as error:
            self._fail(error, rank, events)

    def _log(self, text: str) -> None:
        if self.outputs:
            self.outputs.write_log(f"{text}\n")

    def _describe(self, rank: int) -> str:
        """Return the first line of a log for what `rank` prints from here on."""
        about = f"rank {rank} of {self.training.plan.num_ranks}"
        process = f"process {os.getpid()} on {socket.gethostname()}"
        start = self.job.start.step if self.job.start else 0
        return f"{_read_clock()} {about}, {process}, from step {start}"

    def _fail(self, error: BaseException, rank: int, events: EventSender) -> NoReturn:
        """Leave at once, from any thread, with an error."""
        where, problem, story = describe(error, rank)
        self._log(f"\n{_read_clock()} rank {rank} ends with an error\n{story}")
        if isinstance(error, NotFinite):
            events.send(BadStep(error.steps))
        fault = Reason(where, problem, story=story)
        events.send(RankFailed(fault, lost_peer=isinstance(error, LostPeer)))
        if isinstance(error, LostPeer):
            time.sleep(_LINGER_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    @property
    def pulse(self) -> Pulse:
        """The pulse of this rank."""
        assert self.pulses is not None
        return self.pulses.ranks[int(os.environ["LOCAL_RANK"])]

    def _run(self, rank: int, events: EventSender) -> None:
        import torch.distributed as dist

        torch.set_num_threads(self.job.recipe.launch.threads)
        sources = self._sources(rank, events)
        pin_to_core(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        device = device_of_rank(self.job.device_type)
        with with_peers(rank, "while the ranks meet"):
            join_process_group(device, self.silence_s, self.interface)
            memory = RankMemory(device)
            gloo = self.job.recipe.launch.transport == "gloo"
            links = Links(rank, device, os.environ["GROUP_RANK"], not gloo)
            links.join(self.training.plan)
            zero_ns = _same_time() if self.job.recipe.launch.num_hosts > 1 else 0
        self.pulse.enter(Phase.MAKING_WEIGHTS)
        trained = self._body(rank, device, links, sources.training)
        self._train(rank, trained, device, memory, events, sources.evaluation)
        sources.close()
        measured = self._measurements(trained, memory, links.message_bytes, zero_ns)
        events.send(RankEnded(rank, measured))
        self.pulse.enter(Phase.LEAVING)
        with with_peers(rank, "at the end"):
            dist.barrier()  # gloo aborts at random if a peer has gone when groups are destroyed
            links.close()
            dist.destroy_process_group()
        self.pulse.enter(Phase.ENDED)

    def _train(
        self,
        rank: int,
        trained: DistributedRank,
        device: torch.device,
        memory: RankMemory,
        events: EventSender,
        held_out: BatchSource,
    ) -> None:
        """Train segment by segment, with evaluations and checkpoints where they are due."""
        self._restore(rank, trained)
        fail = partial(self._fail, rank=rank, events=events)
        saves = RankSaves(self.job, trained, self.folder, self.pulse, events, fail)
        evaluation: DistributedRank | None = None
        problems: list[tuple[int, str]] = []
        report = self._reporter(trained, events, problems)
        assert self.gate is not None
        gate = self.gate.of_rank(int(os.environ["LOCAL_RANK"]))
        saved = self.job.saved_steps  # of the newest checkpoint

        def may_begin(steps: int) -> bool:
            if device.type == "cuda":
                self.pulse.note_device(torch.cuda.memory_reserved(device))
            return gate.may_begin(steps)

        for segment in self.job.segments:
            while gate.begun < segment.last:
                with memory.of_training(trained):
                    trained.run(segment.last, report, gate.begun, may_begin)
                check_numbers(self.job, trained, gate.begun, problems, saves.finish)
                if gate.begun == segment.last:
                    break
                if gate.begun > saved:  # all ranks rest here, at a halt
                    saved = gate.begun
                    saves.save_checkpoint(saved)
                if not gate.go_on():
                    if gate.completes:
                        saves.save_weights(gate.begun)
                    self.pulse.enter(Phase.WRITING)
                    saves.finish()
                    return
            if segment.verify:
                compare_replicas(trained, segment.last)
            if segment.evaluate and self.evaluation:
                self.pulse.enter(Phase.PREPARING)
                evaluation = evaluation or self._evaluator(rank, trained, device, held_out)
                results = evaluation.run(self.job.eval_steps)
                if evaluation.reports:
                    events.send(Evaluated(segment.last - 1, self.job.validation(results)))
            if segment.save:
                saved = segment.last
                saves.save_checkpoint(saved)
        saves.save_weights(self.job.recipe.train.steps)
        self.pulse.enter(Phase.WRITING)
        saves.finish()

    def _restore(self, rank: int, trained: DistributedRank) -> None:
        """Fill the variables of this rank with the state that the run goes on from, if it does."""
        start, variables = self.job.start, trained.body.variables
        if start:
            self.pulse.enter(Phase.RESTORING)
        if isinstance(start, MemorySnapshot):
            start.restore(rank, variables)
        elif start and start.folder:
            logical_checkpoint.restore(start.folder, self.training.plan, rank, variables)

    def _reporter(
        self, trained: DistributedRank, events: EventSender, problems: list[tuple[int, str]]
    ) -> OnStep:
        """Return what is called after each step.

        trained, events: of this rank.  problems: takes the first step that must end the run, and
        why.
        """
        snapshots = self.snapshots and SnapshotWriter(
            trained.body, trained.reports, self.snapshots, self.job.start
        )
        judge = StepJudge.of(self.job)
        pulses = self.pulses.ranks if self.pulses else ()
        gauges = RankGauges(pulses, on_cpu=self.job.device_type == "cpu")

        def report(step: int, results: Results, seconds: float) -> None:
            self.pulse.report()
            events.send(StepDone(step, results, seconds, gauges.read()))
            if (problem := judge.problem(results)) and not problems:
                problems.append((step, problem))
                if not self._halt(events):
                    raise explain(self.job, step, problem, (), find_broken(trained.body))
            if snapshots and not problems:  # a restart does a step again that went wrong
                snapshots.report(step + 1)

        return report if trained.reports else _forget

    def _halt(self, events: EventSender) -> bool:
        """Let all ranks come to rest and end there, those of other hosts by their launchers; False
        if a rank was killed as it passed the gate.
        """
        assert self.gate is not None
        if self.job.recipe.launch.num_hosts > 1:
            events.send(NumbersSeen())
            return True
        if not self.gate.freeze():
            return False
        self.gate.open(self.gate.begun, ends=True)
        return True

    def _measurements(
        self, trained: DistributedRank, memory: RankMemory, message_bytes: int, zero_ns: int
    ) -> dict[str, object]:
        """Return what the rank measured, for the launcher's report.

        zero_ns: moment that all hosts call zero, on this host's clock.
        """
        first = self.job.start.step if self.job.start else 0
        recorded = trained.read_notes() if isinstance(trained, RecordedRank) else ()
        return {
            "peak": memory.peak + message_bytes,
            "process_peak": memory.process_peak + message_bytes + trained.shared_bytes,
            "sent": sum(trained.sent_bytes.values()),
            "acts": acts_by_name(self.training, trained.body.acts),
            "waited_s": self.pulse.waited_s / max(1.0, self.pulse.trained_steps - first),
            "stashed": max_stashed(self.training, trained.body.most_live),
            "notes": [
                (event.what, event.actor, event.act, event.begin - zero_ns, event.end - zero_ns)
                for event in recorded
            ],
        }

    def _sources(self, rank: int, events: EventSender) -> BatchSources:
        """Return what gives the batches of this rank; data workers are forked here, before the rank
        has threads, sockets, a device, or a core of its own.
        """
        materials, number = self.job.materials, self.job.recipe.launch.data_workers
        samplers = (materials.sampler, materials.evaluation_sampler)
        order = ReadingOrder(
            segments=self.job.segments,
            training=_rows_of(self.training, rank),
            evaluation=_rows_of(self.evaluation, rank),
            eval_steps=self.job.eval_steps,
        )
        if not number or next(iter(order), None) is None:
            return BatchSources(*samplers)
        fail = partial(self._fail, rank=rank, events=events)
        workers = DataWorkers(samplers, order, number, rank, fail)
        return BatchSources(workers.training, workers.evaluation, workers.close)

    def _body(
        self, rank: int, device: torch.device, links: Links, batches: BatchSource
    ) -> DistributedRank:
        job, steps = self.job, self.job.recipe.engine.traced_steps
        arguments = (self.training.plan, rank, batches, job.initial, device, links)
        metered = device.type == "cpu"  # on CUDA torch counts by itself
        options: dict[str, Any] = {"metered": metered, "kernels": self.kernels, "pulse": self.pulse}
        if steps:
            return RecordedRank(*arguments, **options, trace=steps)
        return DistributedRank(*arguments, **options)

    def _evaluator(
        self, rank: int, trained: DistributedRank, device: torch.device, batches: BatchSource
    ) -> DistributedRank:
        """This rank of the evaluation plan; it reads the variables that training writes."""
        assert self.evaluation is not None
        plan = self.evaluation.plan
        there = trained.body.lend_variables(plan, self.job.evaluated)
        initial, links = self.job.materials.initial, trained.links
        with with_peers(rank, "while the ranks meet for evaluation"):
            links.join(plan)
        return DistributedRank(
            plan, rank, batches, initial, device, links, lent=there, pulse=self.pulse
        )


@dataclass(frozen=True)
class BatchSources:
    """What gives the batches of a rank.  close: ends the processes that it has for that."""

    training: BatchSource
    evaluation: BatchSource
    close: Callable[[], None] = lambda: None


def _rows_of(planned: Rehearsed | None, rank: int) -> RankRows | None:
    rows = planned and item_rows(planned.plan, rank)
    return RankRows(rows, planned.plan.micro_batches) if planned and rows else None


def _forget(step: int, results: Results, seconds: float) -> None:
    """Leave the results of a step to the rank that reports them."""


def _read_clock() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _same_time() -> int:
    """The clock of this host, in ns, at a moment that is the same on all (to about 0.1 ms)."""
    import torch.distributed as dist

    dist.barrier()  # the first one connects
    dist.barrier()
    return time.perf_counter_ns()


def join_process_group(device: torch.device, silence_s: float, interface: str) -> None:
    """Connect to the other ranks, by NCCL on CUDA and by gloo elsewhere.

    silence_s: seconds after which a message has no peer any more.  interface: on which
    gloo listens.

    With its device NCCL makes each group where we do, in one order on all ranks, and then connects
    its rings and trees there, too; Links does so for messages.
    """
    import torch.distributed as dist

    on_cuda = device.type == "cuda"
    if interface:  # else gloo listens where the name of this host leads
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        timeout=timedelta(seconds=silence_s),
        device_id=device if on_cuda else None,
    )


def device_of_rank(kind: str) -> torch.device:
    """This rank's device."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device
