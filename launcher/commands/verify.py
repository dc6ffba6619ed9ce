"""`flowrun verify`: does a recipe train alike under every layout?

Each layout trains the recipe for a few steps; its losses and final weights are compared with a
plain torch loop (plain_loop.py), which sees each step's batch in one piece; by micro-batches where
the recipe asks for their mean, or the model itself depends on its batch.  Where a plain loop would
train something else, since a recipe draws random numbers or updates some rows of a table alone,
they are compared with flowrun's own run on one rank.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
import yaml

from flowrun.engine.errors import FlowrunError, RecipeError
from flowrun.engine.passes.update.sparse_ops import sparse_tables
from flowrun.launcher.commands.plain_loop import Trained, plain_loop
from flowrun.launcher.job.forked import run_autograd
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.lr_schedule import waits
from flowrun.launcher.job.recipe_strategy import AUTOCAST
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import require
from flowrun.launcher.recipe.schema import MIRRORED, STEP
from flowrun.launcher.report.report import Report
from flowrun.launcher.store import weight_files as weights

# float32 sums in another order.  Losses: relative; weights: of the way that training moved them.
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-6, 1e-5
# Some recipes amplify rounding: Adam divides a gradient near 0 by itself, batch norm by a variance
# near 0.  How much is measured: the reference is trained again from weights that are one unit in
# the last place off, and layouts may be as many times as far away.
ROUNDING_ALLOWANCE = 4
MOST_STEPS = 20  # a recipe that trains longer is cut to FEW_STEPS
FEW_STEPS = 5
SINGLE = "single"

RunRecipe = Callable[[Recipe, Path], Report]


@dataclass(frozen=True, slots=True)
class Difference:
    """A layout, compared with the reference.

    Attributes:
        layout: its name.
        ranks: number of ranks.
        loss: largest relative difference of the losses.
        weights: largest difference of the weights, as a share of how far training moved them.
        bytes_a_step: bytes that all ranks sent in a step.
        verdict: "same", or DIFFERS, or why the recipe cannot take this layout.
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
class LayoutComparison:
    """All layouts of a recipe, compared with a reference.

    Attributes:
        rows: one for each layout; of a layout that the recipe cannot take, the reason.
        caption: what the reference is, and which differences are allowed.
    """

    rows: tuple[Difference, ...]
    caption: str


def compare_layouts(recipe: Recipe, run: RunRecipe) -> LayoutComparison:
    """Train under every layout.  Raises RecipeError if there is nothing to compare with."""
    problem = "the plain loop that layouts are compared with has one update a step."
    instead = "Train two layouts of this recipe, and compare their metrics.jsonl."
    require(not recipe.updates, "updates", problem, instead)
    with tempfile.TemporaryDirectory() as scratch:
        return _RecipeLayouts(recipe, run, Path(scratch)).compare()


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


@dataclass(frozen=True, slots=True)
class Allowed:
    """Largest difference of the losses and of the weights (as in Difference) that counts as the
    same training.  reason: why it is more than that of most recipes.
    """

    loss: float = LOSS_TOLERANCE
    weights: float = WEIGHT_TOLERANCE
    reason: str = ""

    def holds(self, loss: float, weights: float) -> bool:
        """True if neither is further off; False of what is no number."""
        return loss <= self.loss and weights <= self.weights

    def loosen(self, factor: int, noise: tuple[float, float], cause: str) -> Allowed:
        """Allow at least `factor` times the noise of (losses, weights) that `cause` makes."""
        loss, weights = (factor * n for n in noise)
        if self.holds(loss, weights) or not math.isfinite(loss + weights):
            return self
        reason = f"{factor} times what {cause}"
        return Allowed(max(self.loss, loss), max(self.weights, weights), reason)

    def __str__(self) -> str:
        loss, weights = f"{self.loss:.1g}", f"{self.weights:.1g}"
        why = f" ({self.reason})" if self.reason else ""
        return f"losses {loss} relative, weights {weights} of the way that training moved them{why}"


