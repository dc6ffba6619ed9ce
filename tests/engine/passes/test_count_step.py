from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrun.engine.actors.plan import READER
from flowrun.engine.ir.graph import COUNT, FORWARD, WEIGHTS
from flowrun.launcher.report.show_plan import timeline
from support.layouts.grids import Layout, cluster, compiled, compiled_evaluation, virtual_run
from support.layouts.plain_loop import (
    MOMENTUM,
    Batch,
    Training,
    loss_difference,
    pins,
    plain_loop,
    seeded,
    weight_difference,
)

CLASSES, LENGTH, SAMPLES, STEPS, IGNORED = 8, 6, 16, 3, -100


class Tagger(nn.Module):
    """A class for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)
        self.register_buffer("of_class", torch.rand(CLASSES) + 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(tokens))))


def padded(count: int, pattern: str) -> tuple[Batch, ...]:
    """Samples of unlike lengths; in some patterns whole micro-batches are padding."""
    generator = torch.Generator().manual_seed(3)
    out = []
    for _ in range(count):
        targets = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=generator)
        lengths = torch.randint(LENGTH + 1, (SAMPLES, 1), generator=generator)
        if pattern == "last empty":
            lengths[SAMPLES // 2 :] = 0
        if pattern == "one target":
            lengths.zero_()
            lengths[5] = 1
        targets[torch.arange(LENGTH) >= lengths] = IGNORED
        tokens = torch.randint(12, (SAMPLES, LENGTH), generator=generator)
        mask = (targets != IGNORED).float()
        out.append({"tokens": tokens, "targets": targets, "mask": mask, "scores": mask * 0.5})
    return tuple(out)


OF_CLASSES = torch.linspace(0.5, 2.0, CLASSES)
Loss = Callable[[Tensor, Batch], Tensor]


def flat(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return output.flatten(0, 1), targets.flatten()


def mean(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(*flat(output, batch["targets"]))


def each(output: Tensor, batch: Batch) -> Tensor:
    losses = F.cross_entropy(*flat(output, batch["targets"]), reduction="none")
    return losses.view(batch["targets"].shape)


def several(output: Tensor, batch: Batch) -> Tensor:
    """Two denominators, a mean and a term of the weights' scale."""
    weights = batch["scores"].sum()
    other = (output.square().mean(-1) * batch["scores"]).sum() / weights
    return mean(output, batch) + 0.3 * other + 0.01 * output.abs().mean()


def per_sample(output: Tensor, batch: Batch) -> Tensor:
    """A mean of means over each sample's own targets: no count of the step."""
    mask = batch["mask"]
    own = (each(output, batch) * mask).sum(1) / mask.sum(1, keepdim=True).clamp(min=1).squeeze(1)
    return own.mean()


LOSSES: dict[str, Loss] = {
    "a mean": mean,
    "transposed": lambda o, b: F.cross_entropy(o.transpose(1, 2), b["targets"]),
    "smoothed": lambda o, b: F.cross_entropy(*flat(o, b["targets"]), label_smoothing=0.1),
    "of classes": lambda o, b: F.cross_entropy(*flat(o, b["targets"]), OF_CLASSES),
    "shifted, as transformers does it": lambda o, b: F.cross_entropy(
        *flat(o, F.pad(b["targets"], (0, 1), value=IGNORED)[..., 1:].contiguous())
    ),
    "masked": lambda o, b: (each(o, b) * b["mask"]).sum() / b["mask"].sum(),
    "clamped": lambda o, b: each(o, b).sum() / b["targets"].ne(IGNORED).sum().clamp(min=1),
    "weighted": lambda o, b: (each(o, b) * (b["mask"] / (b["mask"].sum() + 1e-6))).sum(),
    "of means": lambda o, b: (each(o, b) * b["mask"]).mean() / b["mask"].mean(),
    "reciprocal": lambda o, b: each(o, b).sum() * (1.0 / b["mask"].sum()),
    "guarded": lambda o, b: torch.where(
        b["mask"].sum() > 0, (each(o, b) * b["mask"]).sum() / b["mask"].sum(), 0.0
    ),
    "several": several,
    "per sample": per_sample,
    "likelihood": lambda o, b: F.nll_loss(*flat(F.log_softmax(o, -1), b["targets"])),
}


def training(loss: Loss = mean, micro_batches: int = 4, pattern: str = "lengths") -> Training:
    return Training(
        partial(seeded, Tagger),
        {"tokens": "tokens"},
        loss,
        padded(STEPS, pattern),
        MOMENTUM,
        micro_batches,
        pins({"head.weight": 0, "head.bias": 0}),
    )


def check(given: Training, layout: Layout) -> None:
    plain = plain_loop(given, 0.0, STEPS)
    run = virtual_run(given, layout, STEPS)
    assert loss_difference(run.losses, plain) < 1e-6
    weights = {name: value for name, value in run.weights.items() if name in plain.after}
    assert weight_difference(weights, plain) < 1e-5


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_is_that_of_the_whole_batch(loss: Loss) -> None:
    check(training(loss), Layout())


DENOMINATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "roots": lambda a, b: a.sqrt() * b.sqrt(),
    "reciprocal roots": lambda a, b: 1 / (a.rsqrt() * b.rsqrt()),
    "reciprocal": lambda a, b: (2 * a).reciprocal().reciprocal(),
    "quotient": lambda a, b: a * a / b,
    "number by it": lambda a, b: a * b * (2 / a),
    "sum": lambda a, b: a + b,
    "largest": torch.maximum,
    "choice": lambda a, b: torch.where(a > b, b, a),
}


@pytest.mark.parametrize("of", DENOMINATORS.values(), ids=DENOMINATORS)
def test_a_loss_may_divide_by_what_is_made_of_counts(
    of: Callable[[Tensor, Tensor], Tensor],
) -> None:
    def loss(output: Tensor, batch: Batch) -> Tensor:
        return each(output, batch).sum() / of(batch["mask"].sum(), batch["scores"].sum())

    check(training(loss), Layout())


@pytest.mark.parametrize("pattern", ["lengths", "last empty", "one target"])
@pytest.mark.parametrize("micro_batches", [1, 2, 8, 16])
def test_micro_batches_change_no_number(micro_batches: int, pattern: str) -> None:
    check(training(mean, micro_batches, pattern), Layout())


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=2),
        Layout(tensor=2),
        Layout(stages=2),
        Layout(stages=2, in_flight="gpipe"),
        Layout(stages=2, in_flight="1f1b", register_slots=1),
        Layout(stages=2, chunks=2, in_flight="1f1b"),
        Layout(data=2, tensor=2, stages=2),
        Layout(data=2, zero=2),
        Layout(data=2, tensor=2, zero=3),
        Layout(data=2, zero=3, in_flight="1f1b"),
    ],
    ids=str,
)
@pytest.mark.parametrize("loss", [mean, several])
def test_so_it_is_in_every_layout(loss: Loss, layout: Layout) -> None:
    check(training(loss, 4, "last empty"), layout)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("layout", [Layout(), Layout(data=2), Layout(tensor=2)], ids=str)
def test_a_step_without_a_target_leaves_the_weights(layout: Layout, micro_batches: int) -> None:
    given = training(mean, micro_batches)
    nothing = {**given.batches[0], "targets": torch.full((SAMPLES, LENGTH), IGNORED)}
    given = replace(given, batches=(given.batches[0], nothing, given.batches[2]))
    plain, run = plain_loop(given, 0.0, STEPS), virtual_run(given, layout, STEPS)
    assert [loss != loss for loss in run.losses] == [False, True, False]
    weights = {name: value for name, value in run.weights.items() if name in plain.after}
    assert weight_difference(weights, plain) < 1e-5


@pytest.mark.parametrize("name", ["a mean", "of classes", "masked"])
@pytest.mark.parametrize("layout", [Layout(), Layout(data=2), Layout(stages=2)], ids=str)
def test_an_evaluation_is_of_the_whole_batch_too(name: str, layout: Layout) -> None:
    """There no weight has a new value, and yet no weight is a constant of the loss."""
    loss = LOSSES[name]
    given = training(loss)
    plan = compiled_evaluation(given, layout).plan
    (actual, *_) = cluster(given, plan).run(1)
    with torch.no_grad():
        expected = loss(seeded(Tagger)(given.batches[0]["tokens"]), given.batches[0])
    assert actual["loss"] == pytest.approx(float(expected), rel=1e-6)


def test_counts_are_summed_once_a_step_before_forward() -> None:
    plan = compiled(training(), Layout(data=2)).plan
    phases = [actor.phase for actor in plan.actors if actor.name.startswith("loss")]
    assert phases[:2] == [COUNT, WEIGHTS]
    boxes = [a for a in plan.actors if a.kind == "box" and a.phase in (FORWARD, WEIGHTS)]
    assert [a.per_step for a in boxes] == [True]  # the count's sum over ranks
    readers = [r for r in plan.registers if r.producer is not None]
    slots = {r.slots for r in readers if plan.actors[r.producer].kind == READER and not r.per_step}
    assert slots == {plan.micro_batches + 2}


def test_what_is_not_divided_by_a_count_has_the_plan_that_it_had() -> None:
    given = training(lambda output, batch: output.square().mean())
    assert COUNT not in {actor.phase for actor in compiled(given, Layout(data=2)).plan.actors}


def test_a_quotient_that_the_loss_is_not_linear_in_is_noted() -> None:
    given = training(lambda output, batch: mean(output, batch).square())
    plan = compiled(given, Layout()).plan
    assert COUNT not in {actor.phase for actor in plan.actors}
    assert any("averaged as means" in note for note in plan.notes)


def test_the_timeline_of_a_plan_shows_when_targets_are_counted() -> None:
    drawn = timeline(compiled(training(mean, 16), Layout(stages=2)))
    rows = [str(row) for row in drawn.renderables]
    assert rows[1].startswith("stage 1") and "C" in rows[1] and "C targets counted" in rows[-1]
