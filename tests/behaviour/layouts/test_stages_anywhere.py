"""Models of any shape cut into stages by foreseen time, beside plain torch; evaluation follows."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.runtime.drivers.virtual import VirtualCluster
from support.layouts.grids import (
    LOSS_TOLERANCE,
    Layout,
    assert_as_plain_torch,
    compiled,
    compiled_evaluation,
    initial,
    virtual_run,
)
from support.layouts.plain_loop import (
    VOCABULARY,
    Training,
    gpt,
    plain_evaluation,
    plain_loop,
    seeded,
)

STEPS = 4
W = 16


class _Flat(nn.Sequential):
    """No block has a name of its own."""

    def __init__(self) -> None:
        layers = [nn.Embedding(VOCABULARY, W)]
        for _ in range(3):
            layers += [nn.Linear(W, 2 * W), nn.GELU(), nn.Linear(2 * W, W), nn.LayerNorm(W)]
        super().__init__(*layers, nn.Linear(W, VOCABULARY))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return super().forward(tokens_BT)


class _OneModule(nn.Module):
    """A net that computes in one module; a rotary table that all of its layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, W) * W**-0.5)
        self.weights = nn.ParameterList(torch.randn(W, W) * W**-0.5 for _ in range(6))
        self.register_buffer("rates", torch.arange(1, W + 1) / W)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        turn = torch.sin(torch.arange(tokens_BT.shape[1])[:, None] * self.rates)
        x = self.table[tokens_BT]
        for weight in self.weights:
            x = x + torch.tanh((x + turn) @ weight)
        return x @ self.table.T


class _EncoderDecoder(nn.Module):
    """What the encoder makes feeds all decoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, W)
        self.encoder = nn.Sequential(*(nn.Linear(W, W) for _ in range(3)))
        self.decoder = nn.ModuleList(nn.Linear(2 * W, W) for _ in range(3))
        self.head = nn.Linear(W, VOCABULARY)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        memory = self.encoder(self.embed(tokens_BT))
        y = self.embed(tokens_BT.flip(1))
        for layer in self.decoder:
            y = y + layer(torch.cat([y, memory], -1)).tanh()
        return self.head(y)


class _Residual(nn.Module):
    """A residual net; its only block is cut between its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, W)
        self.up, self.down = nn.Linear(W, 4 * W), nn.Linear(4 * W, W)
        self.head = nn.Linear(W, VOCABULARY)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT)
        for _ in range(2):  # the block twice: its weights are read on both sides of a cut
            x = x + self.down(self.up(x).relu())
        return self.head(x)


def training(make: type[nn.Module]) -> Training:
    small = gpt(blocks=2, width=16)
    return replace(small, model=partial(seeded, make), pins=())


MODELS = {
    "flat": training(_Flat),
    "one module": training(_OneModule),
    "encoder-decoder": training(_EncoderDecoder),
    "residual": training(_Residual),
}
V_SHAPES = ("v_half", "v_min", "v_zero_bubble")
V_SHAPE = Layout(stages=2, chunks=2, in_flight="v_zero_bubble")
CASES = [
    *((name, Layout(stages=3)) for name in MODELS),
    ("one module", Layout(data=2, stages=2, zero=2)),
    ("encoder-decoder", Layout(data=2, stages=2, zero=3)),
    ("residual", Layout(tensor=2, stages=2)),
    *((name, Layout(stages=2, chunks=2)) for name in MODELS),
    ("flat", Layout(stages=2, chunks=4, in_flight="1f1b")),
    ("one module", Layout(data=2, stages=2, chunks=2, zero=2)),
    ("encoder-decoder", Layout(data=2, stages=2, chunks=2, zero=3)),
    ("residual", Layout(tensor=2, stages=2, chunks=2, clip_norm=0.5)),
    *((name, replace(V_SHAPE, in_flight=v)) for name, v in zip(MODELS, V_SHAPES, strict=False)),
    ("residual", replace(V_SHAPE, data=2, zero=3)),
]


@pytest.mark.parametrize(("name", "layout"), CASES, ids=[f"{n}, {layout}" for n, layout in CASES])
def test_a_model_cut_anywhere_trains_and_evaluates_as_plain_torch(
    name: str, layout: Layout
) -> None:
    model = MODELS[name]
    assert_as_plain_torch(model, virtual_run(model, layout, STEPS), layout.clip_norm)
    weights = {**initial(model), **plain_loop(model, layout.clip_norm, STEPS).after}
    evaluation = compiled_evaluation(model, layout).plan
    (measured,) = VirtualCluster(evaluation, model.rows, weights).run(1)
    (expected,) = plain_evaluation(model, weights, 1)
    assert measured == pytest.approx(expected, rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("layout", [Layout(stages=3), Layout(stages=2, chunks=2), V_SHAPE], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_evaluation_runs_every_op_and_keeps_every_weight_where_training_does(
    name: str, layout: Layout
) -> None:
    plan = compiled(MODELS[name], layout).plan.graph
    found = compiled_evaluation(MODELS[name], layout).plan.graph
    homes = {v.name: v.stage for v in plan.variables}
    assert all(v.stage == homes[v.name] for v in found.variables)
    crossings = [
        sorted((op.args[1], op.stage) for op in graph.ops if op.target == "flow.transfer")
        for graph in (found, plan)
        for graph in [replace(graph, ops=tuple(op for op in graph.ops if op.phase == "forward"))]
    ]
    assert crossings[0] == crossings[1]


def test_a_table_of_constants_is_made_on_every_stage_and_not_sent() -> None:
    graph = compiled(MODELS["one module"], Layout(stages=3)).plan.graph
    turns = [op for op in graph.ops if op.target == "aten.sin.default"]
    assert sorted(op.stage for op in turns) == [0, 1, 2]
    sent = {op.inputs[0] for op in graph.ops if op.target == "flow.transfer"}
    assert not sent & {op.makes[0].partition("@")[0] for op in turns}