class _RecipeLayouts:
    """The layouts of one recipe, and what they are compared with.

    why_single: why that is not plain torch; empty if it is.  whole: the loop sees each step's batch
    in one piece.  before: the weights that all start from.
    """

    def __init__(self, recipe: Recipe, run: RunRecipe, scratch: Path) -> None:
        self.recipe, self.run, self.scratch = recipe, run, scratch
        self.file = scratch / "verified.yaml"
        self.file.write_text(recipe.to_yaml())
        steps = recipe.train.steps if recipe.train.steps <= MOST_STEPS else FEW_STEPS
        self.most = Allowed()  # looser where a row asks for it and there is a reason
        self.always = [f"train.steps={steps}", "eval.batches=0", "train.save=true"]
        self.always += ["train.epochs=0", "log=[]", "callbacks=[]"]
        self.waits = waits(recipe.optim)
        self.always += ["optim.schedule=null"] * self.waits
        self.single = dict(layouts(recipe))[SINGLE]
        self.job = job = Job(self._load([]))
        self.why_single, self.whole = run_autograd(lambda: (_why_single(job), _sees_whole(job)))
        self.by_parts = False  # some layout trained as a loop over micro-batches does
        self.before = {name: job.materials.initial[name] for name in job.materials.task.parameters}
        if self.why_single and recipe.view == MIRRORED:
            raise RecipeError(
                "view",
                f"{self.why_single}, in the mirrored view on each rank differently: layouts of "
                "other ranks have nothing to be compared with.",
                "Verify it with view=consistent.",
            )
        self.reference = cache(self._reference)
        self.allowed = cache(self._find_allowed)

    def compare(self) -> LayoutComparison:
        """Run them all."""
        rows = tuple(self._row(name, changes) for name, changes in layouts(self.recipe))
        return LayoutComparison(rows, self._caption())

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
        found = _distance(self._read_trained(folder), self.reference(replicas))
        if not self.most.holds(*found):
            self.most = self.allowed(replicas)
        verdict = "same" if self.most.holds(*found) else "DIFFERS"
        if verdict != "same" and self.whole and not self.why_single:
            by_parts = _distance(self._read_trained(folder), self.reference(replicas, whole=False))
            if self.most.holds(*by_parts):
                self.by_parts, found, verdict = True, by_parts, "same by micro-batches"
        sent = round(report.measured["sent_bytes"])
        return Difference(name, report.ranks, *found, sent, verdict)

    def _reference(
        self, replicas: int, dtype: str | None = None, nudged: bool = False, whole: bool = True
    ) -> Trained:
        """Train what the layouts are compared with.

        replicas: of the mirrored view.  whole: a step's batch in one piece, if the recipe allows.
        dtype: another precision than the recipe's, with the updates that the recipe's has.  nudged:
        from initial weights that are one unit in the last place off.
        """
        changes = [*self.single] if self.why_single else []
        if nudged:
            changes.append(f"model.weights={self.nudged}")
        if dtype:
            changes += [f"precision.dtype={dtype}", "precision.loss_scale=null"]
        recipe = self._load(changes)
        if not self.why_single:
            skipped = self.reference(replicas).skipped if dtype else frozenset()
            seen = whole and self.whole
            return run_autograd(lambda: plain_loop(recipe, replicas, skipped, whole=seen))
        folder = self.scratch / f"reference_{dtype}_{nudged}"
        self.run(recipe, folder)
        return self._read_trained(folder)

    def _read_trained(self, folder: Path) -> Trained:
        """Read what a run left in its folder."""
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        found = (json.loads(line)["loss"] for line in lines)
        losses = tuple(math.nan if loss is None else float(loss) for loss in found)
        return Trained(losses, self.before, weights.load(folder))

    def _find_allowed(self, replicas: int) -> Allowed:
        """Find the tolerance of a recipe that rounding moves further than others, and the reason.

        In a narrow dtype two sums in another order are each about as far from fp32 as the reference
        is, so at most twice as far from one another.
        """
        dtype, reference = self.recipe.precision.dtype, self.reference(replicas)
        if AUTOCAST[dtype] is not None:
            noise = _distance(reference, self.reference(replicas, dtype="fp32"))
            return Allowed().loosen(2, noise, f"{dtype} makes of the same recipe in fp32")
        noise = _distance(reference, self.reference(replicas, nudged=True))
        reason = "one unit in the last place of the initial weights makes of this recipe"
        return Allowed().loosen(ROUNDING_ALLOWANCE, noise, reason)

    @cached_property
    def nudged(self) -> Path:
        """A file of initial weights that are one unit in the last place off, up or down."""
        signs, state = torch.Generator().manual_seed(0), {}
        for name, tensor in weights.of_model(self.job.names).items():
            value = self.job.materials.initial[tensor]
            if value.is_floating_point() and name in self.before:
                up = torch.randint(2, value.shape, generator=signs) * 2 - 1
                value = (value * (1 + up * torch.finfo(value.dtype).eps)).to(value.dtype)
            state[name] = value
        file = self.scratch / "nudged.pt"
        torch.save(state, file)
        return file

    def _caption(self) -> str:
        reference = "a plain torch loop"
        if self.whole:
            reference += " that sees each step's batch in one piece"
        if self.by_parts:
            reference += (
                ' ("same by micro-batches": with one that sees micro-batch after micro-batch, for'
                " the model depends on its batch, or the loss is a sum)"
            )
        if self.recipe.view == MIRRORED:
            reference += " over as many replicas"
        if self.waits:
            reference += ", without a schedule: it would wait for evaluations"
        if self.why_single:
            reference = f"the layout {SINGLE}, not plain torch: {self.why_single}"
        return f"Compared with {reference}. Allowed: {self.most}."


