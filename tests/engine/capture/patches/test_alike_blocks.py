from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrun.engine.capture import capture as capturing
from flowrun.engine.capture.capture import Task, capture
from flowrun.engine.capture.patches.alike_blocks import AbsentBlocks, find_runs
from flowrun.models.gpt import GPT
from flowrun.models.llama import Llama
from support.checks.thorough import few

BATCH = {"x": torch.zeros(2, 8, dtype=torch.long), "y": torch.zeros(2, 8, dtype=torch.long)}
BLOCKS = 13
LEFT_OUT = range(6, BLOCKS - 1)
SEEN: list[int] = []


class Block(nn.Module):
    """Adds to a stream what depends on its state and on what it is called with."""

    def __init__(self, scale: float = 1.0, index: int = 0) -> None:
        super().__init__()
        self.scale, self.index, self.share, self.zero = scale, index, 0.1, 0.0
        self.fc = nn.Linear(8, 8)

    def forward(self, x_BTD: Tensor, shift: Any = 0.0) -> Tensor:
        y_BTD = F.dropout(F.gelu(self.fc(x_BTD)), self.share, self.training)
        return x_BTD + self.scale * y_BTD + shift


class Collecting(Block):
    def forward(self, x_BTD: Tensor, shift: Any = 0.0) -> Tensor:
        shift.append(x_BTD.mean())
        return super().forward(x_BTD, shift[0])


class Counting(Block):
    """Reads its place from a list that all blocks change."""

    def forward(self, x_BTD: Tensor, shift: Any = 0.0) -> Tensor:
        SEEN.append(0)
        return super().forward(x_BTD, float(len(SEEN)))


class Paired(Block):
    def forward(self, x_BTD: Tensor, shift: Any = 0.0) -> Any:
        return super().forward(x_BTD), x_BTD.mean()


class Net(nn.Module):
    """around: makes the call of block k."""

    def __init__(self, blocks: list[Any], around: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, 8), nn.ModuleList(blocks)
        self.around = around or (lambda block, x_BTD, k, blocks: block(x_BTD))

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.embed(x_BT)
        for k, block in enumerate(self.blocks):
            x_BTD = self.around(block, x_BTD, k, self.blocks)
        return x_BTD @ self.embed.weight.t()


class Collected(Net):
    """Hands one list through all blocks."""

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD, seen = self.embed(x_BT), [torch.ones(())]
        for block in self.blocks:
            x_BTD = block(x_BTD, seen)
        return x_BTD @ self.embed.weight.t() + torch.stack(seen).sum()


class Twice(Net):
    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.embed(x_BT)
        for block in (*self.blocks, *self.blocks):
            x_BTD = block(x_BTD)
        return x_BTD @ self.embed.weight.t()


def plain(kind: type[Block] = Block) -> list[Any]:
    return [kind() for _ in range(BLOCKS)]


# a model of blocks -> numbers of those that torch does not trace
ALIKE: dict[str, tuple[Callable[[], nn.Module], range]] = {
    "gpt": (lambda: GPT(16, 8, BLOCKS, 2, 8, dropout=0.1, tied=True), LEFT_OUT),
    "llama": (lambda: Llama(16, BLOCKS, 2, 1, 8, 16), LEFT_OUT),
    "called with a number": (lambda: Net(plain(), lambda f, x, k, _: f(x, shift=2.0)), LEFT_OUT),
    "the first ones differ": (lambda: Net([Block(2.0), Block(3.0), *plain()]), range(8, 14)),
}
CALLED_UNLIKE: dict[str, Callable[[], nn.Module]] = {
    "once": lambda: Net(plain(), lambda f, x, k, _: f(x, float(k == 9))),
    "with its number": lambda: Net(plain(), lambda f, x, k, _: f(x, k)),
    "with tensors in turn": lambda: Net(plain(), lambda f, x, k, b: f(x, b[k % 2].fc.bias)),
    "scaled by the loop": lambda: Net(plain(), lambda f, x, k, _: f(x) / (k + 1)),
    "scaled by the number": lambda: Net(plain(), lambda f, x, _, b: f(x) / len(b)),
    "not at all": lambda: Net(plain(), lambda f, x, k, _: x if k == 9 else f(x)),
    "for two results": lambda: Net(plain(kind=Paired), lambda f, x, *_: f(x)[0]),
    "with a list that grows": lambda: Collected(plain(kind=Collecting)),
    "while they count": lambda: Net(plain(kind=Counting)),
    "twice": lambda: Twice(plain()),
}


@pytest.mark.parametrize("name", few(ALIKE, ["called with a number"]))
def test_blocks_that_torch_does_not_trace_are_as_if_it_did(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, expected = ALIKE[name]
    assert traces_both_ways(make(), monkeypatch) == [((AbsentBlocks("blocks", expected),),)]


@pytest.mark.parametrize("name", few(CALLED_UNLIKE, ["once"]))
def test_blocks_that_are_called_unlike_are_all_traced(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CALLED_UNLIKE[name]()
    assert find_runs(model)
    assert traces_both_ways(model, monkeypatch) == [()]


def traces_both_ways(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Hold a capture to that of a trace of all blocks; return what it left out."""
    argument, *_ = model.forward.__annotations__
    task = Task(
        model, {argument: "x"}, lambda out, b: F.cross_entropy(out.flatten(0, 1), b["y"].flatten())
    )
    real, left_out = capturing._trace_blocks, []

    def trace(*given: Any, **how: Any) -> Any:
        traced = real(*given, **how)
        left_out.append(given[3:])
        return traced

    with monkeypatch.context() as patch:
        patch.setattr(capturing, "_trace_blocks", trace)
        SEEN.clear()
        graph = capture(task, BATCH)
    with monkeypatch.context() as patch:
        patch.setattr(capturing, "find_runs", lambda _: ())
        SEEN.clear()
        direct = capture(task, BATCH)
    assert graph == direct
    assert str(graph) == str(direct)
    assert list(graph.tensors) == list(direct.tensors)
    return left_out


def changed(change: Callable[[Any], object]) -> list[Any]:
    blocks = plain()
    change(blocks[9])
    return blocks


UNLIKE: dict[str, Callable[[], list[Any]]] = {
    "an index": lambda: [Block(index=k) for k in range(BLOCKS)],
    "a scale by depth": lambda: [Block((k + 1) ** -0.5) for k in range(BLOCKS)],
    "two kinds in turn": lambda: [(Block, Paired)[k % 2]() for k in range(BLOCKS)],
    "dropout": lambda: changed(lambda block: setattr(block, "share", 0.2)),
    "the sign of zero": lambda: changed(lambda block: setattr(block, "zero", -0.0)),
    "a frozen weight": lambda: changed(lambda block: block.fc.requires_grad_(False)),
    "a width": lambda: changed(lambda block: setattr(block, "fc", nn.Linear(8, 8, bias=False))),
    "evaluation": lambda: changed(lambda block: block.eval()),
    "a hook": lambda: changed(lambda block: block.fc.register_forward_hook(print)),
    "a forward of its own": lambda: changed(lambda block: setattr(block, "forward", abs)),
    "a buffer": lambda: changed(lambda block: block.register_buffer("mask", torch.ones(8))),
    "an object": lambda: changed(lambda block: setattr(block, "zero", object())),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_blocks_that_differ_in_anything_are_traced(name: str) -> None:
    assert find_runs(Net(plain()))
    assert not find_runs(Net(UNLIKE[name]()))


def test_blocks_that_share_a_weight_are_traced() -> None:
    blocks = plain()
    blocks[9].fc.weight = blocks[3].fc.weight
    assert not find_runs(Net(blocks))
