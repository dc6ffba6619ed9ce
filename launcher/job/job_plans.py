"""JobPlans: the plans of training and evaluation.  The story is engine/compile.py's; here stands
which process makes which part of it, what is kept on disk, and the check of what was captured.
"""

from __future__ import annotations

import tempfile
import time
import timeit
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial

from flowrun.engine.capture.capture import Batch, Traced
from flowrun.engine.capture.check.compare import check_capture
from flowrun.engine.compile import Compilation, Rehearsed, step_results
from flowrun.engine.errors import RecipeError, RunError
from flowrun.engine.hardware.hardware import CPU
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.lowering.lower import add_costs
from flowrun.engine.passes.mirrored_view import rows_of_a_rank
from flowrun.engine.pipeline import PLANNING
from flowrun.engine.plan_updates import add_up, plan_updates
from flowrun.engine.rehearsal.rehearsal import rehearse
from flowrun.engine.runtime.calibration import quick_probe
from flowrun.engine.runtime.calibration.quick_probe import Scales
from flowrun.engine.strategy import Strategy
from flowrun.engine.torch_internals import import_tracer
from flowrun.launcher.data.collate import batch_method, item_of
from flowrun.launcher.job.faults import name_error
from flowrun.launcher.job.forked import may_fork, run_in_fork, start_fork
from flowrun.launcher.job.garbage import pause_collection
from flowrun.launcher.job.materials import Materials
from flowrun.launcher.job.plan_cache import PlanCache, inputs
from flowrun.launcher.job.recipe_strategy import data_workers
from flowrun.launcher.model.adapters import check_read
from flowrun.launcher.model.build import try_metrics
from flowrun.launcher.recipe.device import forks_autograd
from flowrun.launcher.recipe.hardware_keys import load_shipped, may_scale, rank_hardware
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.updates import name_key
from flowrun.launcher.terminal import doing


@dataclass(frozen=True, slots=True)
class Check:
    """The seconds that comparing what was captured with the model took, or why there was none."""

    seconds: float
    why_none: str


Probed = Callable[[], Scales | None]
_BothPlans = tuple[Rehearsed, Rehearsed | None]  # training and evaluation


def kept_probe(recipe: Recipe) -> Scales | None:
    """Return what a run before has found of this machine, where a probe may scale the profile."""
    return quick_probe.read_scales(load_shipped(CPU)) if may_scale(recipe) else None


@contextmanager
def probing(recipe: Recipe) -> Iterator[Probed]:
    """Within, two processes probe this machine if no run before has; give what waits for them."""
    shipped = load_shipped(CPU)
    if quick_probe.read_scales(shipped) or not (may_scale(recipe) and may_fork()):
        yield partial(kept_probe, recipe)
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as forks:
        meeting, ranks = f"{folder}/meeting", range(quick_probe.RANKS)
        measures = [partial(quick_probe.measure, k, meeting, shipped) for k in ranks]
        results = [forks.enter_context(start_fork(each)) for each in measures]
        yield lambda: quick_probe.keep_scales(shipped, results[0]())


