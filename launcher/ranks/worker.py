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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NoReturn

import torch

from flowrun.engine.actors.plan import Plan
from flowrun.engine.compile import Rehearsed
from flowrun.engine.runtime.drivers import logical_checkpoint
from flowrun.engine.runtime.drivers.distributed import DistributedRank, LostPeer
from flowrun.engine.runtime.drivers.pulse import Activity, Pulses
from flowrun.engine.runtime.drivers.recorder import RecordedRank
from flowrun.engine.runtime.process import heap
from flowrun.engine.runtime.process.core import pin_near, pin_to_core
from flowrun.engine.runtime.process.environment import unset_variables
from flowrun.engine.runtime.process.lifetime import end_with
from flowrun.engine.runtime.process.outputs import ProcessOutputs
from flowrun.engine.runtime.process.stacks import Stacks
from flowrun.engine.runtime.rank.rank import Results
from flowrun.engine.runtime.rank.readers import BatchSource, item_rows
from flowrun.engine.runtime.transport.links import Links
from flowrun.launcher.data.data_workers import DataWorkers
from flowrun.launcher.data.open_files import reopen_files
from flowrun.launcher.job.compiling import Compiled
from flowrun.launcher.job.segments import RankRows, ReadingOrder
from flowrun.launcher.ranks import finite, rank_events, rank_memory
from flowrun.launcher.ranks.failure import describe, with_peers
from flowrun.launcher.ranks.rank_saves import RankSaves
from flowrun.launcher.ranks.run_updates import follow_plateau, run_updates
from flowrun.launcher.ranks.segment_loop import train_segments
from flowrun.launcher.ranks.snapshot_memory import MemorySnapshot, SnapshotMemory
from flowrun.launcher.ranks.snapshots import SnapshotWriter
from flowrun.launcher.ranks.step_gate import StepGate
from flowrun.launcher.ranks.wire import EventSender

OnStep = Callable[[int, Results, float], None]

