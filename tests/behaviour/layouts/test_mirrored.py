"""The mirrored view: each rank its own batch, held beside a model on every rank by hand.

Losses within 1e-5 relative, weights and running statistics within 1e-5: float32 sums in another
order.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from torch import nn

from flowrun.engine.actors.plan import BoxWork
from flowrun.engine.compile import Compilation, Rehearsed
from flowrun.engine.errors import RecipeError
from support.layouts.grids import Layout, cluster, example, initial, strategy, task, weights_of
from support.layouts.plain_loop import Training, classifier, plain_evaluation, torch_optimizer
from support.nets.normed_net import NORMED

STEPS = 3


def _dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 12), nn.Dropout(0.4), nn.Linear(12, 10))


DROPPED = classifier(_dropping, "input", (), micro_batches=2)


@dataclass(frozen=True)
class Replicas:
    """losses: of each step, by rank.  models: one a rank, after training."""

    losses: tuple[tuple[float, ...], ...]
    models: tuple[nn.Module, ...]


@lru_cache
def replicas(training: Training, ranks: int) -> Replicas:
    """A model on every rank, and the average of their gradients: what torch's DDP does."""
    models = [training.model().train() for _ in range(ranks)]
    optimizers = [torch_optimizer(training.optimizer, model) for model in models]
    rows = training.micro_batch // ranks
    losses = []
    for step in range(STEPS):
        totals = [0.0] * ranks
        for rank, model in enumerate(models):
            model.zero_grad()
            for k in range(training.micro_batches):
                batch = training.rows(step, k, slice(rank * rows, (rank + 1) * rows))
                loss = training.output_loss(model, batch)[1] / training.micro_batches
                loss.backward()  # type: ignore[no-untyped-call]
                totals[rank] += loss.item()
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([p.grad for p in parameters if p.grad is not None]).mean(0)
            for p in parameters:
                p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(tuple(totals))
    return Replicas(tuple(losses), tuple(models))


def in_float64(training: Training) -> Training:
    """Batch norms of 2 samples multiply roundings of fp32 by hundreds."""
    batches = tuple(
        {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}
        for batch in training.batches
    )
    return replace(training, model=lambda: training.model().double(), batches=batches)


WIDE = in_float64(NORMED)


@lru_cache
def mirrored(layout: Layout, training: Training = NORMED) -> Rehearsed:
    view = replace(strategy(training, layout), mirrored=True)
    return Compilation(task(training), example(training), view).training


LAYOUTS = [Layout(data=2), Layout(data=4), Layout(data=2, zero=2), Layout(data=2, zero=3)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_trains_on_a_batch_of_its_own(layout: Layout) -> None:
    expected = replicas(WIDE, layout.data)
    ranks = cluster(WIDE, mirrored(layout, WIDE).plan)
    results = ranks.run(STEPS)
    for found, losses in zip(results, expected.losses, strict=True):
        assert found["loss_by_rank"] == pytest.approx(losses, rel=1e-5)
        assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    first, found = expected.models[0].state_dict(), weights_of(ranks)
    for v in ranks.plan.graph.variables:
        if v.name in found:
            torch.testing.assert_close(found[v.name], first[v.name], rtol=1e-5, atol=1e-5)
        if v.kind == "buffer":
            for rank, model in enumerate(expected.models):
                here = ranks.ranks[rank].variables[v.tensor]
                torch.testing.assert_close(here, model.state_dict()[v.name], rtol=1e-5, atol=1e-5)


def test_statistics_of_a_rank_are_not_those_of_the_whole_batch() -> None:
    whole = replicas(NORMED, 1)
    apart = replicas(NORMED, 2)
    assert sum(apart.losses[0]) / 2 != pytest.approx(whole.losses[0][0], rel=1e-4)


def test_only_gradients_and_results_travel() -> None:
    plan = mirrored(Layout(data=2)).plan
    works = [actor.work for actor in plan.actors if isinstance(actor.work, BoxWork)]
    moved = {move.read for work in works for move in work.moves}
    assert moved
    assert all(name.startswith(("grad/", "loss")) for name in moved), moved


def test_gradients_travel_from_the_act_that_makes_them() -> None:
    """A region that only hands gradients on would hold them all until backward has ended."""
    graph = mirrored(Layout(data=2)).plan.graph
    place = {op.name: k for k, op in enumerate(graph.ops)}
    shared = [op for op in graph.ops if op.target == "flow.share"]
    assert shared
    for op in shared:
        between = graph.ops[place[graph.producer[op.inputs[0]].name] + 1 : place[op.name]]
        assert all(x.target in ("flow.share", "flow.accumulate") for x in between), op


def test_ranks_draw_apart() -> None:
    plan = mirrored(Layout(data=2), DROPPED).plan
    once, again = (cluster(DROPPED, plan).run(STEPS) for _ in range(2))
    assert once == again
    images = {name: value[:1].expand_as(value) for name, value in DROPPED.batches[0].items()}
    alike = replace(DROPPED, batches=(images,) * STEPS)
    one, other = cluster(alike, plan).run(1)[0]["loss_by_rank"]
    assert one != other, "samples and weights are the same"


def test_evaluation_has_results_of_each_rank() -> None:
    layout = Layout(data=2)
    view = replace(strategy(NORMED, layout), mirrored=True)
    made = Compilation(task(NORMED), example(NORMED), view)
    plan = made.evaluation(made.capture_evaluation()).plan
    (found,) = cluster(NORMED, plan).run(1)
    assert set(found) == {"loss", "loss_by_rank", "accuracy", "accuracy_by_rank"}
    plain = plain_evaluation(NORMED, initial(NORMED), 1)[0]
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert sum(found["accuracy_by_rank"]) / 2 == pytest.approx(plain["accuracy"])


def test_samples_that_do_not_divide_are_refused() -> None:
    said = r"8 samples cannot be divided over 3 ranks, data 3"
    with pytest.raises(RecipeError, match=said) as error:
        mirrored(Layout(data=3))
    assert error.value.where == "train.batch_size"
