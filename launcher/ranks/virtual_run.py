"""launch=virtual: what worker.py does, for all ranks at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from flowrun.engine.runtime.drivers import logical_checkpoint
from flowrun.engine.runtime.drivers.recorder import RecordedCluster
from flowrun.engine.runtime.drivers.virtual import VirtualCluster
from flowrun.engine.runtime.kernels.nonfinite import Origin, OriginSearch
from flowrun.engine.runtime.rank.rank import Results
from flowrun.engine.runtime.rank.replicas import digests_of
from flowrun.engine.runtime.rank.shards import Shard
from flowrun.launcher.job.compiling import Compiled
from flowrun.launcher.ranks import finite
from flowrun.launcher.ranks.rank_events import Evaluated, FileWritten, RankEnded, StepDone
from flowrun.launcher.ranks.rank_saves import list_shards
from flowrun.launcher.ranks.run_updates import follow_plateau, run_updates
from flowrun.launcher.ranks.segment_loop import train_segments
from flowrun.launcher.ranks.step_gate import StepGate
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.store import checkpoint as checkpoints
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.tensor_file import write_whole


def train(compiled: Compiled, folder: Path, send: Callable[[Notice], None], gate: StepGate) -> None:
    """Train until the end, or a halt that the run ends at.  folder: of the run."""
    job = compiled.job
    torch.set_num_threads(job.recipe.launch.threads)
    run = _VirtualRun(compiled, folder, send, gate)
    is_complete = train_segments(job, gate, run)
    if job.recipe.train.save and (is_complete or gate.completes):
        files = weights.plan_files(folder, job.saved, job.about(gate.begun))
        write_whole(files, (shard for rank in run.cluster.ranks for shard in run.list_shards(rank)))
    for rank, measured in run.measure().items():
        send(RankEnded(rank, measured))


class _VirtualRun:
    """All ranks of a plan; a Trainer."""

    def __init__(
        self, compiled: Compiled, folder: Path, send: Callable[[Notice], None], gate: StepGate
    ) -> None:
        self._compiled, self._folder, self._send, self._gate = compiled, folder, send, gate
        self._job, self.cluster = compiled.job, _make_cluster(compiled)
        self._gates = {rank: gate.of_rank(k) for k, rank in enumerate(self.cluster.ranks)}
        self._judge, self._before = finite.StepJudge.of(self._job), 0.0
        self._other_clusters = self._make_others()
        self._evaluator = self._make_evaluator()

    def run_segment(self, last: int, first: int) -> None:
        self._before = time.perf_counter()
        if self._other_clusters:
            report = self._report

            def on_step(step: int, results: Results, seconds: float) -> None:
                report(step, results)

            steps, all_plans = range(first, last), (self.cluster, *self._other_clusters)
            run_updates(steps, all_plans, self._job, self._gate, self._may_begin, on_step)
        else:
            self.cluster.run(last, self._report, first, self._may_begin)
        for body in self.cluster.ranks.values():
            finite.check_weights(self._job, self._gate.begun, body)

    def _may_begin(self, rank: int, steps: int) -> bool:
        return self._gates[rank].may_begin(steps)

    def _make_others(self) -> list[VirtualCluster]:
        """The clusters of the other updates; they write the variables that the first one holds."""
        made = []
        for other in self._compiled.others:
            plan, bodies = other.training.plan, self.cluster.ranks.items()
            lent = {rank: body.lend_variables(plan, {}) for rank, body in bodies}
            batches = other.job.materials.sampler
            made.append(VirtualCluster(plan, batches, None, kernels=other.kernels, lent=lent))
            follow_plateau(other.job, made[-1].ranks.values())
        return made

    def _report(self, step: int, results: Results) -> None:
        now = time.perf_counter()
        self._send(StepDone(step, results, now - self._before, {}))
        self._before = now
        if problem := self._judge.problem(results):
            broken = [
                each for body in self.cluster.ranks.values() for each in finite.find_broken(body)
            ]
            raise finite.explain(self._job, step, problem, self._repeat(step), broken)

    def _repeat(self, step: int) -> list[Origin]:
        """Compute a step again, with the weights that the ranks hold, and find where numbers arise
        that are not finite.
        """
        search, plan = OriginSearch(), self.cluster.plan
        lent = {rank: body.lend_variables(plan, {}) for rank, body in self.cluster.ranks.items()}
        sampler = self._job.materials.sampler
        again = VirtualCluster(plan, sampler, None, kernels=search.kernels, lent=lent)
        again.run(step + 1, first=step)
        return search.origins

    def compare(self, step: int) -> None:
        bodies = self.cluster.ranks.items()
        digests = {rank: digests_of(self.cluster.plan, body.variables) for rank, body in bodies}
        finite.check_replicas(self.cluster.plan, step, digests)

    def evaluate(self, step: int) -> None:
        if self._evaluator:
            results = self._evaluator.run(self._job.eval_steps)
            found = self._job.validation(results)
            self._job.take_evaluation(step, found)
            self._send(Evaluated(step - 1, found))

    def _make_evaluator(self) -> VirtualCluster | None:
        """The cluster of the evaluation plan; it reads the variables that training writes."""
        if (evaluation := self._compiled.evaluation) is None:
            return None
        there = {
            rank: body.lend_variables(evaluation.plan, self._job.evaluated)
            for rank, body in self.cluster.ranks.items()
        }
        materials = self._job.materials
        return VirtualCluster(
            evaluation.plan, materials.evaluation_sampler, materials.initial, lent=there
        )

    def save(self, step: int) -> None:
        folder = checkpoints.partial_folder(self._folder, step)
        for each in (folder.parent, folder):  # and not the run's folder, if it was removed
            each.mkdir(exist_ok=True)
        for rank in self.cluster.ranks:
            written = logical_checkpoint.write(folder, rank, self.list_shards(rank))
            name = logical_checkpoint.file_of(folder, rank).name
            self._send(FileWritten(step, name, written))

    def list_shards(self, rank: int) -> list[Shard]:
        """Return what a rank saves."""
        variables = self.cluster.ranks[rank].variables
        return list_shards(self._job, self.cluster.plan, rank, variables)

    def measure(self) -> dict[int, dict[str, object]]:
        """Return what each rank has measured, as a worker sends it.  The bytes that the ranks of a
        stage have sent are those of the first of them.
        """
        plan, sent = self.cluster.plan, Counter[int]()
        for cluster in (self.cluster, *self._other_clusters):
            for actor, count in cluster.sent_bytes.items():
                sent[plan.placements[cluster.plan.actors[actor].stage].ranks[0]] += count
        recorded = self.cluster.read_notes() if isinstance(self.cluster, RecordedCluster) else {}
        return {
            rank: {
                "notes": [(e.what, e.actor, e.act, e.begin, e.end) for e in recorded.get(rank, ())],
                **({"sent": sent[rank]} if rank in sent else {}),
            }
            for rank in self.cluster.ranks
        }


def _make_cluster(compiled: Compiled) -> VirtualCluster:
    """Make the ranks of a plan, with the values that the job begins with or continues from."""
    job, plan = compiled.job, compiled.training.plan
    seed = job.recipe.launch.message_order_seed
    arguments = (plan, job.materials.sampler, job.initial, seed, False, compiled.kernels)
    traced = job.recipe.engine.traced_steps
    cluster = RecordedCluster(*arguments, trace=traced) if traced else VirtualCluster(*arguments)
    if job.start and job.start.folder:
        for rank, body in cluster.ranks.items():
            logical_checkpoint.restore(job.start.folder, plan, rank, body.variables)
    follow_plateau(job, cluster.ranks.values())
    return cluster
