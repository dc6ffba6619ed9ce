from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrun.engine.errors import RecipeError, RunError
from flowrun.engine.ops.flow.ranges import CHECK, OutOfRange, check_range
from support.layouts.grids import FIVE, Layout, compiled, virtual_run
from support.layouts.plain_loop import MOMENTUM, Batch, Training, pins, seeded

ROWS, CLASSES, SAMPLES, LENGTH = 12, 8, 8, 4
Loss = Callable[[Tensor, Batch], Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.relu(self.embed(tokens)))


def entropy(output: Tensor, batch: Batch, **settings: object) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten(), **settings)


def mean(output: Tensor, batch: Batch) -> Tensor:
    return entropy(output, batch)


TABLE = torch.linspace(0.0, 1.0, CLASSES)
LOSSES: dict[str, Loss] = {
    "a mean": mean,
    "summed": partial(entropy, reduction="sum"),
    "unreduced": lambda o, b: entropy(o, b, reduction="none").mean(),
    "smoothed": partial(entropy, label_smoothing=0.1),
    "of classes": partial(entropy, weight=torch.linspace(0.5, 1.0, CLASSES)),
    "likelihood": lambda o, b: F.nll_loss(
        F.log_softmax(o.flatten(0, 1), -1), b["targets"].flatten()
    ),
    "gathered": lambda o, b: -o.log_softmax(-1).gather(-1, b["targets"].unsqueeze(-1)).mean(),
    "selected": lambda o, b: (
        o.mean(-1).flatten() * TABLE.index_select(0, b["targets"].flatten())
    ).mean(),
}


def training(
    loss: Loss = mean, label: int | None = None, token: int | None = None, micro_batches: int = 2
) -> Training:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(ROWS, (SAMPLES, LENGTH), generator=generator)
    targets = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=generator)
    if label is not None:
        targets[6, 1] = label
    if token is not None:
        tokens[6, 2] = token
    return Training(
        partial(seeded, Net),
        {"tokens": "tokens"},
        loss,
        ({"tokens": tokens, "targets": targets},),
        MOMENTUM,
        micro_batches,
        pins({"embed.weight": 0, "head.weight": 0, "head.bias": 0}),
    )


@pytest.mark.parametrize("label", [CLASSES, -1, 100_000])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_label_out_of_range_is_an_error(loss: Loss, label: int) -> None:
    with pytest.raises(RunError, match=f"{label} is out of range for 8 .*field targets"):
        virtual_run(training(loss, label), Layout(), 1)


@pytest.mark.parametrize("layout", [*FIVE[1:], Layout(data=2, tensor=2)], ids=str)
def test_so_it_is_in_every_layout(layout: Layout) -> None:
    row = "row 2 of micro-batch 1, step 0: "
    with pytest.raises(RunError, match=f"{row}label 8 is out of range for 8 classes"):
        virtual_run(training(label=CLASSES), layout, 1)
    with pytest.raises(RunError, match=f"{row}id 12 is out of range for 12 rows of a table"):
        virtual_run(training(token=ROWS), layout, 1)


def test_the_ignored_label_is_none() -> None:
    (loss,) = virtual_run(training(label=-100), Layout(), 1).losses
    assert loss > 0
    other = partial(entropy, ignore_index=-1)
    (loss,) = virtual_run(training(other, label=-1), Layout(), 1).losses
    assert loss > 0
    with pytest.raises(RunError, match="label -100 is out of range"):
        virtual_run(training(other, label=-100), Layout(), 1)


def test_ids_that_the_model_makes_are_checked_where_a_split_table_would_hide_them() -> None:
    class Offset(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            shift = (self.head.bias.sum() > -1e9).long() * 7  # of weights: no field of the batch
            return self.head(torch.relu(self.embed(tokens + shift)))

    given = replace(training(), model=partial(seeded, Offset))
    with pytest.raises(RunError, match="out of range for 12 rows"):
        virtual_run(given, Layout(tensor=2), 1)


@pytest.mark.parametrize("first", [0, 9], ids=["", "shifted"])
def test_samples_longer_than_the_positions_are_refused(first: int) -> None:
    class Positions(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            positions = torch.arange(tokens.shape[1] * (1 if first else 4))[None] + first
            return super().forward(tokens) + self.head(self.embed(positions)).mean(1, True)

    given = replace(training(), model=partial(seeded, Positions))
    with pytest.raises(RecipeError, match=r"up position (12|15) in embed.weight, which has 12"):
        compiled(given, Layout())


def test_each_look_up_is_checked_once_and_takes_no_register() -> None:
    plan = compiled(training(), Layout()).plan
    checks = [op for op in plan.graph.ops if op.target == CHECK]
    assert [op.args[-1] for op in checks] == [("tokens",), ("targets",)]
    assert not any("checked" in name for r in plan.registers for name in r.tensors)


def test_negative_indices_may_count_from_the_end() -> None:
    ids = torch.tensor([-3, 2])
    assert check_range(ids, 3, None, True, ("index", "elements"), ()) is ids
    with pytest.raises(OutOfRange, match="index -3 is out of range for 3 elements"):
        check_range(ids, 3, None, False, ("index", "elements"), ())
