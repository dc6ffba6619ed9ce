"""`flowrun verify`: does a recipe train alike under every layout?

Each layout trains the recipe for a few steps; its losses and final weights are held beside a plain
torch loop (autograd and torch.optim, one device, nothing of flowrun's engine).
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from flowrun.engine.errors import FlowrunError
from flowrun.engine.strategy import Optimizer
from flowrun.engine.update_trace import fed_to, states_of
from flowrun.launcher import build, weights
from flowrun.launcher.job import Job
from flowrun.launcher.recipe import load
from flowrun.launcher.schema import Recipe

LOSS_TOLERANCE = 1e-5  # relative: float32 sums in another order
# Of the way that training moved the weights: Adam divides rounding by itself at gradients near 0.
WEIGHT_TOLERANCE = 1e-2
MOST_STEPS = 20  # a recipe that trains longer is cut to FEW_STEPS
FEW_STEPS = 5

Run = Callable[[Recipe, Path], Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """One layout beside the plain loop: largest relative difference of the losses, and of the
    weights as a share of the way that training moved them; bytes that all ranks sent in a step.
    """

    layout: str
    ranks: int
    loss: float
    weights: float
    bytes_a_step: int
    verdict: str

    @property
    def ok(self) -> bool:
        """False if the layout trained something else."""
        return not self.verdict.startswith("DIFFERS")


def compare_layouts(recipe: Recipe, run: Run) -> list[Difference]:
    """The table, a row a layout; one that the recipe cannot take is a row with the reason."""
    steps = recipe.train.steps if recipe.train.steps <= MOST_STEPS else FEW_STEPS
    rows: list[Difference] = []
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "verified.yaml"
        file.write_text(recipe.to_yaml())
        always = [f"train.steps={steps}", "eval.batches=0", "train.save=true"]
        losses, before, after = plain_loop(load([f"recipe={file}", *always]))
        for name, changes in layouts(recipe):
            folder = Path(scratch) / name.replace(" ", "_")
            try:
                changed = load([f"recipe={file}", *changes, *always])
                report = run(changed, folder)
            except FlowrunError as error:
                if not changes:
                    raise  # the recipe itself is wrong
                rows.append(
                    Difference(name, 0, 0.0, 0.0, 0, f"skipped: {error.problem.splitlines()[0]}")
                )
                continue
            rows.append(_difference(name, report, folder, losses, before, after))
    return rows


def layouts(recipe: Recipe) -> Iterator[tuple[str, list[str]]]:
    """(name, overrides) of each layout; the first is the recipe's own."""
    text = yaml.safe_load(recipe.to_yaml())
    axes = dict.fromkeys(["data", "tensor", *(text.get("placement", {}).get("axes") or {})], 1)
    yield "as the recipe says", []
    for name, sizes, stages, zero in (
        ("single", {}, 1, 0),
        ("data 2", {"data": 2}, 1, 0),
        ("tensor 2", {"tensor": 2}, 1, 0),
        ("stages 2", {}, 2, 0),
        ("data 2, tensor 2, stages 2", {"data": 2, "tensor": 2}, 2, 0),
        ("data 2, ZeRO 1", {"data": 2}, 1, 1),
        ("data 2, ZeRO 2", {"data": 2}, 1, 2),
        ("data 2, ZeRO 3", {"data": 2}, 1, 3),
        ("data 2, tensor 2, ZeRO 2", {"data": 2, "tensor": 2}, 1, 2),
    ):
        changes = [f"placement.axes.{axis}={sizes.get(axis, 1)}" for axis in axes]
        changes += [
            f"placement.stages={stages}",
            f"zero.stage={zero}",
            f"zero.axis={'data' if zero else 'null'}",
        ]
        yield name, changes


