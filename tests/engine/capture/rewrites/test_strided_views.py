from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.capture.capture import Task, capture
from flowrun.engine.capture.rewrites.strided_views import walk
from flowrun.engine.errors import RecipeError
from support.layouts.grids import Layout, virtual_run
from support.layouts.plain_loop import MOMENTUM, Training, loss_difference, plain_loop, seeded


class Net(nn.Module):
    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.LazyLinear(5)
        self.read = read
        self(torch.zeros(2, 3, 4, 4))

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.read(self.first(images)).flatten(1))  # type: ignore[no-any-return]


def pooled(x: Tensor) -> Tensor:
    """To one pixel, of a channels-last image: torch sets the strides of what comes out."""
    return nn.functional.adaptive_avg_pool2d(x.to(memory_format=torch.channels_last), 1)


def in_order(x: Tensor) -> Tensor:
    """The elements as they lie, in another shape."""
    return x.contiguous().as_strided((len(x), 8, 8), (64, 8, 1))


def framed(x: Tensor) -> Tensor:
    """Every other row of pixels of each sample."""
    return x.contiguous().as_strided((len(x), 4, 2, 4), (64, 16, 8, 1))


def turned(x: Tensor) -> Tensor:
    there = x.to(memory_format=torch.channels_last)
    return there.as_strided((len(x), 4, 8), (64, 16, 2))


def beside(x: Tensor) -> Tensor:
    """Memory of the first sample, whatever there are."""
    return x[1:].as_strided((len(x), 4), (0, 1), 0)


def training(read: Callable[[Tensor], Tensor]) -> Training:
    result = torch.Generator().manual_seed(5)
    batches = tuple(
        {
            "images": torch.randn(8, 3, 4, 4, generator=result),
            "labels": torch.randint(0, 5, (8,), generator=result),
        }
        for _ in range(2)
    )
    return Training(
        partial(seeded, partial(Net, read)),
        {"images": "images"},
        lambda output, batch: nn.functional.cross_entropy(output, batch["labels"]),
        batches,
        MOMENTUM,
        2,
    )


def targets(read: Callable[[Tensor], Tensor]) -> set[str]:
    given = training(read)
    batch = given.rows(0, 0, slice(0, 4))
    return {op.target for op in capture(Task(given.model(), given.inputs, given.loss), batch).ops}


@pytest.mark.parametrize("read", [pooled, in_order])
def test_a_read_of_elements_in_their_order_is_a_view(read: Callable[[Tensor], Tensor]) -> None:
    assert not [target for target in targets(read) if "as_strided" in target]


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(tensor=2), Layout(stages=2)], ids=str)
@pytest.mark.parametrize("read", [pooled, in_order, framed])
def test_reads_by_strides_train_as_plain_torch(
    read: Callable[[Tensor], Tensor], layout: Layout
) -> None:
    given = training(read)
    run = virtual_run(given, layout, 2)
    assert loss_difference(run.losses, plain_loop(given, 0.0, 2)) <= 1e-6
    assert not [note for note in run.plan.notes if "no signature table" in note]


def test_what_lies_channels_last_is_turned_first() -> None:
    given = training(turned)
    given.model()
    run = virtual_run(given, Layout(data=2), 2)
    assert loss_difference(run.losses, plain_loop(given, 0.0, 2)) <= 1e-6


def test_memory_that_is_not_the_tensors_own_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"as_strided to \(4, 4\) by strides \(0, 1\) does not"):
        targets(beside)


@pytest.mark.parametrize(
    ("size", "stride", "found"),
    [
        ((4, 1, 6), (6, 99, 1), [(24, 1)]),
        ((4, 6), (1, 4), [(4, 1), (6, 4)]),
        ((4, 2, 3), (12, 3, 1), [(4, 12), (6, 1)]),
        ((1, 1), (5, 5), []),
    ],
)
def test_a_walk_joins_what_is_walked_in_one_go(
    size: tuple[int, ...], stride: tuple[int, ...], found: list[tuple[int, int]]
) -> None:
    assert walk(size, stride) == found
