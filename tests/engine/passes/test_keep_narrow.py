"""Weights that are kept in bf16 are read as they are where the model computes in bf16."""

from dataclasses import replace

import torch

from flowrun.engine.ir.graph import STAGED, LogicalGraph
from flowrun.engine.pipeline import advance
from flowrun.engine.strategy import Kept
from support.layouts.grids import Layout, captured, strategy
from support.layouts.plain_loop import Training, gpt

TRAINING = gpt(1, 16)
NARROW = replace(TRAINING, autocast=torch.bfloat16)


def staged(training: Training, kept: Kept, layout: Layout | None = None) -> LogicalGraph:
    asked = replace(strategy(training, layout or Layout()), kept=kept)
    return advance(captured(training), asked, STAGED)


def readers(graph: LogicalGraph, name: str) -> list[str]:
    (variable,) = (v for v in graph.variables if v.name == name)
    return sorted({op.target for op in graph.consumers[variable.tensor]})


def test_autocast_reads_a_narrow_weight_as_it_is() -> None:
    graph = staged(NARROW, Kept(weights=True))
    name = "blocks.0.mlp.fc1.weight"
    assert graph.tensors[name].dtype == torch.bfloat16
    before = staged(NARROW, Kept())
    assert readers(before, name) == ["aten._to_copy.default"]
    assert "aten._to_copy.default" not in readers(graph, name)


def test_a_look_up_reads_the_narrow_table() -> None:
    graph = staged(TRAINING, Kept(weights=True))
    assert readers(graph, "embed.wte.weight") == ["aten.embedding.default"]
    (look_up, *_) = graph.consumers["embed.wte.weight"]
    (cast,) = graph.consumers[look_up.makes[0]]
    assert cast.target == "aten._to_copy.default"
    assert graph.tensors[cast.makes[0]].dtype == torch.float32


def test_nothing_changes_where_nothing_is_asked() -> None:
    assert staged(TRAINING, Kept()) == staged(TRAINING, Kept(states=True))