_LINGER_S = 2.0  # the launcher sees first who died by itself
_BORN_S = 300  # until all ranks of a host are forked; then the wait fails


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Each forked process inherits this.

    compiled: what ranks do.  gate: says which steps the local ranks may begin.  pipes: to the
    launcher, one for each local rank.  born: a barrier for all local ranks, before any of them
    talks to the launcher's store.  pulses, stacks: what the launcher's watch looks at (watch.py);
    limit_s, silence_s: see find_limit and find_silence there.  outputs: what it prints goes there.
    interface: of the network between the hosts.
    """

    compiled: Compiled
    folder: Path
    launcher: int
    limit_s: float
    silence_s: float
    gate: StepGate
    snapshots: SnapshotMemory | None
    pipes: tuple[int, ...]
    born: Barrier
    pulses: Pulses
    stacks: Stacks
    outputs: ProcessOutputs
    interface: str

    def live(self, variables: Mapping[str, str]) -> None:
        """Be a rank from the fork to the exit.  variables: of its environment."""
        os.environ |= variables
        end_with(self.launcher)
        reopen_files()
        heap.keep_pages()
        rank = RankProcess(self)
        try:
            # The store's thread looks up the name of a process that connects, under a lock of the C
            # library. A rank that is forked at that moment would find it locked for ever.
            self.born.wait(_BORN_S)
            self.outputs.enter(rank.local)
            rank.run()
        except BaseException as error:
            rank.fail(error)


class RankProcess:
    """One rank, in its process; a Trainer."""

    def __init__(self, worker: Worker) -> None:
        self.rank, self.local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        self._worker, self._job, self._plan = worker, worker.compiled.job, worker.compiled.training
        for k, pipe in enumerate(worker.pipes):
            if k != self.local:
                os.close(pipe)
        worker.stacks.register(self.local)
        self._pulse, self._gate = worker.pulses.ranks[self.local], worker.gate.of_rank(self.local)
        self._pulse.start(self.rank)
        self._events = EventSender(worker.pipes[self.local])
        self._problems: list[tuple[int, str]] = []  # the first step that must end the run, and why
        self._evaluation: DistributedRank | None = None

    def fail(self, error: BaseException) -> NoReturn:
        """Leave at once, from any thread, with an error."""
        fault = describe(error, self.rank)
        log = self._worker.outputs.write_log
        log(f"\n{_read_clock()} rank {self.rank} ends with an error\n{fault.story}\n")
        is_lost = isinstance(error, LostPeer)
        bad = error.steps if isinstance(error, finite.NotFinite) else 0
        self._events.send(rank_events.Failure(fault, lost_peer=is_lost, bad=bad))
        if is_lost:
            time.sleep(_LINGER_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def run(self) -> None:
        """Meet the other ranks, train, and part from them."""
        import torch.distributed as dist

        job, launch, plan = self._job, self._job.recipe.launch, self._plan.plan
        process = f"process {os.getpid()} on {socket.gethostname()}"
        start = job.start.step if job.start else 0
        about = f"rank {self.rank} of {plan.num_ranks}, {process}, from step {start}"
        self._worker.outputs.write_log(f"{_read_clock()} {about}\n")
        several = job.device_type == "cuda" and plan.num_ranks > 1
        os.environ |= unset_variables(os.environ, several, self._worker.interface)
        torch.set_num_threads(launch.threads)
        sources = self._sources()
        if job.device_type == "cpu":
            pin_to_core(self.local, int(os.environ["LOCAL_WORLD_SIZE"]), launch.threads)
        device = device_of_rank(job.device_type)
        with with_peers(self.rank, "while the ranks meet"):
            join_process_group(device, self._worker.silence_s)
            self._memory = rank_memory.RankMemory(device)
            links = Links(self.rank, device, os.environ["GROUP_RANK"], launch.transport != "gloo")
            links.join(plan)
            zero_ns = _same_time() if launch.num_hosts > 1 else 0
        self._pulse.enter(Activity.MAKING_WEIGHTS)
        self._trained = self._body(device, links, sources.training)
        follow_plateau(job, [self._trained.body])
        self._train(sources.evaluation)
        sources.close()
        self._events.send(
            rank_events.RankEnded(self.rank, self._measure(links.message_bytes, zero_ns))
        )
        self._pulse.enter(Activity.LEAVING)
        with with_peers(self.rank, "at the end"):
            dist.barrier()  # gloo aborts at random if a peer has gone when groups are destroyed
            links.close()
            dist.destroy_process_group()
        self._pulse.enter(Activity.ENDED)

    def _sources(self) -> BatchSources:
        """Return what gives the batches of this rank; data workers are forked here, before the rank
        has threads, sockets, a device, or a core of its own.
        """
        materials, number = self._job.materials, self._job.recipe.launch.data_workers
        samplers = (materials.sampler, materials.evaluation_sampler)
        order = ReadingOrder(
            segments=self._job.segments,
            training=_rows_of(self._plan, self.rank),
            evaluation=_rows_of(self._worker.compiled.evaluation, self.rank),
            eval_steps=self._job.eval_steps,
        )
        if not number or next(iter(order), None) is None:
            return BatchSources(*samplers)
        workers = DataWorkers(samplers, order, number, self.rank, self.fail)
        return BatchSources(workers.training, workers.evaluation, workers.close)

    def _body(self, device: torch.device, links: Links, batches: BatchSource) -> DistributedRank:
        job, steps = self._job, self._job.recipe.engine.traced_steps
        arguments = (self._plan.plan, self.rank, batches, job.initial, device, links)
        options: dict[str, Any] = {
            "metered": device.type == "cpu",  # on CUDA torch counts by itself
            "kernels": self._worker.compiled.kernels,
            "pulse": self._pulse,
        }
        if steps:
            return RecordedRank(*arguments, **options, trace=steps)
        return DistributedRank(*arguments, **options)

    def _measure(self, message_bytes: int, zero_ns: int) -> dict[str, object]:
        """Return what the rank measured, for the launcher's report.

        zero_ns: moment that all hosts call zero, on this host's clock.
        """
        trained, memory, pulse = self._trained, self._memory, self._pulse
        ranks = (trained, *self._other_ranks)
        first = self._job.start.step if self._job.start else 0
        steps = max(1.0, pulse.trained_steps - first)
        recorded = trained.read_notes() if isinstance(trained, RecordedRank) else ()
        return {
            "peak": memory.peak + message_bytes,
            "process_peak": memory.process_peak + message_bytes + trained.shared_bytes,
            "sent": sum(sum(rank.sent_bytes.values()) for rank in ranks),
            "waited_s": pulse.waited_s / steps,
            "read_s": pulse.read_s / steps,
            "notes": [
                (event.what, event.actor, event.act, event.begin - zero_ns, event.end - zero_ns)
                for event in recorded
            ],
        }

    # ---- the training ----------------------------------------------------------------------------

    def _train(self, held_out: BatchSource) -> None:
        """Train until the end, or a halt that the run ends at."""
        self._restore()
        worker, self._held_out = self._worker, held_out
        self._saves = RankSaves(
            self._job,
            self._trained,
            worker.folder,
            self._pulse,
            self._events.send,
            self.fail,
            worker.limit_s,
        )
        self._report = self._reporter()
        if train_segments(self._job, self._gate, self) or worker.gate.completes:
            self._saves.save_weights(self._gate.begun)
        self._pulse.enter(Activity.WRITING)
        self._saves.background.finish()

    def _restore(self) -> None:
        """Fill the variables of this rank with the state that a run continues from, if any."""
        start, variables = self._job.start, self._trained.body.variables
        if start:
            self._pulse.enter(Activity.RESTORING)
        if isinstance(start, MemorySnapshot):
            start.restore(self.rank, variables)
        elif start and start.folder:
            logical_checkpoint.restore(start.folder, self._plan.plan, self.rank, variables)

    def run_segment(self, last: int, first: int) -> None:
        trained, others = self._trained, self._other_ranks
        with self._memory.of_training(trained, *others):
            if others:
                steps, asks = range(first, last), self._may_begin
                run_updates(steps, (trained, *others), self._job, self._gate, asks, self._report)
            else:
                trained.run(last, self._report, first, self._may_begin)
        step = self._gate.begun
        finite.check_numbers(
            self._job, self._trained, step, self._problems, self._saves.background.finish
        )

    @cached_property
    def _other_ranks(self) -> list[DistributedRank]:
        """This rank of the plan of each other update; they write what training's rank holds."""
        trained = self._trained
        made = [
            DistributedRank(
                other.training.plan,
                self.rank,
                other.job.materials.sampler,
                None,
                trained.device,
                trained.links,
                kernels=other.kernels,
                metered=trained.device.type == "cpu",
                lent=trained.body.lend_variables(other.training.plan, {}),
                pulse=self._pulse,
            )
            for other in self._worker.compiled.others
        ]
        for rank, other in zip(made, self._worker.compiled.others, strict=True):
            follow_plateau(other.job, [rank.body])
        return made

    def _may_begin(self, steps: int) -> bool:
        device = self._trained.device
        if device.type == "cuda":
            self._pulse.note_device(torch.cuda.memory_reserved(device))
        self._saves.background.look()
        return self._gate.may_begin(steps)

    def save(self, step: int) -> None:
        self._saves.save_checkpoint(step)

    def compare(self, step: int) -> None:
        finite.compare_replicas(self._trained, step)

    def evaluate(self, step: int) -> None:
        if planned := self._worker.compiled.evaluation:
            self._pulse.enter(Activity.PREPARING)
            self._evaluation = self._evaluation or self._make_evaluation(planned.plan)
            results = self._evaluation.run(self._job.eval_steps)
            found = self._job.validation(results) if self._evaluation.reports else {}
            if found:
                self._events.send(rank_events.Evaluated(step - 1, found))
            if self._job.plateaus:
                import torch.distributed as dist

                box = [found]
                with with_peers(self.rank, "after an evaluation"):
                    dist.broadcast_object_list(box, self._evaluation.reporter)
                self._job.take_evaluation(step, box[0])

    def _make_evaluation(self, plan: Plan) -> DistributedRank:
        """This rank of the evaluation plan; it reads the variables that training writes."""
        trained = self._trained
        with with_peers(self.rank, "while the ranks meet for evaluation"):
            trained.links.join(plan)
        return DistributedRank(
            plan,
            self.rank,
            self._held_out,
            self._job.materials.initial,
            trained.device,
            trained.links,
            lent=trained.body.lend_variables(plan, self._job.evaluated),
            pulse=self._pulse,
        )

    def _reporter(self) -> OnStep:
        """Return what is called after each step; every rank takes the snapshots that are wanted."""
        job, worker, trained, problems = self._job, self._worker, self._trained, self._problems
        snapshots = worker.snapshots and SnapshotWriter(
            trained.body, trained.reports, worker.snapshots, job.start
        )
        judge = finite.StepJudge.of(job)
        gauges = rank_memory.RankGauges(worker.pulses.ranks, on_cpu=job.device_type == "cpu")

        def report(step: int, results: Results, seconds: float) -> None:
            self._pulse.report()
            self._events.send(rank_events.StepDone(step, results, seconds, gauges.read()))
            if (problem := judge.problem(results)) and not problems:
                problems.append((step, problem))
                if not self._halt():
                    broken = finite.find_broken(trained.body)
                    raise finite.explain(job, step, problem, (), broken)
            if snapshots and not problems:  # a restart does a step again that went wrong
                snapshots.report(step + 1)

        return report if trained.reports else lambda *_: None

    def _halt(self) -> bool:
        """Let all ranks come to rest and end there, those of other hosts by their launchers; False
        if a rank was killed as it passed the gate.
        """
        gate = self._worker.gate
        if self._job.recipe.launch.num_hosts > 1:
            self._events.send(rank_events.NumbersSeen())
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


def _read_clock() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _same_time() -> int:
    """The clock of this host, in ns, at a moment that is the same on all (to about 0.1 ms)."""
    import torch.distributed as dist

    dist.barrier()  # the first one connects
    dist.barrier()
    return time.perf_counter_ns()


def join_process_group(device: torch.device, silence_s: float) -> None:
    """Connect to the other ranks, by NCCL on CUDA and by gloo elsewhere.

    silence_s: seconds after which a message has no peer any more.

    With its device NCCL makes each group where we do, in one order on all ranks, and then connects
    its rings and trees there, too; Links does so for messages.
    """
    import torch.distributed as dist

    on_cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        timeout=timedelta(seconds=silence_s),
        device_id=device if on_cuda else None,
    )


def device_of_rank(kind: str) -> torch.device:
    """This rank's device; on CUDA the rank keeps to the cores near it."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    found = torch.cuda.get_device_properties(device)
    at = (found.pci_domain_id, found.pci_bus_id, found.pci_device_id)  # type: ignore[attr-defined]
    pin_near("{:04x}:{:02x}:{:02x}.0".format(*at))
    torch.cuda.set_device(device)
    return device
