from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrun.engine.capture import capture as capturing
from flowrun.engine.capture.capture import Task, capture, capture_evaluation
from flowrun.engine.capture.fold import Fold
from flowrun.engine.capture.parts import UnlikeError
from flowrun.engine.capture.patches.alike_blocks import KEPT_BLOCKS
from flowrun.engine.capture.unfold import unfold
from flowrun.engine.ir.graph import BACKWARD, FORWARD, LogicalGraph
from flowrun.models.gpt import GPT
from flowrun.models.llama import Llama
from support.checks.thorough import few

BATCH = {"x": torch.zeros(2, 8, dtype=torch.long), "y": torch.zeros(2, 8, dtype=torch.long)}
BLOCKS = 8


class Layer(nn.Module):
    """Adds to a stream; scale: a number in its code."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.norm = nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, 8)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = self.norm(x_BTD.transpose(1, 2)).transpose(1, 2)
        return x_BTD + self.scale * F.gelu(self.fc(y_BTD))


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(layers)

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.embed(x_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return x_BTD @ self.embed.weight.t()


class Remembering(Stack):
    """The mean of all layers, not the last, makes the logits."""

    def forward(self, x_BT: Tensor) -> Tensor:
        all_BTD = [self.embed(x_BT)]
        for layer in self.layers:
            all_BTD.append(layer(all_BTD[-1]))
        return torch.stack(all_BTD).mean(0) @ self.embed.weight.t()


class Turning(Stack):
    """The code of its loop counts: one layer of many has another number."""

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.embed(x_BT)
        for k, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD) * (2.0 if k == 4 else 3.0)
        return x_BTD @ self.embed.weight.t()


class Decoder(nn.Module):
    """Reads the stream, what the encoder made, and a bias that all layers share, as T5's do."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.fc = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 8, bias=False)

    def forward(self, x_BTD: Tensor, read_BSD: Tensor, bias_TS: Tensor) -> Tensor:
        k_BSD, v_BSD = self.kv(read_BSD).chunk(2, -1)
        y_BTD = F.softmax(self.q(x_BTD) @ k_BSD.transpose(1, 2) + bias_TS, -1) @ v_BSD
        return x_BTD + F.dropout(self.fc(y_BTD[..., :8]), 0.1, self.training)


class EncoderDecoder(nn.Module):
    """Two lists of layers; a bias made in the first step of each is read by all, the encoder's
    output by every layer of the decoder.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.bias = nn.Embedding(8, 8)
        self.encoder = nn.ModuleList(Decoder() for _ in range(BLOCKS))
        self.decoder = nn.ModuleList(Decoder() for _ in range(BLOCKS))

    def forward(self, x_BT: Tensor) -> Tensor:
        bias_TS = self.bias(torch.arange(8))
        x_BTD = self.embed(x_BT)
        for layer in self.encoder:
            x_BTD = layer(x_BTD, x_BTD, bias_TS)
        y_BTD = self.embed(x_BT.flip(1))
        for layer in self.decoder:
            y_BTD = layer(y_BTD, x_BTD, bias_TS)
        return y_BTD @ self.embed.weight.t()


def shared() -> nn.Module:
    layers = [Layer() for _ in range(BLOCKS)]
    for layer in layers[1:]:
        layer.fc.weight = layers[0].fc.weight
    return Stack([*layers])


def task_of(model: nn.Module) -> Task:
    argument, *_ = model.forward.__annotations__
    return Task(
        model, {argument: "x"}, lambda out, b: F.cross_entropy(out.flatten(0, 1), b["y"].flatten())
    )


def folds_of(monkeypatch: pytest.MonkeyPatch) -> list[Fold]:
    """What is folded from now on."""
    actual: list[Fold] = []
    real = capturing.fold

    def spy(*args: object) -> tuple[Fold, ...]:
        folds = real(*args)  # type: ignore[arg-type]
        actual.extend(folds)
        return folds

    monkeypatch.setattr(capturing, "fold", spy)
    return actual


def whole(task: Task, monkeypatch: pytest.MonkeyPatch, *, train: bool = True) -> LogicalGraph:
    with monkeypatch.context() as patch:
        patch.setattr(capturing, "fold", lambda *_: ())
        patch.setattr(capturing, "find_runs", lambda _: ())
        return (capture if train else capture_evaluation)(task, BATCH)


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrun.engine.capture.fold.MIN_BLOCKS", KEPT_BLOCKS + 1)
    monkeypatch.setattr("flowrun.engine.capture.patches.alike_blocks.MIN_BLOCKS", KEPT_BLOCKS + 1)


MODELS: dict[str, tuple[Callable[[], nn.Module], list[Fold]]] = {
    "gpt": (lambda: GPT(16, 8, BLOCKS, 2, 8, dropout=0.1, tied=True), [Fold("blocks", 1, 2)]),
    "llama": (lambda: Llama(16, BLOCKS, 2, 1, 8, 16), [Fold("blocks", 1, 2)]),
    "encoder and decoder": (EncoderDecoder, [Fold("encoder", 1, 2), Fold("decoder", 1, 2)]),
    "running statistics": (lambda: Stack([Layer() for _ in range(BLOCKS)]), [Fold("layers", 1, 2)]),
    "a shared weight": (shared, [Fold("layers", 1, 2)]),
    "one layer is unlike": (
        lambda: Stack([Layer(2.0 if k == 1 else 1.0) for k in range(BLOCKS + 1)]),
        [Fold("layers", 2, 2)],
    ),
    "one turn is unlike": (lambda: Turning([Layer() for _ in range(12)]), [Fold("layers", 5, 2)]),
    "all layers are read": (lambda: Remembering([Layer() for _ in range(BLOCKS)]), []),
}
OF_A_KIND = ("llama", "running statistics")  # with others


@pytest.mark.parametrize("name", few(MODELS, but=OF_A_KIND))
def test_blocks_captured_once_are_as_if_each_were(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, expected = MODELS[name]
    task = task_of(make())
    direct, actual = whole(task, monkeypatch), folds_of(monkeypatch)
    graph = capture(task, BATCH)
    assert actual == expected
    assert graph == direct
    assert list(graph.tensors) == list(direct.tensors)
    assert moments(graph) == moments(direct)


def moments(graph: LogicalGraph) -> list[int]:
    """Numbers of autograd's nodes, from the first."""
    first = next(op.moment for op in graph.ops if op.moment >= 0)
    return [op.moment - first if op.moment >= 0 else -1 for op in graph.ops]


