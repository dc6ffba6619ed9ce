"""A weight that two ends of a model share: one logical tensor, whatever stages read it."""

from dataclasses import replace
from functools import partial

import pytest
from torch import Tensor, nn

from flowrun.engine.ir.graph import UPDATE, WEIGHTS, LogicalGraph, Op
from flowrun.models.gpt import GPT
from support.layouts.grids import CLIP, Layout, assert_as_plain_torch, compiled, virtual_run
from support.layouts.plain_loop import CONTEXT, VOCABULARY, Training, gpt, seeded

TIED = "embed.wte.weight"
STEPS = 6


def _tied() -> nn.Module:
    model = GPT(VOCABULARY, CONTEXT, 2, 2, 16)
    model.head.weight = model.embed.wte.weight
    return model


class _Translator(nn.Module):
    """One table three times: source tokens, target tokens, logits (as T5 does); logits come first
    in the list of parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(16, VOCABULARY, bias=False)
        self.source = nn.Embedding(VOCABULARY, 16)
        self.encoder = nn.Linear(16, 16)
        self.target = nn.Embedding(VOCABULARY, 16)
        self.decoder = nn.Linear(16, 16)
        self.source.weight = self.target.weight = self.logits.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        memory = self.encoder(self.source(tokens_BT)).tanh()
        return self.logits(self.decoder(memory + self.target(tokens_BT.flip(1))).tanh())


SMALL = gpt(blocks=2, width=16)
GPT_TIED = replace(SMALL, model=partial(seeded, _tied))  # head.weight is pinned by its other name
TRANSLATOR = replace(SMALL, model=partial(seeded, _Translator), pins=SMALL.pins[:0])

LAYOUTS = [
    Layout(),
    Layout(tensor=2),
    Layout(stages=2, clip_norm=CLIP),
    Layout(tensor=2, stages=2),
    Layout(stages=3),
    *(Layout(data=2, stages=2, zero=zero) for zero in (0, 1, 2, 3)),
    Layout(grids=((2, 1), (1, 1)), zero=2),
]


CASES = [
    *((GPT_TIED, layout) for layout in LAYOUTS),
    *((TRANSLATOR, layout) for layout in (Layout(), Layout(tensor=2, stages=2), Layout(stages=3))),
]


@pytest.mark.parametrize(
    ("training", "layout"),
    CASES,
    ids=[f"{'gpt' if t is GPT_TIED else 'translator'} {layout}" for t, layout in CASES],
)
def test_tied_weights_train_as_in_plain_torch(training: Training, layout: Layout) -> None:
    assert_as_plain_torch(training, virtual_run(training, layout, STEPS), layout.clip_norm)


def _moves(graph: LogicalGraph) -> list[Op]:
    """Crossings of the tied weight and of its gradient."""
    return [op for op in graph.ops if op.target == "flow.transfer" and TIED in op.inputs[0]]


@pytest.mark.parametrize("layout", LAYOUTS[2:], ids=str)
def test_the_weight_and_its_gradient_cross_once_a_step_each(layout: Layout) -> None:
    graph = compiled(GPT_TIED, layout).plan.graph
    there, back = _moves(graph)
    assert (there.phase, back.phase) == (WEIGHTS, UPDATE)
    last = len(layout.placements) - 1
    assert (there.args[1], there.stage) == (0, last)
    assert (back.args[1], back.stage) == (last, 0)
    states = [v for v in graph.variables if v.of == TIED]
    assert {v.stage for v in states} == {0}, "one home: states and update are there alone"


def test_parts_of_the_gradient_are_summed_on_each_stage_before_they_cross() -> None:
    graph = compiled(GPT_TIED, Layout(stages=3)).plan.graph
    (total,) = (op for op in graph.ops if op.name == f"grad/{TIED}")
    parts = [op for op in graph.ops if op.name in (f"grad@0/{TIED}", f"grad@2/{TIED}")]
    assert (total.target, total.phase, total.stage) == ("flow.add_n", UPDATE, 0)
    assert sorted(op.stage for op in parts) == [0, 2]
    assert {op.target for op in parts} == {"flow.accumulate"}


def test_one_weight_split_by_rows_serves_embedding_and_head_without_moving() -> None:
    graph = compiled(GPT_TIED, Layout(tensor=2)).plan.graph
    (weight,) = (v for v in graph.variables if v.name == TIED)
    assert [str(sbp) for sbp in weight.nd_sbp] == ["S(0)"]
    moved = [op for op in graph.ops if op.target == "flow.box" and op.args[1].moves]
    assert not [op for op in moved if TIED in op.inputs[0]]


def test_under_zero_3_the_weight_crosses_sharded_and_is_gathered_behind() -> None:
    graph = compiled(GPT_TIED, Layout(data=2, stages=2, zero=3)).plan.graph
    crossing = _moves(graph)[0]
    assert [str(sbp) for sbp in crossing.out_sbp[0]] == ["S(0)"]
    gathers = [op for op in graph.consumers[crossing.makes[0]]]
    assert sorted(op.phase for op in gathers) == ["backward", "forward"]
