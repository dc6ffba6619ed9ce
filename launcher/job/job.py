"""A recipe made concrete: the task, the data, the strategy, and the compiled plans.  No process is
started here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import torch

from flowrun.engine.capture.capture import made_of
from flowrun.engine.compile import Rehearsed
from flowrun.engine.hardware.hardware import CPU
from flowrun.engine.ir.names import ROWS
from flowrun.engine.ir.placement import Shape
from flowrun.engine.passes.mirrored_view import LIST_SUFFIX
from flowrun.engine.runtime.process.cpu_share import count_seconds, share_of_others
from flowrun.engine.runtime.rank.rank import Results
from flowrun.launcher.data.sampler import length
from flowrun.launcher.job.job_plans import JobPlans, Probed, kept_probe
from flowrun.launcher.job.lr_schedule import Plateau, plateau_of
from flowrun.launcher.job.materials import Materials, add_materials, make_materials
from flowrun.launcher.job.optimizer import find_begun, is_own, trained_of
from flowrun.launcher.job.recipe_strategy import data_workers, inductor_options, strategy_of
from flowrun.launcher.job.segments import Segment, segments
from flowrun.launcher.model.adapters import describe_adapters
from flowrun.launcher.model.build import number_of
from flowrun.launcher.model.dataset_checks import random_fields
from flowrun.launcher.recipe.device import device_type, gpu_name
from flowrun.launcher.recipe.hardware_keys import is_stand_in, may_scale
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.updates import StepUpdate, check_trained, name_key, updates_of
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import About, Checkpoint
from flowrun.launcher.terminal import doing

_SEEDS_APART = 1_000_003  # of what updates of a step draw


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """The unit that speed counts, tokens or samples, and its number in a step."""

    unit: str
    per_step: int

    def speed(self, step_s: float) -> float:
        return self.per_step / step_s if step_s > 0 else 0.0


class Start(Protocol):
    """A state that a run goes on from: a checkpoint, what the ranks left in memory, or, after a
    rollback, the weights of an earlier step.
    """

    @property
    def step(self) -> int:
        """Steps done."""

    @property
    def ended(self) -> bool:
        """True if evaluation and checkpoint that were due after them are done, too."""

    @property
    def folder(self) -> Path | None:
        """Where the variables lie on the disk; None: they lie elsewhere."""

    @property
    def fresh(self) -> bool:
        """True if the variables are those of the beginning."""


class Job:
    """A job is a recipe made concrete.  Built once on each host; workers inherit it.

    materials: the model, the data and the task.  plans: what they are compiled to.

    start: the checkpoint that it continues from; None: it begins.
    values: False: for a plan alone: neither weights nor samples have any.
    planned: its training plan, where it is known already.
    probed: gives what a probe of this machine has found; None: what one has before.
    shared: materials of the job whose data this one reads, too.
    others: the other updates of each step, each with its job.
    """

    def __init__(
        self,
        recipe: Recipe,
        start: Checkpoint | None = None,
        *,
        values: bool = True,
        planned: Rehearsed | None = None,
        probed: Probed | None = None,
        shared: Materials | None = None,
    ) -> None:
        own, *others = updates_of(recipe)
        recipe = own.recipe
        self.since = count_seconds()  # of the cores, at the beginning
        self._start: Start | None = start
        self.inductor_options = inductor_options(recipe)
        self.device_type = device_type(recipe.launch, recipe.num_ranks, here=values)
        doing.doing("making the model and the data")
        self.materials = make_materials(recipe, values, shared)
        self.recipe = recipe = self.materials.recipe
        workers = data_workers(recipe)
        self.strategy = add_materials(strategy_of(recipe), self.materials, workers)
        if start and (begun := find_begun(start, self.materials.task, self.strategy.optimizer)):
            optimizer = replace(self.strategy.optimizer, begun=begun)
            self.strategy, planned = replace(self.strategy, optimizer=optimizer), None
        self.plans = JobPlans(
            recipe=recipe,
            materials=self.materials,
            strategy=self.strategy,
            planned=planned,
            device_type=self.device_type,
            probed=probed or partial(kept_probe, recipe),
            checks=values and recipe.engine.check_capture,
        )
        self.plateau = plateau_of(recipe, self.strategy.optimizer)
        self.others = tuple(self._make_other(k, each, values) for k, each in enumerate(others, 1))
        self.plans.others = tuple((each.every, job.plans) for each, job in self.others)
        self._evaluations: dict[int, dict[str, float | None]] = {}
        self.start = start
        if others and not recipe.buckets:
            trained = {update.name: job.trained for update, job in ((own, self), *self.others)}
            check_trained(trained)

    def _make_other(self, number: int, update: StepUpdate, values: bool) -> tuple[StepUpdate, Job]:
        """Make the job of another update of each step; what it draws at random is its own."""
        recipe = replace(update.recipe, precision=self.recipe.precision)
        own = f"updates.{number}.optim" if "optim" in update.given else "optim"
        with name_key("optim", own):
            job = Job(recipe, values=values, probed=lambda: None, shared=self.materials)
            job.plateau = plateau_of(recipe, job.strategy.optimizer, update.every or 1)
        made = job.materials
        task = replace(made.task, seed=made.task.seed + number * _SEEDS_APART)
        sampler = replace(made.sampler, every=update.every or 1)
        job.materials = job.plans.materials = replace(made, task=task, sampler=sampler)
        return update, job

    @property
    def start(self) -> Start | None:
        """The state that the run continues from; None: it begins.  A restart replaces it."""
        return self._start

    @start.setter
    def start(self, start: Start | None) -> None:
        self._start = start
        if self.plateaus and isinstance(start, Checkpoint):
            for steps, results in start.about().evaluations:
                self.take_evaluation(steps, dict(results))

    @property
    def plateaus(self) -> list[Plateau]:
        """What changes rates as the run is evaluated, of all updates of a step."""
        found = (job.plateau for job in (self, *(job for _, job in self.others)))
        return [plateau for plateau in found if plateau]

    def take_evaluation(self, steps: int, results: Results) -> None:
        """Let rates follow the evaluation after `steps` steps."""
        for plateau in self.plateaus:
            value = results[plateau.metric]
            is_number = value is not None and math.isfinite(value)
            plateau.take(steps, value if is_number else math.nan)
            found = {plateau.metric: value if is_number else None}
            self._evaluations[steps] = self._evaluations.get(steps, {}) | found

    @property
    def trained(self) -> dict[str, bool]:
        """The parameters that have a gradient; True: a function of the user updates it."""
        named, update_of = self.materials.task.parameters, self.strategy.optimizer.update_of
        trained = (name for name, parameter in named.items() if parameter.requires_grad)
        return {name: is_own(update_of(name).function) for name in trained}

    @property
    def training(self) -> Rehearsed:
        return self.plans.training

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments that are left of the run."""
        done = (self.start.step, self.start.ended) if self.start else ()
        return segments(self.recipe, *done)

    @property
    def initial(self) -> Mapping[str, torch.Tensor] | None:
        """What the ranks begin with; None: `start` has it."""
        fresh = self.start is None or self.start.fresh
        return self.materials.initial if fresh else None

    @property
    def saved_steps(self) -> int:
        """Steps of the checkpoint that it continues from; 0 where there is none on the disk."""
        return self.start.step if isinstance(self.start, Checkpoint) else 0

    @property
    def eval_steps(self) -> int:
        return self.materials.evaluation_sampler.eval_steps(self.recipe.eval.batches)

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

    def lacks_cores(self, others: float) -> bool:
        """Return whether ranks of this host lack cores, where `others` have that share of them."""
        launch, cores = self.recipe.launch, os.cpu_count() or 1
        needed = min(cores, self.recipe.num_ranks * launch.threads // launch.num_hosts)
        return self.is_foreseeable and cores * (1 - others) < 0.9 * needed

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what a user may not expect, known without a plan; notes.py has the others."""
        return (*self.materials.notes, *self._of_data, *self._of_hardware, *self.plans.cache.notes)

    @cached_property
    def _of_data(self) -> list[str]:
        """Ranks that read one sample each for themselves must find the same in it."""
        data, own = self.materials.data, self.materials.sampler.own_collate
        drawn = random_fields(data, own) if self.recipe.num_ranks > 1 else []
        what = f"the field{'s' * (len(drawn) > 1)} {', '.join(drawn)} of an item"
        note = (
            f"data: {what} change with each call of __getitem__: ranks that share a sample "
            "may compute on unlike ones; draw from a generator that the index seeds."
        )
        return [note] * bool(drawn)

    @property
    def _of_hardware(self) -> Iterator[str]:
        """Yield notes on the hardware that neither the profile nor the plan has."""
        named, used = self.recipe.hardware, self.strategy.hardware
        if named.device != used.device:
            here, what = gpu_name() or "a GPU", f"of which {named.name} says nothing"
            if is_stand_in(self.recipe):
                what += "; this profile is of another GPU, and so is what is foreseen"
            yield f"hardware={used.name}: ranks run on {here}, {what}."
        if scales := self.plans.scales:
            yield f"hardware=cpu, scaled by a probe of this machine on {scales.date}: {scales}"
        elif may_scale(self.recipe):
            yield "hardware=cpu is of another machine; a run, or flowrun calibrate, measures this"
        if self.lacks_cores(others := share_of_others(self.since)):
            yield f"this host is under load: other programs have {others:.0%} of its cores"

    @cached_property
    def work(self) -> WorkUnit:
        """Tokens, where the model's first argument or its field is named after tokens or is
        input_ids, and holds sequences of integers, of one length in all steps; else samples.
        """
        samples = self.recipe.train.batch_size
        argument, field = next(iter(self.materials.task.inputs.items()))
        value = self.materials.example[field]
        named = not self.recipe.buckets and any(
            "token" in name or name == "input_ids" for name in (argument, field)
        )
        if named and value.dim() == 2 and not value.dtype.is_floating_point:
            return WorkUnit("tokens", samples * int(value.shape[1]))
        return WorkUnit("samples", samples)

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0; of parameters that no group gives another."""
        optimizer, lr = self.strategy.optimizer, self.recipe.optim.lr
        planned = optimizer.rate(lr, step)
        adjust = self.plateau and self.plateau.adjust
        return adjust(optimizer.rate_field(lr), planned, step) if adjust else planned

    def other_rates(self, step: int) -> dict[str, float]:
        """Return the learning rate of each other update that a step has: "lr/NAME"."""
        due = ((u, job) for u, job in self.others if u.every and step % u.every == 0)
        return {f"lr/{update.name}": job.rate(step // update.every) for update, job in due}

    def validation(self, results: Sequence[Results]) -> Results:
        """Mean of each number, and of each rank's, over batches of equal size; a metric with
        `of_mean` is that function of the mean (as perplexity is), and one with
        `of_rows` that of the rows of all batches.
        """
        out: Results = {}
        for name in results[0] if results else ():
            metric = name.removesuffix(LIST_SUFFIX).removeprefix(ROWS)
            asked = dict(self.materials.task.metrics).get(metric)
            of_mean = partial(number_of, name, made_of(asked, "of_mean") or float)
            values = [result[name] for result in results]
            if of_rows := made_of(asked, "of_rows"):
                rows = torch.tensor([row for batch in values for row in batch])
                out[metric] = number_of(metric, of_rows, rows)
            elif isinstance(values[0], list):
                out[name] = [of_mean(sum(each) / len(values)) for each in zip(*values, strict=True)]
            else:
                out[name] = of_mean(sum(values) / len(values))
        return out

    @cached_property
    def names(self) -> dict[str, str]:
        """Names of the model's state_dict, and of the loss's behind LOSS -> the tensor of the
        training that each is: tied weights have several names and are one tensor.
        """
        known = {id(tensor): name for name, tensor in self.materials.task.tensors.items()}
        return {
            prefix + name: known[id(tensor)]
            for prefix, module in self.materials.task.modules.items()
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
        return [name for name in self.materials.initial if name not in used]

    @cached_property
    def saved(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shape and type of every tensor that is written at the end, what is not trained too."""
        plan = self.training.plan
        found = {v.name: plan.tensors[v.tensor] for v in weights.saved_variables(plan)}
        trained = {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()}
        given = self.materials.initial
        return trained | {name: (given.shape(name), given.dtype(name)) for name in self.unused}

    def about(self, step: int) -> About:
        train, made = self.recipe.train, self.materials
        about = About(step, train.seed, train.batch_size, self.names)
        adapters = describe_adapters(made.model)
        trained = trained_of(made.task, self.strategy.optimizer)
        about = replace(about, digests=made.digests, adapters=adapters, trained=trained)
        about = replace(about, evaluations=[e for e in self._evaluations.items() if e[0] <= step])
        return replace(about, samples=length(made.data))
