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

from flowrun.engine.actors.plan import Plan
from flowrun.engine.compile import Rehearsed
from flowrun.engine.runtime.drivers import logical_checkpoint
from flowrun.engine.runtime.drivers.distributed import DistributedRank, LostPeer
from flowrun.engine.runtime.drivers.pulse import Phase, Pulse, Pulses
from flowrun.engine.runtime.drivers.recorder import RecordedRank
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
from flowrun.launcher.job.compiling import Compiled
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
from flowrun.launcher.ranks.rank_memory import RankGauges, RankMemory, acts_by_name, max_stashed
from flowrun.launcher.ranks.rank_saves import RankSaves
from flowrun.launcher.ranks.segment_loop import train_segments
from flowrun.launcher.ranks.snapshot_memory import MemorySnapshot, SnapshotMemory
from flowrun.launcher.ranks.snapshots import SnapshotWriter
from flowrun.launcher.ranks.step_gate import StepGate

OnStep = Callable[[int, Results, float], None]

_LINGER_S = 2.0  # elastic's agent looks every 0.1 s who died first
_BORN_S = 300  # until all ranks of a host are forked; elastic ends all if one has gone


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A worker runs in each forked process.

    compiled: what ranks do.  gate: says which steps the local ranks may begin.  pipes: to the
    launcher, one for each local rank.  born: a barrier for all local ranks, before any of them
    talks to the launcher's store.  pulses, stacks: what the launcher's watch looks at (watch.py);
    limit_s, silence_s: see find_limit and find_silence there.  outputs: what it prints goes there.
    interface: of the network between the hosts, for gloo.
    """

    compiled: Compiled
    folder: Path
    launcher: int
    limit_s: float
    silence_s: float
    gate: StepGate | None = None
    snapshots: SnapshotMemory | None = None
    pipes: tuple[int, ...] = ()
    born: Barrier | None = None
    pulses: Pulses | None = None
    stacks: Stacks | None = None
    outputs: ProcessOutputs | None = None
    interface: str = ""

    @property
    def job(self) -> Job:
        """What the ranks train."""
        return self.compiled.job

    @property
    def training(self) -> Rehearsed:
        """The plan that they follow."""
        return self.compiled.training

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
            self.fail(error, rank, events)

    def _log(self, text: str) -> None:
        if self.outputs:
            self.outputs.write_log(f"{text}\n")

    def _describe(self, rank: int) -> str:
        """Return the first line of a log for what `rank` prints from here on."""
        about = f"rank {rank} of {self.training.plan.num_ranks}"
        process = f"process {os.getpid()} on {socket.gethostname()}"
        start = self.job.start.step if self.job.start else 0
        return f"{_read_clock()} {about}, {process}, from step {start}"

    def fail(self, error: BaseException, rank: int, events: EventSender) -> NoReturn:
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
        self._restore(rank, trained)
        _RankTraining(self, trained, memory, events, sources.evaluation).train()
        sources.close()
        measured = self._measurements(trained, memory, links.message_bytes, zero_ns)
        events.send(RankEnded(rank, measured))
        self.pulse.enter(Phase.LEAVING)
        with with_peers(rank, "at the end"):
            dist.barrier()  # gloo aborts at random if a peer has gone when groups are destroyed
            links.close()
            dist.destroy_process_group()
        self.pulse.enter(Phase.ENDED)

    def _restore(self, rank: int, trained: DistributedRank) -> None:
        """Fill the variables of this rank with the state that the run goes on from, if it does."""
        start, variables = self.job.start, trained.body.variables
        if start:
            self.pulse.enter(Phase.RESTORING)
        if isinstance(start, MemorySnapshot):
            start.restore(rank, variables)
        elif start and start.folder:
            logical_checkpoint.restore(start.folder, self.training.plan, rank, variables)

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
            evaluation=_rows_of(self.compiled.evaluation, rank),
            eval_steps=self.job.eval_steps,
        )
        if not number or next(iter(order), None) is None:
            return BatchSources(*samplers)
        fail = partial(self.fail, rank=rank, events=events)
        workers = DataWorkers(samplers, order, number, rank, fail)
        return BatchSources(workers.training, workers.evaluation, workers.close)

    def _body(
        self, rank: int, device: torch.device, links: Links, batches: BatchSource
    ) -> DistributedRank:
        job, steps = self.job, self.job.recipe.engine.traced_steps
        arguments = (self.training.plan, rank, batches, job.initial, device, links)
        metered = device.type == "cpu"  # on CUDA torch counts by itself
        options: dict[str, Any] = {
            "metered": metered,
            "kernels": self.compiled.kernels,
            "pulse": self.pulse,
        }
        if steps:
            return RecordedRank(*arguments, **options, trace=steps)
        return DistributedRank(*arguments, **options)


class _RankTraining:
    """The training of one rank; a Trainer."""

    def __init__(
        self,
        worker: Worker,
        trained: DistributedRank,
        memory: RankMemory,
        events: EventSender,
        held_out: BatchSource,
    ) -> None:
        """trained: the rank.  memory, events: of it.  held_out: gives the batches of evaluation."""
        self._worker, self._job, self._trained = worker, worker.job, trained
        self._memory, self._events, self._held_out = memory, events, held_out
        fail = partial(worker.fail, rank=trained.rank, events=events)
        self._saves = RankSaves(
            worker.job, trained, worker.folder, worker.pulse, events, fail, worker.limit_s
        )
        self._problems: list[tuple[int, str]] = []  # the first step that must end the run, and why
        self._report = self._reporter()
        assert worker.gate is not None
        self._gate = worker.gate.of_rank(int(os.environ["LOCAL_RANK"]))
        self._evaluation: DistributedRank | None = None

    def train(self) -> None:
        """Train until the end, or a halt that the run ends at."""
        is_complete = train_segments(self._job, self._gate, self)
        gate = self._worker.gate
        assert gate is not None
        if is_complete or gate.completes:
            self._saves.save_weights(self._gate.begun)
        self._worker.pulse.enter(Phase.WRITING)
        self._saves.finish()

    def run(self, last: int, first: int) -> None:
        """See Trainer."""
        with self._memory.of_training(self._trained):
            self._trained.run(last, self._report, first, self._may_begin)
        step = self._gate.begun
        check_numbers(self._job, self._trained, step, self._problems, self._saves.finish)

    def _may_begin(self, steps: int) -> bool:
        device = self._trained.device
        if device.type == "cuda":
            self._worker.pulse.note_device(torch.cuda.memory_reserved(device))
        self._saves.look()
        return self._gate.may_begin(steps)

    def save(self, step: int) -> None:
        """See Trainer."""
        self._saves.save_checkpoint(step)

    def compare(self, step: int) -> None:
        """See Trainer."""
        compare_replicas(self._trained, step)

    def evaluate(self, step: int) -> None:
        """See Trainer."""
        if self._worker.compiled.evaluation is None:
            return
        self._worker.pulse.enter(Phase.PREPARING)
        self._evaluation = self._evaluation or self._make_evaluation(
            self._worker.compiled.evaluation.plan
        )
        results = self._evaluation.run(self._job.eval_steps)
        if self._evaluation.reports:
            self._events.send(Evaluated(step - 1, self._job.validation(results)))

    def _make_evaluation(self, plan: Plan) -> DistributedRank:
        """This rank of the evaluation plan; it reads the variables that training writes."""
        trained = self._trained
        with with_peers(trained.rank, "while the ranks meet for evaluation"):
            trained.links.join(plan)
        return DistributedRank(
            plan,
            trained.rank,
            self._held_out,
            self._job.materials.initial,
            trained.device,
            trained.links,
            lent=trained.body.lend_variables(plan, self._job.evaluated),
            pulse=self._worker.pulse,
        )

    def _reporter(self) -> OnStep:
        """Return what is called after each step; every rank takes the snapshots that are wanted."""
        job, worker, trained, events = self._job, self._worker, self._trained, self._events
        snapshots = worker.snapshots and SnapshotWriter(
            trained.body, trained.reports, worker.snapshots, job.start
        )
        judge, problems = StepJudge.of(job), self._problems
        pulses = worker.pulses.ranks if worker.pulses else ()
        gauges = RankGauges(pulses, on_cpu=job.device_type == "cpu")

        def report(step: int, results: Results, seconds: float) -> None:
            worker.pulse.report()
            events.send(StepDone(step, results, seconds, gauges.read()))
            if (problem := judge.problem(results)) and not problems:
                problems.append((step, problem))
                if not self._halt():
                    raise explain(job, step, problem, (), find_broken(trained.body))
            if snapshots and not problems:  # a restart does a step again that went wrong
                snapshots.report(step + 1)

        return report if trained.reports else _forget

    def _halt(self) -> bool:
        """Let all ranks come to rest and end there, those of other hosts by their launchers; False
        if a rank was killed as it passed the gate.
        """
        gate = self._worker.gate
        assert gate is not None
        if self._job.recipe.launch.num_hosts > 1:
            self._events.send(NumbersSeen())
            return True
        if not gate.freeze():
            return False
        gate.open(gate.begun, ends=True)
        return True


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
