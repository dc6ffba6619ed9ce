"""`flowrun verify`: does a recipe train alike under every layout?

Each layout trains the recipe for a few steps; its losses and final weights are held beside a plain
torch loop (launcher/plain_loop.py).  Where that would train something else, since a recipe draws
random numbers or updates some rows of a table alone, they are held beside flowrun's own run on one
rank.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

from flowrun.engine.errors import FlowrunError, RecipeError
from flowrun.engine.passes.sparse_ops import sparse_tables
from flowrun.launcher import weights
from flowrun.launcher.beside import apart
from flowrun.launcher.device import may_use_gpus
from flowrun.launcher.job import Job
from flowrun.launcher.plain_loop import Trained, plain_loop
from flowrun.launcher.recipe import load
from flowrun.launcher.schema import MIRRORED, Recipe
from flowrun.launcher.strategy import AUTOCAST

LOSS_TOLERANCE = 1e-5  # relative: float32 sums in another order
# Of the way that training moved the weights: Adam divides rounding by itself at gradients near 0.
WEIGHT_TOLERANCE = 1e-2
MOST_STEPS = 20  # a recipe that trains longer is cut to FEW_STEPS
FEW_STEPS = 5
SINGLE = "single"

Run = Callable[[Recipe, Path], Any]
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Difference:
    """One layout beside the reference: largest relative difference of the losses, and of the
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


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row a layout; one that the recipe cannot take is a row with the reason.  caption: what they
    are held beside, and how far off they may be.
    """

    rows: tuple[Difference, ...]
    caption: str


def compare_layouts(recipe: Recipe, run: Run) -> Comparison:
    """Train under every layout.  Raises RecipeError if the recipe has nothing to be held beside."""
    with tempfile.TemporaryDirectory() as scratch:
        return _Layouts(recipe, run, Path(scratch)).compare()


def layouts(recipe: Recipe) -> Iterator[tuple[str, list[str]]]:
    """(name, overrides) of each layout; the first is the recipe's own."""
    text = yaml.safe_load(recipe.to_yaml())
    axes = dict.fromkeys(["data", "tensor", *(text.get("placement", {}).get("axes") or {})], 1)
    yield "as the recipe says", []
    for name, sizes, stages, zero in (
        (SINGLE, {}, 1, 0),
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
            "auto.placement=false",
            *(["placement.chunks=1"] if stages == 1 else []),
        ]
        yield name, changes


