from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.capture.capture import Task, capture
from flowrun.engine.capture.rewrites.strided_views import walk
from flowrun.engine.errors import RecipeError


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


def beside(x: Tensor) -> Tensor:
    """Memory of the first sample, whatever there are."""
    return x[1:].as_strided((len(x), 4), (0, 1), 0)


def targets(read: Callable[[Tensor], Tensor]) -> set[str]:
    net = Task(Net(read), {"images": "images"}, lambda output, batch: output.square().mean())
    return {op.target for op in capture(net, {"images": torch.ones(4, 3, 4, 4)}).ops}


@pytest.mark.parametrize("read", [pooled, in_order])
def test_a_read_of_elements_in_their_order_is_a_view(read: Callable[[Tensor], Tensor]) -> None:
    """That these and others train as plain torch does, test_compositions.py shows."""
    assert not [target for target in targets(read) if "as_strided" in target]


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