@dataclass(eq=False, kw_only=True)
class JobPlans:
    """Makes each plan when it is asked for, once.

    planned: the training plan, where it is known already.  device_type: of ranks.  checks: compare
    the captured step with the model itself; check: how that went.  probed: gives what a probe has
    found of this machine.  asked: see `decided`.  others: of the other updates of a step, with the
    steps from one to the next.
    """

    recipe: Recipe
    materials: Materials
    strategy: Strategy
    planned: Rehearsed | None
    device_type: str
    checks: bool
    probed: Probed
    check: Check | None = None
    scales: Scales | None = None
    asked: frozenset[str] = frozenset()
    others: tuple[tuple[int, JobPlans], ...] = ()

    @cached_property
    def cache(self) -> PlanCache:
        """The plans that are kept on disk."""
        return PlanCache(self.recipe.engine.cache)

    @cached_property
    def story(self) -> Compilation:
        return Compilation(self.materials.task, self.materials.example, self.strategy, self._keep)

    @cached_property
    def training(self) -> Rehearsed:
        """The training plan and its rehearsal: made in this process unless by `compiled`.  The plan
        is the same on every machine; its seconds are of this one, if that is known.
        """
        plans = (self, *(other for _, other in self.others))
        if not self.planned:
            _ = [each.captured for each in plans]
        doing.doing("planning")
        with pause_collection(), doing.show_log(PLANNING):
            planned = (self.planned,) if self.planned else self._plan()
            try:
                self.scales = self.probed()
            except (OSError, RuntimeError, RunError) as error:
                self.cache.notes.append(f"this machine was not probed: {name_error(error)}")
            if self.scales is not None:
                planned = tuple(map(self._scale, planned, plans))
        for other, of_other in zip(plans[1:], planned[1:], strict=True):
            other.training = of_other
        return add_up(planned, (1, *(every for every, _ in self.others)))

    def _plan(self) -> tuple[Rehearsed, ...]:
        """Plan each update of a step."""
        others = tuple(other.story for _, other in self.others)
        return plan_updates((self.story, *others)) if others else (self.story.training,)

    def _scale(self, planned: Rehearsed, of: JobPlans) -> Rehearsed:
        """Give a plan the seconds of this machine, and of an item for which data state none."""
        hardware = rank_hardware(self.recipe, scales=self.scales)
        asked = replace(of.strategy, hardware=hardware)
        if not (asked.sample_s or asked.preparation or batch_method(of.materials.data)):
            asked = replace(asked, sample_s=self._item_s)
        plan = add_costs(planned.plan, asked)
        return Rehearsed(plan, rehearse(plan))

    @cached_property
    def _item_s(self) -> float:
        """Seconds of an item on each data worker; the example batch has read it before."""
        item_s = timeit.timeit(lambda: item_of(self.materials.data, 0), number=1)
        return item_s / max(1, data_workers(self.recipe))

    @cached_property
    def traced(self) -> Traced:
        """Training, as torch captured it."""
        doing.doing("capturing the model")
        with pause_collection(), name_key("task.loss", self.recipe.loss_key):
            return self.story.traced

    @cached_property
    def captured(self) -> LogicalGraph:
        _ = self.traced
        with pause_collection():
            graph = self.story.captured
            read = (v.name for v in graph.variables if graph.consumers.get(v.tensor))
            check_read(self.materials.model, read)
        return graph

    def _keep(
        self,
        kind: str,
        strategy: Strategy,
        graphs: tuple[LogicalGraph, ...],
        make: Callable[[], Rehearsed],
    ) -> Rehearsed:
        return self.cache.get(kind, inputs(strategy, *graphs), make)

    @cached_property
    def compiled(self) -> _BothPlans:
        """The plans of training and of evaluation, None if nothing is held out; where torch is
        built for GPUs, made in another process.  Raises RecipeError if what was captured is not
        what the model computes.
        """
        if not forks_autograd():
            return self._compile()

        others = [other for _, other in self.others]

        def make() -> tuple[_BothPlans, list[Rehearsed], list[str], Scales | None, frozenset[str]]:
            found = self._compile()
            planned = [other.training for other in others]
            return found, planned, self.cache.notes, self.scales, self.asked

        with self._checking():  # no fork of a process that has captured can run autograd
            found = run_in_fork(make)
        (self.training, evaluation), planned, self.cache.notes, self.scales, self.asked = found
        for other, each in zip(others, planned, strict=True):
            other.training = each
        return self.training, evaluation

    @property
    def decided(self) -> frozenset[str]:
        """Return the buffers by whose values Python has decided what a step does."""
        _ = self.compiled
        return self.asked

    def _compile(self) -> _BothPlans:
        """Capture evaluation in another process while this one captures and plans training, which
        saves 0.6 of 6 s to the first step of a GPT of 4 blocks; a third process compares what was
        captured with the model itself.
        """
        with pause_collection():
            import_tracer()
        evaluates, capture = self.materials.sampler.held_out, self._capture_evaluation
        new = evaluates and not self.planned
        with (
            start_fork(capture, here=True) if new else nullcontext(capture) as captured,
            nullcontext() if forks_autograd() else self._checking(),
        ):
            training = self.training
            graphs = [self.captured, *(other.captured for _, other in self.others)]
            graph = captured() if evaluates else None
            self.asked = _find_asked([*graphs, graph] if graph else graphs)
            if graph is None:
                return training, None
            try_metrics(dict(self.materials.task.metrics), graph)
            with pause_collection():
                follows = training if self.others else self.planned
                return training, self.story.evaluation(graph, follows)

    def step_results(self) -> frozenset[str]:
        """Return the results of an evaluation that are those of a whole batch, not means of what
        micro-batches, or ranks of the mirrored view, have.
        """
        strategy = self.strategy
        if strategy.mirrored or strategy.micro_batches == 1 or not strategy.counts_step:
            return frozenset()
        return step_results(self._capture_evaluation(), strategy)

    @contextmanager
    def _checking(self) -> Iterator[None]:
        """Within, another process looks whether the captured step is what the model computes; at
        the end its answer is waited for.
        """
        if not self.checks:
            yield
            return
        plans = (self, *(other for _, other in self.others))
        with ExitStack() as forks:
            checks = []
            for each in plans:
                if not (self.planned or forks_autograd()):
                    _ = each.traced  # the other process has it, too
                checks.append(forks.enter_context(start_fork(each.compare)))
            yield
            self.check, *_ = [check() for check in checks]

    def compare(self) -> Check:
        start = time.perf_counter()
        made = self.materials
        both = (made.example, self._second_example())
        batches = [rows_of_a_rank(batch, self.strategy) for batch in both]
        on_cpu = self.device_type == "cpu"
        why = check_capture(made.task, batches, self.traced, made.initial, on_cpu=on_cpu)
        return Check(time.perf_counter() - start, why)

    def _second_example(self) -> Batch:
        """Make the second micro-batch, or the first again if a sample of it cannot be read: the
        rank that reads it will report that.
        """
        rows = slice(0, self.recipe.micro_batch_size)
        step, micro_batch = (0, 1) if self.recipe.train.micro_batches > 1 else (1, 0)
        try:
            return self.materials.sampler(step, micro_batch, rows)
        except Exception:  # whatever a data set may raise
            return self.materials.example

    def _capture_evaluation(self) -> LogicalGraph:
        with pause_collection():
            return self.story.capture_evaluation()


def _find_asked(graphs: Iterable[LogicalGraph]) -> frozenset[str]:
    """Return the buffers whose values Python has asked for in a graph of a step or of evaluation.

    Raises RecipeError if another of them writes into one: a capture looks at its own alone.
    """
    variables = [v for graph in graphs for v in graph.variables]
    asked = frozenset(v.name for v in variables if v.decides)
    for name in sorted(asked & {v.name for v in variables if v.new}):
        raise RecipeError(
            "model",
            f"in evaluation, or in another update, Python asks for the value of the buffer {name}, "
            "into which training writes.",
            "Choose with torch.where; or leave evaluation out (eval.batches=0).",
        )
    return asked
