from dataclasses import replace

import pytest

from flowrun.engine.ir.graph import LogicalGraph
from flowrun.launcher.job.job import Job
from flowrun.launcher.place.repeated_blocks import Captures
from flowrun.launcher.place.resize import resize
from flowrun.launcher.recipe.compose import load
from support.checks.thorough import few

LLAMA = ["recipe=llama3_405b", "model.depth=3", "train.batch_size=64"]
RECIPES = {
    "GPT": ["recipe=gpt_dp"],
    "GPT with dropout": ["recipe=gpt_dp", "+model.dropout=0.1"],
    "BERT in bf16": ["recipe=bert_dp", "precision.dtype=bf16"],
    "Llama": LLAMA,
    "a mixture of experts": ["recipe=moe_ep"],
}


@pytest.mark.parametrize("name", few(RECIPES, ("a mixture of experts",)))
def test_a_graph_of_other_samples_is_the_one_that_would_be_captured(name: str) -> None:
    recipe = RECIPES[name]
    captures = Captures(Job(load(recipe), values=False))
    strategy = captures.job.strategy
    captured = {rows: captures.of(rows, strategy) for rows in (1, 2, 4, 16)}
    small = {rows: captured[rows] for rows in (1, 2, 4)}
    assert resize(16, small) == captured[16]
    assert resize(4, small) == captured[4]


def test_one_sample_and_graphs_of_other_ops_are_not_derived() -> None:
    captures = Captures(Job(load(["recipe=mlp_data_parallel"]), values=False))
    one, two, four = (captures.of(rows, captures.job.strategy) for rows in (1, 2, 4))
    assert resize(1, {2: two, 4: four}) is None
    assert resize(8, {1: one, 4: four}) is None
    fewer: LogicalGraph = replace(four, ops=four.ops[:-1])
    renamed = replace(four, ops=(replace(four.ops[0], target="aten.relu.default"), *four.ops[1:]))
    assert resize(8, {2: two, 4: fewer}) is None
    assert resize(8, {2: two, 4: renamed}) is None