def plain_loop(
    recipe: Recipe,
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(loss of each step, weights before, weights after) of plain torch on one device."""
    job = Job(recipe)
    parts = build.build(recipe)
    model, loss_fn = parts.model.train(), parts.loss
    update = _Update(job.strategy.optimizer, model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    for step in range(recipe.train.steps):
        model.zero_grad()
        total = 0.0
        for micro_batch in range(recipe.train.micro_batches):
            batch = job.sampler(step, micro_batch, slice(0, recipe.micro_batch_size))
            output = model(**{argument: batch[name] for argument, name in parts.inputs.items()})
            loss = (
                loss_fn(output, batch)
                if loss_fn
                else output
                if isinstance(output, torch.Tensor)
                else output.loss
            )
            (loss / recipe.train.micro_batches).backward()
            total += float(loss.detach()) / recipe.train.micro_batches
        update.step(step)
        losses.append(total)
    return losses, before, {name: p.detach() for name, p in model.named_parameters()}


class _Update:
    """One step of plain torch: its own AdamW and SGD, or the function that the recipe names."""

    def __init__(self, optimizer: Optimizer, model: torch.nn.Module) -> None:
        self.optimizer = optimizer
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.settings = {name: optimizer.settings(name) for name in self.parameters}
        self.torch = None if optimizer.function else self._torch()
        self.states: dict[str, list[torch.Tensor]] = {}

    def _torch(self) -> torch.optim.Optimizer:
        groups = []
        for name, p in self.parameters.items():
            settings: dict[str, Any] = {"params": [p], **self.settings[name]}
            if "beta1" in settings:
                settings["betas"] = (settings.pop("beta1"), settings.pop("beta2"))
            groups.append(settings)
        kind = torch.optim.AdamW if self.optimizer.name == "adamw" else torch.optim.SGD
        return kind(groups, lr=1.0)

    @torch.no_grad()
    def step(self, step: int) -> None:
        """step: counted from 0."""
        optimizer = self.optimizer
        gradients = [p for p in self.parameters.values() if p.grad is not None]
        if optimizer.clip_value:
            torch.nn.utils.clip_grad_value_(gradients, optimizer.clip_value)
        if optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_(gradients, optimizer.clip_norm)
        rates = {
            name: optimizer.rate(settings["lr"], step) for name, settings in self.settings.items()
        }
        if self.torch is not None:
            for group, rate in zip(self.torch.param_groups, rates.values(), strict=True):
                group["lr"] = rate
            self.torch.step()
            return
        for name, p in self.parameters.items():
            if p.grad is not None:
                self._call(name, p, rates[name], step)

    def _call(self, name: str, p: torch.Tensor, rate: float, step: int) -> None:
        function = self.optimizer.function
        assert function is not None and p.grad is not None, name
        if name not in self.states:
            self.states[name] = [
                p.clone() if start is None else torch.full_like(p, start)
                for _, start in states_of(function)
            ]
        fed = {"lr": torch.tensor(rate), "step": torch.tensor(float(step + 1))}
        numbers: dict[str, Any] = {k: v for k, v in self.settings[name].items() if k != "lr"}
        numbers |= {key: fed[key] for key in fed_to(function)}
        new, *self.states[name] = function(
            p.detach().clone(), p.grad, *self.states[name], **numbers
        )
        p.copy_(new)


def _relative(a: float, b: float) -> float:
    """Relative difference; infinite if either is no number."""
    return abs(a - b) / (abs(b) or 1.0) if math.isfinite(a) and math.isfinite(b) else math.inf


def _difference(
    name: str,
    report: Any,
    folder: Path,
    losses: list[float],
    before: dict[str, torch.Tensor],
    after: dict[str, torch.Tensor],
) -> Difference:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    trained = [json.loads(line)["loss"] for line in lines]
    loss = max(_relative(a, b) for a, b in zip(trained, losses, strict=True))
    found = weights.load(folder)
    moved = max(float((after[n] - before[n]).abs().max()) for n in after)
    weight = max(float((found[n] - after[n]).abs().max()) for n in after) / moved
    good = loss <= LOSS_TOLERANCE and weight <= WEIGHT_TOLERANCE
    verdict = "same" if good else "DIFFERS"
    return Difference(
        name, report.ranks, loss, weight, round(report.measured["sent_bytes"]), verdict
    )