def test_evaluation_too(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(Stack([Layer() for _ in range(BLOCKS)]))
    direct, actual = whole(task, monkeypatch, train=False), folds_of(monkeypatch)
    assert capture_evaluation(task, BATCH) == direct
    assert actual == [Fold("layers", 1, 2)]


def test_few_equal_blocks_are_captured_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = folds_of(monkeypatch)
    capture(task_of(Stack([Layer() for _ in range(KEPT_BLOCKS + 2)])), BATCH)
    assert not actual


def test_blocks_that_autograd_treats_unlike_are_captured_one_by_one_and_a_note_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = task_of(Stack([Layer() for _ in range(BLOCKS)]))
    direct = whole(task, monkeypatch)

    def refuse(graph: LogicalGraph, fold: Fold) -> LogicalGraph:
        raise UnlikeError("%a is unlike %b")

    monkeypatch.setattr(capturing, "unfold", refuse)
    graph = capture(task, BATCH)
    assert graph == direct
    assert graph.notes == ("equal blocks are captured one by one: %a is unlike %b",)


@pytest.fixture(scope="module")
def folded() -> LogicalGraph:
    """Of a stack, with two of its blocks left out."""
    taken: list[LogicalGraph] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowrun.engine.capture.fold.MIN_BLOCKS", KEPT_BLOCKS + 1)
        patch.setattr(capturing, "unfold", lambda graph, _: taken.append(graph) or graph)
        capture(task_of(Stack([Layer() for _ in range(BLOCKS)])), BATCH)
    return taken[0]


@pytest.mark.parametrize("phase", [FORWARD, BACKWARD])
def test_ops_that_differ_between_two_blocks_are_refused(folded: LogicalGraph, phase: str) -> None:
    at = next(
        k
        for k, op in enumerate(folded.ops)
        if op.phase == phase and op.module == "layers.2" and "gelu" in op.target
    )
    other = replace(folded.ops[at], kwargs=(("approximate", "tanh"),))
    ops = (*folded.ops[:at], other, *folded.ops[at + 1 :])
    with pytest.raises(UnlikeError, match="is unlike"):
        unfold(replace(folded, ops=ops), Fold("layers", 1, 2))


def test_an_op_that_reads_what_may_be_of_any_block_is_refused(folded: LogicalGraph) -> None:
    result = next(op for op in folded.ops if op.module == "layers.3" and "gelu" in op.target)
    last = replace(folded.ops[-1], name="last", args=(result.args[0],), outputs=())
    with pytest.raises(UnlikeError, match="any of the equal blocks"):
        unfold(replace(folded, ops=(*folded.ops, last)), Fold("layers", 1, 2))
