from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flowrun.engine.capture.capture import capture
from flowrun.engine.ops.shapes.index import PUT_UNDER_MASK
from support.layouts.grids import Layout, example, task
from support.nets.odd_models import DATA, STAGES, TENSOR, Net, assert_trains_alike, trains_of


def _of_elements(z: Tensor) -> Tensor:
    z = z * 1.0
    z[z < 0.05] = 0
    return z


def _of_rows(z: Tensor) -> Tensor:
    z = torch.tanh(z) * 1.0
    z[z.mean(1) > 0] = 0.5
    return z


def _of_columns(z: Tensor) -> Tensor:
    z = z.clone()
    z[:, torch.arange(z.shape[1]) % 2 == 0] = z.mean(1, keepdim=True).detach()
    return z


def _with_a_row(z: Tensor) -> Tensor:
    z = z.clone()
    z[z.sum(1) > 0] = z.mean(0).detach()
    return z


def _added(z: Tensor) -> Tensor:
    return z.index_put((z > 0,), torch.tensor(0.25), accumulate=True)


def _chain(z: Tensor) -> Tensor:
    z = z * 1.0
    z[z < -0.5] = -0.5
    z += 1
    z[z > 1.5] = 1.5
    z[:, 2:5] = 0
    z.mul_(2).clamp_(max=2.5)
    z[:, 0] = z[:, 1]
    return z


def _filled(z: Tensor) -> Tensor:
    filled = z.masked_fill(z < 0, 0.1)
    scattered = filled.masked_scatter(filled > 0.4, torch.ones_like(z))
    return torch.where(z > 0.2, z, scattered) + F.relu(z, inplace=False)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "elements": _of_elements,
    "rows": _of_rows,
    "columns": _of_columns,
    "a row for each": _with_a_row,
    "added": _added,
    "a chain": _chain,
    "other functions": _filled,
}
BOTH = Layout(data=2, stages=2)


def _net(kind: str) -> type[Net]:
    class Masked(Net):
        def between(self, z: Tensor) -> Tensor:
            return KINDS[kind](z)

    return Masked


TRAINED = [
    *((kind, TENSOR) for kind in KINDS),
    ("elements", STAGES),
    ("rows", DATA),
    ("a chain", BOTH),
]


@pytest.mark.parametrize(("kind", "layout"), TRAINED, ids=str)
def test_an_assignment_under_a_mask_trains_as_plain_torch(kind: str, layout: Layout) -> None:
    assert_trains_alike(trains_of(_net(kind)), layout)


@pytest.mark.parametrize("kind", ["elements", "rows", "columns", "added"])
def test_no_mask_is_left_among_positions(kind: str) -> None:
    training = trains_of(_net(kind))
    graph = capture(task(training), example(training))
    targets = [op.target for op in graph.ops]
    assert "aten.where.self" in targets
    assert not {"aten.index_put.default", PUT_UNDER_MASK} & {*targets}
