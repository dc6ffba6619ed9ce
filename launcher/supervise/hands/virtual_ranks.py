"""launch=virtual: all ranks of the plan in this process."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from flowrun.engine.compile import Rehearsed
from flowrun.engine.errors import RunError
from flowrun.engine.runtime.drivers import logical_checkpoint
from flowrun.engine.runtime.drivers.recorder import RecordedCluster
from flowrun.engine.runtime.drivers.virtual import VirtualCluster
from flowrun.engine.runtime.kernels.kernels import Kernels
from flowrun.engine.runtime.kernels.nonfinite import Origin, OriginSearch
from flowrun.engine.runtime.rank.rank import Results
from flowrun.engine.runtime.rank.replicas import digests_of
from flowrun.engine.runtime.rank.shards import Shard, choose_shards, make_whole_shard
from flowrun.launcher.job.compiling import Compiled
from flowrun.launcher.job.job import Job
from flowrun.launcher.ranks.failure import describe
from flowrun.launcher.ranks.finite import (
    NotFinite,
    StepJudge,
    check_replicas,
    check_weights,
    explain,
    find_broken,
)
from flowrun.launcher.ranks.rank_events import (
    BadStep,
    Evaluated,
    FileWritten,
    RankEnded,
    RankFailed,
    Reason,
    StepDone,
)
from flowrun.launcher.ranks.rank_figures import acts_by_name, max_stashed
from flowrun.launcher.ranks.step_gate import StepGate
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.store import checkpoint as checkpoints
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.tensor_file import write_whole
from flowrun.launcher.supervise.hands.desk import Interrupted
from flowrun.launcher.supervise.hands.local_ranks import Wires
from flowrun.launcher.supervise.hands.newest_state import place_of
from flowrun.launcher.supervise.hosts.endpoint import MeetingPlace
from flowrun.launcher.supervise.life.events import Frozen, RanksForked, RanksGone

_CLEAR_S = 0.002  # from one look at the gate to the next


class VirtualRanks:
    """All ranks of the plan in this process: the main thread runs them.

    exception: what a user's code raised, which the run ends with.
    """

    snapshots = None

    def __init__(self, compiled: Compiled, wires: Wires) -> None:
        self.compiled, self._wires = compiled, wires
        self.exception: Exception | None = None
        self._gate: StepGate | None = None
        self._stops = False

    def fork(self, place: MeetingPlace) -> None:
        """Let the main thread train; RanksForked is posted, at the end RanksGone."""
        job = self.compiled.job
        self._stops = False
        self._gate = StepGate.of_threads(
            self.compiled.training.plan.num_ranks, job.start.step if job.start else 0
        )
        self._wires.post(RanksForked(place_of(job.start)))
        self._wires.desk.begin("training", self._run, yields_to=2)

    def kill(self) -> None:
        """Let the main thread stop at the next step; a second signal interrupts it."""
        self._stops = True

    async def freeze(self) -> None:
        """Freeze the gate; Frozen is posted."""
        gate = self._gate
        while gate and not self._stops and self._wires.desk.is_away:
            if gate.is_clear and gate.freeze(0):
                self._wires.post(Frozen(gate.begun))
                return
            await asyncio.sleep(_CLEAR_S)

    def open(self, halt: int | None, ends: int) -> None:
        """Open the gate.  halt, ends: see StepGate."""
        if self._gate:
            self._gate.open(halt, ends)

    def _run(self) -> None:
        post = self._wires.post
        try:
            self._train()
        except NotFinite as error:
            post(BadStep(error.steps))
            self._post_failure(error)
        except RunError as error:
            self._post_failure(error)
        except (_Stopped, Interrupted):
            pass
        except Exception as error:
            self.exception = error
            post(RankFailed(Reason("the virtual cluster", repr(error)), lost_peer=False))
        finally:
            post(RanksGone())

    def _post_failure(self, error: RunError) -> None:
        where, problem, _ = describe(error)
        self._wires.post(RankFailed(Reason(where, problem), lost_peer=False))

    def _train(self) -> None:
        compiled, gate = self.compiled, self._gate
        assert gate is not None
        job, training = compiled.job, compiled.training
        torch.set_num_threads(job.recipe.launch.threads)
        cluster = _make_cluster(job, training, compiled.kernels)
        _train(compiled, cluster, self._wires.record.run_folder, self._send, gate)
        halted = gate.begun < job.recipe.train.steps
        if job.recipe.train.save and (not halted or gate.of_rank(0).completes):
            about = job.about(gate.begun)
            files = weights.plan_files(self._wires.record.run_folder, job.saved, about)
            shards = (s for rank in cluster.ranks for s in _shards(job, cluster, rank))
            write_whole(files, shards)
        sent, notes = _sum_sent(cluster), _read_notes(cluster)
        for rank, body in cluster.ranks.items():
            measured: dict[str, object] = {
                "acts": acts_by_name(training, body.acts),
                "stashed": max_stashed(training, body.most_live),
                "notes": notes.get(rank, []),
            }
            if rank in sent:
                measured["sent"] = sent[rank]
            self._send(RankEnded(rank, measured))

    def _send(self, event: Notice) -> None:
        """Post an event, and wait where too many do."""
        self._wires.post(event)
        while self._wires.waits() and not self._stops:
            time.sleep(_CLEAR_S)
        if self._stops:
            raise _Stopped


class _Stopped(Exception):
    """The main thread is to train no further."""


def _train(
    compiled: Compiled,
    cluster: VirtualCluster,
    folder: Path,
    send: Callable[[Notice], None],
    gate: StepGate,
) -> None:
    """Train segment by segment, until the end or a halt that the run ends at.

    folder: of the run.  send: takes events.
    """
    job, training, evaluation = compiled.job, compiled.training, compiled.evaluation
    evaluator = evaluation and _evaluator(job, evaluation, cluster)
    gates = {rank: gate.of_rank(k) for k, rank in enumerate(cluster.ranks)}
    saved = gate.begun  # steps of the newest checkpoint
    before, judge = 0.0, StepJudge.of(job)

    def on_step(step: int, results: Results) -> None:
        nonlocal before
        now = time.perf_counter()
        send(StepDone(step, results, now - before, {}))
        before = now
        if problem := judge.problem(results):
            origins = _repeat(job, training, cluster, step)
            broken = [each for body in cluster.ranks.values() for each in find_broken(body)]
            raise explain(job, step, problem, origins, broken)

    for segment in job.segments:
        while gate.begun < segment.last:
            before = time.perf_counter()
            cluster.run(
                segment.last, on_step, gate.begun, lambda rank, steps: gates[rank].may_begin(steps)
            )
            for body in cluster.ranks.values():
                check_weights(job, gate.begun, body)
            if gate.begun == segment.last:
                break
            if gate.begun > saved:  # all ranks rest here, at a halt
                saved = gate.begun
                _checkpoint(job, cluster, folder, send, saved)
            if not all([each.go_on() for each in gates.values()]):
                return
        if segment.verify:
            _verify(cluster, segment.last)
        if segment.evaluate and evaluator:
            results = evaluator.run(job.eval_steps)
            send(Evaluated(segment.last - 1, job.validation(results)))
        if segment.save:
            saved = segment.last
            _checkpoint(job, cluster, folder, send, saved)


def _make_cluster(job: Job, training: Rehearsed, kernels: Kernels) -> VirtualCluster:
    """Make the ranks of a plan, with the values that the job begins with or goes on from."""
    seed = job.recipe.launch.message_order_seed
    arguments = (training.plan, job.materials.sampler, job.initial, seed, False, kernels)
    traced = job.recipe.engine.traced_steps
    cluster = RecordedCluster(*arguments, trace=traced) if traced else VirtualCluster(*arguments)
    if job.start and job.start.folder:
        for rank, body in cluster.ranks.items():
            logical_checkpoint.restore(job.start.folder, training.plan, rank, body.variables)
    return cluster


def _verify(cluster: VirtualCluster, step: int) -> None:
    bodies = cluster.ranks.items()
    digests = {rank: digests_of(cluster.plan, body.variables) for rank, body in bodies}
    check_replicas(cluster.plan, step, digests)


def _repeat(job: Job, training: Rehearsed, cluster: VirtualCluster, step: int) -> Sequence[Origin]:
    """Compute a step again, with the weights that the ranks hold, and find where numbers arise that
    are not finite.
    """
    search, plan = OriginSearch(), training.plan
    lent = {rank: body.lend_variables(plan, {}) for rank, body in cluster.ranks.items()}
    again = VirtualCluster(plan, job.materials.sampler, None, kernels=search.kernels, lent=lent)
    again.run(step + 1, first=step)
    return search.origins


def _read_notes(cluster: VirtualCluster) -> dict[int, list[object]]:
    """Return what each rank did in its last steps, as a worker sends it."""
    if not isinstance(cluster, RecordedCluster):
        return {}
    return {
        rank: [(e.what, e.actor, e.act, e.begin, e.end) for e in events]
        for rank, events in cluster.read_notes().items()
    }


def _sum_sent(cluster: VirtualCluster) -> dict[int, int]:
    """Sum the bytes that the ranks of each stage sent, by the first of these ranks."""
    sent: Counter[int] = Counter()
    for actor, count in cluster.sent_bytes.items():
        sent[cluster.plan.placements[cluster.plan.actors[actor].stage].ranks[0]] += count
    return dict(sent)


def _evaluator(job: Job, evaluation: Rehearsed, trained: VirtualCluster) -> VirtualCluster:
    """The cluster of the evaluation plan; it reads the variables that training writes."""
    there = {
        rank: body.lend_variables(evaluation.plan, job.evaluated)
        for rank, body in trained.ranks.items()
    }
    return VirtualCluster(
        evaluation.plan, job.materials.evaluation_sampler, job.materials.initial, lent=there
    )


def _shards(job: Job, cluster: VirtualCluster, rank: int) -> Iterator[Shard]:
    """Yield what a rank writes; the first rank also what forward does not read."""
    yield from choose_shards(cluster.plan, rank, cluster.ranks[rank].variables)
    for name in job.unused if rank == min(cluster.ranks) else ():
        yield make_whole_shard(name, job.materials.initial[name])


def _checkpoint(
    job: Job, cluster: VirtualCluster, run: Path, send: Callable[[Notice], None], step: int
) -> None:
    """Write what every rank has to; run: its folder."""
    folder = checkpoints.partial_folder(run, step)
    for each in (folder.parent, folder):  # and not the run's folder, if it was removed
        each.mkdir(exist_ok=True)
    for rank in cluster.ranks:
        size, checksum = logical_checkpoint.write(folder, rank, list(_shards(job, cluster, rank)))
        name = logical_checkpoint.file_of(folder, rank).name
        send(FileWritten(str(folder), step, name, (size, checksum)))