class _Layouts:
    """The layouts of one recipe, and what they are held beside.

    why_single: why that is not plain torch; empty if it is.  before: the weights that all start
    from.
    """

    def __init__(self, recipe: Recipe, run: Run, scratch: Path) -> None:
        self.recipe, self.run, self.scratch = recipe, run, scratch
        self.file = scratch / "verified.yaml"
        self.file.write_text(recipe.to_yaml())
        steps = recipe.train.steps if recipe.train.steps <= MOST_STEPS else FEW_STEPS
        self.always = [f"train.steps={steps}", "eval.batches=0", "train.save=true"]
        self.single = dict(layouts(recipe))[SINGLE]
        job = Job(self._load([]))
        self.why_single = self._apart(lambda: _why_single(job))
        self.before = {name: job.initial[name] for name, _ in job.model.named_parameters()}
        if self.why_single and recipe.view == MIRRORED:
            raise RecipeError(
                "view",
                f"{self.why_single}, in the mirrored view each rank apart: there is nothing that "
                "layouts of other ranks could be held beside.",
                "Verify it with view=consistent.",
            )
        self.reference = cache(self._reference)

    def _apart(self, make: Callable[[], Made]) -> Made:
        """What uses autograd, where ranks are to be forked that use CUDA."""
        return apart(make) if may_use_gpus(self.recipe) else make()

    def compare(self) -> Comparison:
        """Run them all."""
        rows = tuple(self._row(name, changes) for name, changes in layouts(self.recipe))
        return Comparison(rows, self._caption())

    def _load(self, changes: list[str]) -> Recipe:
        return load([f"recipe={self.file}", *changes, *self.always])

    def _row(self, name: str, changes: list[str]) -> Difference:
        folder = self.scratch / name.replace(" ", "_")
        try:
            changed = self._load(changes)
            report = self.run(changed, folder)
        except FlowrunError as error:
            if not changes:
                raise  # the recipe itself is wrong
            return Difference(name, 0, 0.0, 0.0, 0, f"skipped: {error.problem.splitlines()[0]}")
        replicas = changed.num_ranks if changed.view == MIRRORED else 1
        loss, weight = _distance(self._trained(folder), self.reference(replicas))
        most_loss, most_weight = self._allowed(replicas)
        verdict = "same" if loss <= most_loss and weight <= most_weight else "DIFFERS"
        sent = round(report.measured["sent_bytes"])
        return Difference(name, report.ranks, loss, weight, sent, verdict)

    def _reference(self, replicas: int, dtype: str | None = None) -> Trained:
        """dtype: another precision than the recipe's, with the updates that the recipe's has."""
        changes = [*self.single] if self.why_single else []
        if dtype:
            changes += [f"precision.dtype={dtype}", "precision.loss_scale=null"]
        recipe = self._load(changes)
        if not self.why_single:
            skipped = self.reference(replicas).skipped if dtype else frozenset()
            return self._apart(lambda: plain_loop(recipe, replicas, skipped))
        folder = self.scratch / f"reference_{dtype}"
        self.run(recipe, folder)
        return self._trained(folder)

    def _trained(self, folder: Path) -> Trained:
        """What a run left in its folder."""
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        losses = tuple(float(json.loads(line)["loss"]) for line in lines)
        return Trained(losses, self.before, weights.load(folder))

    def _allowed(self, replicas: int) -> tuple[float, float]:
        """Of (losses, weights).

        In a narrow dtype two sums in another order are each about as far from fp32 as the reference
        is, so at most twice as far from one another.
        """
        if AUTOCAST[self.recipe.precision.dtype] is None:
            return LOSS_TOLERANCE, WEIGHT_TOLERANCE
        noise = _distance(self.reference(replicas), self.reference(replicas, "fp32"))
        return max(LOSS_TOLERANCE, 2 * noise[0]), max(WEIGHT_TOLERANCE, 2 * noise[1])

    def _caption(self) -> str:
        beside = "a plain torch loop"
        if self.recipe.view == MIRRORED:
            beside += " over as many replicas"
        if self.why_single:
            beside = f"the layout {SINGLE}, not plain torch: {self.why_single}"
        loss, weight = LOSS_TOLERANCE, WEIGHT_TOLERANCE
        dtype = self.recipe.precision.dtype
        more, of = "", "of the way that training moved them"
        if AUTOCAST[dtype] is not None:
            loss, weight = self._allowed(
                self.recipe.num_ranks if self.recipe.view == MIRRORED else 1
            )
            more = f" ({dtype}: twice what it makes of the same recipe in fp32)"
        return (
            f"Beside {beside}. Allowed: losses {loss:.1g} relative, weights {weight:.1g} "
            f"{of}{more}."
        )


def _why_single(job: Job) -> str:
    """Why plain torch trains something else; empty if it does not."""
    graph = job.training.plan.graph
    if any(feed.field == "@draw" for feed in graph.feeds):
        return "the model draws random numbers, and torch's own are others"
    if job.recipe.optim.sparse == "lazy" and sparse_tables(graph):
        return "optim.sparse=lazy leaves rows alone that torch's optimizers change"
    if job.recipe.precision.accumulate_dtype is None and job.recipe.train.micro_batches > 1:
        return "precision.accumulate_dtype=null rounds sums that torch's loop has in fp32"
    return ""


def _distance(found: Trained, reference: Trained) -> tuple[float, float]:
    """Largest difference of (losses, weights), as Difference has them."""
    loss = max(map(_relative, found.losses, reference.losses))
    apart, moved = (
        math.hypot(*(float((one[n] - other[n]).norm()) for n in reference.before))
        for one, other in ((found.after, reference.after), (reference.after, reference.before))
    )
    return loss, apart / moved if moved else apart


def _relative(a: float, b: float) -> float:
    """Relative difference; infinite if either is no number."""
    return abs(a - b) / (abs(b) or 1.0) if math.isfinite(a) and math.isfinite(b) else math.inf
