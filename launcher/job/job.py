"""A recipe made concrete: the task, the data, the strategy, and the compiled plans.  No process is
started here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from flowrun.engine.capture.capture import Batch, Task, Traced, import_tracer, rewrite_trace
from flowrun.engine.capture.check.compare import check_capture
from flowrun.engine.compile import (
    Rehearsed,
    capture_evaluation_rows,
    plan_evaluation,
    plan_training,
    trace_rows,
)
from flowrun.engine.hardware.hardware import CPU
from flowrun.engine.ir.graph import LogicalGraph, LogicalTensor
from flowrun.engine.ir.placement import Shape
from flowrun.engine.passes.mirrored_view import LIST_SUFFIX, rows_of_a_rank
from flowrun.engine.runtime.rank.rank import Results
from flowrun.launcher.job.forked import fork_concurrently, run_in_fork, start_fork
from flowrun.launcher.job.garbage import pause_collection
from flowrun.launcher.job.plan_cache import PlanCache, inputs
from flowrun.launcher.job.recipe_strategy import AUTOCAST, add_reading, strategy_of
from flowrun.launcher.job.sampler import Sampler, forms_of, length
from flowrun.launcher.job.segments import Segment, segments
from flowrun.launcher.model import build
from flowrun.launcher.model.dataset_checks import data_errors, random_fields
from flowrun.launcher.model.initial import Initial, with_values
from flowrun.launcher.recipe.checks import check_batch
from flowrun.launcher.recipe.device import device_type, gpu_name, has_gpus
from flowrun.launcher.recipe.hardware_keys import better_cpu, is_stand_in
from flowrun.launcher.recipe.schema import Recipe
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import About, Checkpoint
from flowrun.launcher.terminal import doing


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """What speed counts: a unit, tokens or samples, and how many of it a step has."""

    unit: str
    per_step: int

    def speed(self, step_s: float) -> float:
        """Units a second."""
        return self.per_step / step_s if step_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Check:
    """How long the comparison of what was captured with the model took; why there was none."""

    seconds: float
    why_none: str


class Job:
    """What a recipe stands for.  Built once on each host; workers inherit it.

    initial: value of every parameter and buffer, by the model's own names, each made when it is
    asked for.

    start: the checkpoint that it goes on from; None: it begins.
    values: False: for a plan alone: there are no initial values.
    planned: its training plan, where it is known already.
    """

    def __init__(
        self,
        recipe: Recipe,
        start: Checkpoint | None = None,
        *,
        values: bool = True,
        planned: Rehearsed | None = None,
    ) -> None:
        self.recipe = recipe
        self.start = start
        self.planned = planned
        self.device_type = device_type(recipe, here=values)
        doing.doing("making the model and the data")
        torch.set_num_threads(1)  # a pool of threads made here would be dead in forked workers
        torch.manual_seed(recipe.train.seed)
        described = build.describe_model(recipe, draws=values)
        self.model = described.model
        self.initial = described.initial if values else Initial({})
        self._notes = described.notes
        self.data = build.instantiate_data(recipe)
        held_out = int(length(self.data) * recipe.eval.fraction) if recipe.eval.batches else 0
        train = recipe.train
        check_batch(recipe, length(self.data) - held_out)
        self.sampler = Sampler(
            data=self.data,
            seed=train.seed,
            batch_size=train.batch_size,
            micro_batches=train.micro_batches,
            held_out=held_out,
        )
        self.evaluation_sampler = Sampler(
            data=self.data,
            seed=train.seed,
            batch_size=train.batch_size,
            micro_batches=train.micro_batches,
            held_out=held_out,
            evaluation=True,
        )
        self.strategy = add_reading(strategy_of(recipe), self.data)
        with data_errors():
            self.example = self.sampler(0, 0, slice(0, recipe.micro_batch_size))
        forms = forms_of(self.example)
        self.sampler = replace(self.sampler, forms=forms)
        self.evaluation_sampler = replace(self.evaluation_sampler, forms=forms)
        self.task = Task(
            self.model,
            build.task_inputs(recipe, self.model, self.example),
            build.instantiate_loss(recipe),
            build.instantiate_metrics(recipe),
            autocast=AUTOCAST[recipe.precision.dtype],
            low_precision_attention=self.device_type != "cpu",
            seed=train.seed,
            keep_logits=recipe.engine.keeps_logits,
            run_checks=recipe.engine.check,
        )

        if values:
            self.initial = with_values(self.initial, self.task.tensors)
        self.plans = PlanCache(recipe.engine.cache)
        self.checks = values and recipe.engine.check_capture
        self.check: Check | None = None

    @cached_property
    def training(self) -> Rehearsed:
        """The training plan and its rehearsal: made in this process unless by `compiled`."""
        if self.planned:
            return self.planned
        captured = self.captured
        doing.doing("planning")
        with pause_collection():
            made_of = inputs(self.strategy, captured)
            return self.plans.get(
                "training", made_of, lambda: plan_training(captured, self.strategy)
            )

    @cached_property
    def traced(self) -> Traced:
        """Training, as torch captured it."""
        doing.doing("capturing the model")
        with pause_collection():
            return trace_rows(self.task, self.example, self.strategy)

    @cached_property
    def captured(self) -> LogicalGraph:
        """Training, as captured."""
        traced = self.traced
        with pause_collection():
            return rewrite_trace(traced, self.task)

    @property
    def evaluation(self) -> Rehearsed | None:
        """The evaluation plan; None if nothing is held out."""
        return self.compiled[1]

    @cached_property
    def compiled(self) -> tuple[Rehearsed, Rehearsed | None]:
        """The plans of training and evaluation; where ranks may be forked that use CUDA, made in
        another process.  Raises RecipeError if what was captured is not what the model computes.
        """
        if not has_gpus():
            return self._compiled()

        def make() -> tuple[Rehearsed, Rehearsed | None, list[str], Check | None]:
            return *self._compiled(), self.plans.notes, self.check

        with self._checking():  # no fork of a process that has captured can run autograd
            self.training, evaluation, self.plans.notes, self.check = run_in_fork(make)
        return self.training, evaluation

    def _compiled(self) -> tuple[Rehearsed, Rehearsed | None]:
        """Evaluation is captured in another process while this one captures and plans training:
        0.6 of 6 s to the first step of a GPT of 4 blocks.  A third compares what was captured with
        the model itself.
        """
        with pause_collection():
            import_tracer()
        evaluates = bool(self.sampler.held_out)
        new = evaluates and not self.planned
        with (
            fork_concurrently(self._captured_evaluation if new else None) as elsewhere,
            nullcontext() if has_gpus() else self._checking(),
        ):
            training = self.training
            if not evaluates:
                return training, None
            graph = elsewhere() or self._captured_evaluation()
            return training, self._planned_evaluation(graph, training)

    @contextmanager
    def _checking(self) -> Iterator[None]:
        """Within, another process looks whether the captured step is what the model computes; at
        the end its answer is waited for.
        """
        if not self.checks:
            yield
            return
        if not (self.planned or has_gpus()):
            _ = self.traced  # the other process has it, too
        with start_fork(self._checked) as check:
            yield
            self.check = check()

    def _checked(self) -> Check:
        """Compare; raises RecipeError."""
        start = time.perf_counter()
        batches = [self.example, self._second_example()]
        batches = [rows_of_a_rank(batch, self.strategy) for batch in batches]
        here = self.device_type == "cpu"
        why = check_capture(self.task, batches, self.traced, self.initial, on_cpu=here)
        return Check(time.perf_counter() - start, why)

    def _second_example(self) -> Batch:
        """The second micro-batch; the first again, if a sample of it cannot be read: the rank that
        reads it will tell.
        """
        rows, parts = slice(0, self.recipe.micro_batch_size), self.recipe.train.micro_batches
        try:
            return self.sampler(0, 1, rows) if parts > 1 else self.sampler(1, 0, rows)
        except Exception:  # whatever a data set may raise
            return self.example

    def _captured_evaluation(self) -> LogicalGraph:
        with pause_collection():
            return capture_evaluation_rows(self.task, self.example, self.strategy)

    def _planned_evaluation(self, graph: LogicalGraph, training: Rehearsed) -> Rehearsed:
        """It follows the plan of training, and so is made of what that one is made of."""

        def make() -> Rehearsed:
            return plan_evaluation(graph, self.strategy, training.plan)

        with pause_collection():
            if self.planned:
                return make()
            made_of = inputs(self.strategy, self.captured, graph)
            return self.plans.get("evaluation", made_of, make)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What is left of the run."""
        return segments(self.recipe, self.start.step if self.start else 0)

    @property
    def eval_steps(self) -> int:
        """Batches of one evaluation."""
        return self.evaluation_sampler.eval_steps(self.recipe.eval.batches)

    @property
    def is_profiled(self) -> bool:
        """The profile is of what the ranks run on: not of another device, nor the processor that a
        recipe gets which names none.
        """
        named = self.strategy.hardware.name != CPU and not is_stand_in(self.recipe)
        return self.is_foreseeable and named

    @property
    def is_foreseeable(self) -> bool:
        """Seconds foreseen are of such ranks: not all in one process, nor on another device."""
        here = self.strategy.hardware.device == self.device_type
        return here and self.recipe.launch.name != "virtual"

    @property
    def notes(self) -> tuple[str, ...]:
        """What went otherwise than a user expects, known without a plan; notes.py has the rest."""
        return (*self._notes, *self._of_data, *self._of_hardware, *self.plans.notes)

    @cached_property
    def _of_data(self) -> tuple[str, ...]:
        """Ranks that read one sample each for themselves must find the same in it."""
        drawn = random_fields(self.data) if self.recipe.num_ranks > 1 else []
        if not drawn:
            return ()
        what = f"the field{'s' * (len(drawn) > 1)} {', '.join(drawn)} of an item"
        return (
            f"data: {what} change with each call of __getitem__: ranks that share a sample "
            "may compute on unlike ones; draw from a generator that the index seeds.",
        )

    @property
    def _of_hardware(self) -> tuple[str, ...]:
        """What the recipe's own profile, and the plan, do not say."""
        named, used, out = self.recipe.hardware, self.strategy.hardware, []
        if named.device != used.device:
            here, what = gpu_name() or "a GPU", f"of which {named.name} says nothing"
            if is_stand_in(self.recipe):
                what += "; this profile is of another GPU, and so is what is foreseen"
            out.append(f"hardware={used.name}: ranks run on {here}, {what}.")
        if self.is_foreseeable and (profile := better_cpu(self.recipe)):
            what = f"this host's processor is of another kind, which hardware={profile} foresees."
            out.append(f"hardware={named.name}: {what}")
        if self.recipe.engine.cuda_graphs:
            what = "what regions make keeps its memory, so a rank takes more than is foreseen."
            out.append(f"engine.cuda_graphs: {what}")
        return tuple(out)

    @cached_property
    def work(self) -> WorkUnit:
        """Tokens, where the model's first argument or its field is named after tokens or is
        input_ids, and holds sequences of integers; else samples.
        """
        samples = self.recipe.train.batch_size
        argument, field = next(iter(self.task.inputs.items()))
        value = self.example[field]
        named = any("token" in name or name == "input_ids" for name in (argument, field))
        if named and value.dim() == 2 and not value.dtype.is_floating_point:
            return WorkUnit("tokens", samples * int(value.shape[1]))
        return WorkUnit("samples", samples)

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0; of parameters that no group gives another."""
        return self.strategy.optimizer.rate(self.recipe.optim.lr, step)

    def validation(self, results: Sequence[Results]) -> Results:
        """Mean of each number, and of each rank's, over batches of equal size; a metric with
        `of_mean` is that function of the mean (perplexity is no mean of perplexities).
        """
        out: Results = {}
        for name in results[0] if results else ():
            of_mean, values = (
                self._of_mean(name.removesuffix(LIST_SUFFIX)),
                [r[name] for r in results],
            )
            if isinstance(values[0], list):
                ranks = zip(*values, strict=True)
                out[name] = [of_mean(sum(each) / len(values)) for each in ranks]
            else:
                out[name] = of_mean(sum(values) / len(values))
        return out

    def _of_mean(self, name: str) -> Callable[[float], float]:
        metric = dict(self.task.metrics).get(name)
        function = getattr(metric, "func", metric)  # of a partial
        found: Callable[[float], float] = getattr(function, "of_mean", float)
        return found

    @cached_property
    def names(self) -> dict[str, str]:
        """Names of the model's state_dict, and of the loss's behind LOSS -> the tensor of the
        training that each is: tied weights have several names and are one tensor.
        """
        known = {id(tensor): name for name, tensor in self.task.tensors.items()}
        return {
            prefix + name: known[id(tensor)]
            for prefix, module in self.task.modules.items()
            for name, tensor in module.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor)
        }

    @property
    def evaluated(self) -> dict[str, str]:
        """Parameter -> the moving average that evaluation reads instead (optim.ema_eval)."""
        return weights.averages(self.training.plan) if self.recipe.optim.ema_eval else {}

    @property
    def unused(self) -> list[str]:
        """Parameters and buffers that forward does not read: they stay as they are."""
        used = {v.name for v in self.training.plan.variables.values()}
        return [name for name in self.initial if name not in used]

    @cached_property
    def saved(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shape and type of every tensor that is written at the end, what is not trained too."""
        plan = self.training.plan
        found = {v.name: plan.tensors[v.tensor] for v in weights.saved_variables(plan)}
        trained = {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()}
        given = self.initial
        return trained | {name: (given.shape(name), given.dtype(name)) for name in self.unused}

    def about(self, step: int) -> About:
        """What a checkpoint after `step` steps says of itself."""
        train = self.recipe.train
        return About(step, train.seed, train.batch_size, self.names)

    def parameters(self) -> dict[str, LogicalTensor]:
        """Logical tensors of the parameters."""
        plan = self.training.plan
        parameters = (v for v in plan.variables.values() if v.kind == "parameter")
        return {v.name: plan.tensors[v.tensor] for v in parameters}
