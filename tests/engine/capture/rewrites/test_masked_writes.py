from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flowrun.engine.capture.capture import capture
from flowrun.engine.ops.shapes.index import PUT_UNDER_MASK
from support.layouts.grids import example, task
from support.nets.odd_models import Net, trains_of


def of_elements(z: Tensor) -> None:
    z[z < 0.05] = 0


def of_rows(z: Tensor) -> None:
    z[z.mean(1) > 0] = 0.5


def of_columns(z: Tensor) -> None:
    z[:, torch.arange(z.shape[1]) % 2 == 0] = z.mean(1, keepdim=True).detach()


def added(z: Tensor) -> None:
    z.index_put_((z > 0,), torch.tensor(0.25), accumulate=True)


@pytest.mark.parametrize("write", [of_elements, of_rows, of_columns, added])
def test_no_mask_is_left_among_positions(write: Callable[[Tensor], None]) -> None:
    """That they train as plain torch does, tests/behaviour/nets/test_compositions.py shows."""

    class Masked(Net):
        def between(self, z: Tensor) -> Tensor:
            z = z * 1.0
            write(z)
            return z

    training = trains_of(Masked)
    targets = [op.target for op in capture(task(training), example(training)).ops]
    chosen = {"aten.where.self", "aten.masked_fill.Scalar"}  # the second from torch 2.15 on
    assert chosen & {*targets}
    assert not {"aten.index_put.default", PUT_UNDER_MASK} & {*targets}
