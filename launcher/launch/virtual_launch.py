"""launch=virtual: all ranks of the plan in this process."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

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
from flowrun.launcher.job.job import Job
from flowrun.launcher.launch.failure import describe
from flowrun.launcher.launch.finite import (
    NotFinite,
    StepJudge,
    check_replicas,
    check_weights,
    explain,
    find_broken,
)
from flowrun.launcher.launch.hosts.alone import Alone
from flowrun.launcher.launch.preemption import Preemption, Requests
from flowrun.launcher.launch.restart.rollback import Rollbacks, roll_back
from flowrun.launcher.launch.step_gate import StepGate
from flowrun.launcher.report.record import Record
from flowrun.launcher.report.report import Log
from flowrun.launcher.store import checkpoint as checkpoints
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.tensor_file import write_whole

_NEVER_S = 1e6


def execute_virtual(
    job: Job,
    training: Rehearsed,
    evaluation: Rehearsed | None,
    record: Record,
    kernels: Kernels,
    requests: Requests,
) -> Log:
    """Train on the virtual cluster, with evaluations and checkpoints where they are due.

    job: what to train.  training, evaluation: its plans.  record: takes what happens.  kernels: of
    training's regions.  requests: what is asked of this process.
    """
    torch.set_num_threads(job.recipe.launch.threads)
    rollbacks = Rollbacks()
    while True:
        cluster = _make_cluster(job, training, kernels)
        preemption = _preemption(job, cluster, record, requests)
        try:
            with preemption.serving():
                _train(job, (training, evaluation), cluster, record, preemption.gate)
            break
        except NotFinite as error:
            ends = preemption.ending is not None
            again = None if ends else roll_back(record, rollbacks, error.steps, error)
            if again is None:
                raise _close_with(error, record) from error
            rollbacks = again
        except RunError as error:
            raise _close_with(error, record) from error
        except BaseException as error:
            record.close()
            early = preemption.early if isinstance(error, KeyboardInterrupt) else None
            raise early or error from None
    if asked := preemption.end_after(None):
        record.close()
        raise asked
    if job.recipe.train.save:
        files = weights.plan_files(record.folder, job.saved, job.about(record.reached))
        write_whole(files, (s for rank in cluster.ranks for s in _shards(job, cluster, rank)))
    return _make_log(cluster, training, record)


def _close_with(error: RunError, record: Record) -> RunError:
    """Close the record and return the error as a person reads it."""
    record.close()
    where, problem, _ = describe(error)
    return RunError(where, problem)


def _preemption(
    job: Job, cluster: VirtualCluster, record: Record, requests: Requests
) -> Preemption:
    """Return what halts the ranks; they are not interrupted but by a signal that comes again."""

    def stop() -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    start = job.start.step if job.start else 0
    return Preemption(
        gate=StepGate.of_threads(len(cluster.ranks), start),
        requests=requests,
        saved=start,
        steps=job.recipe.train.steps,
        grace_s=_NEVER_S,
        say=record.note,
        stop=stop,
        hosts=Alone(),
    )


def _train(
    job: Job,
    plans: tuple[Rehearsed, Rehearsed | None],
    cluster: VirtualCluster,
    record: Record,
    gate: StepGate,
) -> None:
    """Train segment by segment, until the end or a halt that the run ends at."""
    training, evaluation = plans
    evaluator = evaluation and _evaluator(job, evaluation, cluster)
    gates = {rank: gate.of_rank(k) for k, rank in enumerate(cluster.ranks)}
    saved = gate.begun  # steps of the newest checkpoint
    before, judge = 0.0, StepJudge.of(job)

    def on_step(step: int, results: Results) -> None:
        nonlocal before
        now = time.perf_counter()
        record.step(step, results, now - before)
        before = now
        if problem := judge.problem(results):
            origins = _repeat(job, training, cluster, step)
            broken = [each for body in cluster.ranks.values() for each in find_broken(body)]
            raise explain(job, step, problem, origins, broken)

    for segment in job.segments:
        while gate.begun < segment.last:
            before = time.perf_counter()
            cluster.run(
                segment.last,
                on_step,
                gate.begun,
                lambda rank, steps: gates[rank].may_begin(steps),
            )
            for body in cluster.ranks.values():
                check_weights(job, gate.begun, body)
            if gate.begun == segment.last:
                break
            if gate.begun > saved:  # all ranks rest here, at a halt
                saved = gate.begun
                _checkpoint(job, cluster, record, saved)
            if not all([each.go_on() for each in gates.values()]):
                return
        if segment.verify:
            _verify(cluster, segment.last)
        if segment.evaluate and evaluator:
            results = evaluator.run(job.eval_steps)
            record.write_evaluation(segment.last - 1, job.validation(results))
        if segment.save:
            saved = segment.last
            _checkpoint(job, cluster, record, saved)


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


def _make_log(cluster: VirtualCluster, training: Rehearsed, record: Record) -> Log:
    return Log(
        record.steps,
        record.validation,
        {},
        _sum_sent(cluster),
        {rank: acts_by_name(training, body.acts) for rank, body in cluster.ranks.items()},
        {rank: max_stashed(training, body.most_live) for rank, body in cluster.ranks.items()},
        notes=cluster.read_notes() if isinstance(cluster, RecordedCluster) else {},
    )


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


def _checkpoint(job: Job, cluster: VirtualCluster, record: Record, step: int) -> None:
    """Write what every rank has to."""
    folder, files = checkpoints.partial_folder(record.folder, step), {}
    for each in (folder.parent, folder):  # and not the run's folder, if it was removed
        each.mkdir(exist_ok=True)
    for rank in cluster.ranks:
        written = logical_checkpoint.write(folder, rank, list(_shards(job, cluster, rank)))
        files[logical_checkpoint.file_of(folder, rank).name] = written
    record.complete_checkpoint(folder, step, files)


def acts_by_name(rehearsed: Rehearsed, acts: dict[int, int]) -> dict[str, int]:
    """Actor name -> acts."""
    return {rehearsed.plan.actors[actor].name: count for actor, count in acts.items()}


def max_stashed(rehearsed: Rehearsed, most_live: dict[int, int]) -> int:
    """Return the most versions of any stash register that were live at once."""
    registers = rehearsed.plan.registers
    return max((count for r, count in most_live.items() if registers[r].stash), default=0)
