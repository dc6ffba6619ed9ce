import pytest
import torch
from torch import nn

from flowrun.engine.ir.graph import Op
from flowrun.engine.passes.stages.balance_stages import ForwardSequence
from flowrun.launcher.place.repeated_blocks import (
    RepeatedBlocks,
    cut_evenly,
    find_repeated_blocks,
    keep_blocks,
)


class Tower(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.body = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, w) for w in widths)})
        self.last = nn.Sequential(nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        """(B, 4) -> (B, 2)."""
        y_BD = self.first(x_BD)
        for layer in self.body["layers"]:  # type: ignore[attr-defined]
            y_BD = layer(y_BD)
        return self.last(y_BD)  # type: ignore[no-any-return]


def test_the_longest_list_of_equal_modules_is_found() -> None:
    assert find_repeated_blocks(Tower([8] * 5)) == RepeatedBlocks("body.layers", 5)
    expected = RepeatedBlocks("", 3)
    assert find_repeated_blocks(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))) == expected


def test_blocks_that_differ_are_no_equal_blocks() -> None:
    assert find_repeated_blocks(Tower([8, 8, 6])).path != "body.layers"
    assert find_repeated_blocks(nn.Linear(2, 2)).count == 0


def test_a_shorter_model_shares_what_it_keeps_and_leaves_the_whole_alone() -> None:
    model = Tower([8] * 5)
    blocks = find_repeated_blocks(model)
    shorter = keep_blocks(model, blocks, 2)
    kept = dict(shorter.named_parameters())
    expected = {f"body.layers.{k}.{part}" for k in (0, 1) for part in ("weight", "bias")}
    assert {name for name in kept if "layers" in name} == expected
    assert all(kept[name] is value for name, value in model.named_parameters() if name in kept)
    assert len(model.body["layers"]) == 5  # type: ignore[arg-type]
    assert shorter(torch.ones(3, 4)).shape == (3, 2)


@pytest.mark.parametrize(
    ("stages", "blocks"),
    [
        (1, (6,)),
        (2, (3.5, 2.5)),  # 3 and a half with 1 before them, 2 and a half with 3 behind
        (4, (1.5, 2, 2, 0.5)),
        (8, (0.5, 1, 1, 1, 1, 1, 1, -0.5)),  # one of the last three is on the stage before
    ],
)
def test_stages_have_the_blocks_that_the_compiler_cuts(
    stages: int, blocks: tuple[float, ...]
) -> None:
    """Six blocks of two equal pieces, half as much before them, and three pieces behind."""
    modules = ["first", *(f"body.layers.{k}" for k in (0, 0, 1, 1)), "last", "last", "last"]
    pieces = [Op("", "", (), module=module) for module in modules]
    work = [1.0] * len(pieces)
    nothing = (0.0,) * len(pieces)
    line = ForwardSequence(tuple(work), nothing, nothing)
    found = cut_evenly(pieces, line, RepeatedBlocks("body.layers", 6), [1] * stages)
    assert found == pytest.approx(blocks)
    assert sum(found) == pytest.approx(6)


def test_blocks_of_the_model_itself() -> None:
    assert RepeatedBlocks("", 3).of("2.weight") == 2
    assert RepeatedBlocks("", 3).of("loss") is None