def _why_single(job: Job) -> str:
    """Why plain torch trains something else; empty if it does not."""
    graph = job.training.plan.graph
    if any(feed.field == "@draw" for feed in graph.feeds):
        return "the model draws random numbers, and torch's own are others"
    if job.strategy.kept.weights or job.strategy.kept.states:
        return "updates are rounded to bf16 at random, which torch's optimizers do not do"
    if job.recipe.optim.sparse == "lazy" and sparse_tables(graph):
        return "optim.sparse=lazy leaves rows alone that torch's optimizers change"
    if job.recipe.precision.accumulate_dtype is None and job.recipe.train.micro_batches > 1:
        return "precision.accumulate_dtype=null rounds sums that torch's loop has in fp32"
    return ""


def _sees_whole(job: Job) -> bool:
    """Return whether the loop may see a step's batch in one piece, for any number of micro-batches:
    not if forward changes buffers, as a batch norm does.
    """
    recipe = job.recipe
    of_step = recipe.view != MIRRORED and recipe.train.loss_mean == STEP
    return of_step and recipe.train.micro_batches > 1 and not job.training.plan.graph.running


def _distance(found: Trained, reference: Trained) -> tuple[float, float]:
    """Largest difference of (losses, weights), as Difference has them."""
    loss = max(map(_relative, found.losses, reference.losses))
    apart, moved = (
        math.hypot(*(float((one[n] - other[n]).norm()) for n in reference.before))
        for one, other in ((found.after, reference.after), (reference.after, reference.before))
    )
    return loss, apart / moved if moved else apart


def _relative(a: float, b: float) -> float:
    """Relative difference; infinite if one is no number and the other is."""
    if math.isnan(a) and math.isnan(b):
        return 0.0  # of a step without a target
    return abs(a - b) / (abs(b) or 1.0) if math.isfinite(a) and math.isfinite(b) else math.inf
