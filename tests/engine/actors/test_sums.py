from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from flowrun.engine.actors.plan import Actor, Plan, RegionWork
from flowrun.engine.actors.sums import find_reused_addends, find_unordered_results, sums_of
from flowrun.engine.cost.footprint import Footprint
from flowrun.engine.ops.flow.update import accumulate
from flowrun.engine.runtime.kernels import region_program
from support.layouts.grids import Layout, compiled, run_plan
from support.layouts.plain_loop import gpt

GPT = gpt(blocks=1, width=16)


def regions(plan: Plan) -> Iterator[tuple[Actor, RegionWork]]:
    """Those that add something up."""
    for actor in plan.actors:
        if isinstance(actor.work, RegionWork) and sums_of(plan, actor.work):
            yield actor, actor.work


def test_a_sum_begins_as_a_copy_unless_the_first_addend_is_its_own() -> None:
    first, second = torch.ones(3), torch.full((3,), 2.0)
    copy, same = accumulate(first), accumulate(first, own=True)
    assert same is first and copy is not first and torch.equal(copy, first)
    assert accumulate(second, copy) is copy and copy.tolist() == [3.0] * 3
    assert first.tolist() == [1.0] * 3


def test_one_micro_batch_has_no_sums() -> None:
    plan = compiled(gpt(blocks=1, width=16, micro_batches=1), Layout()).plan
    assert list(regions(plan)) == []


def test_gradients_of_products_become_the_sums() -> None:
    plan = compiled(GPT, Layout()).plan
    products = {
        op.name
        for op in plan.graph.ops
        if op.target == "aten.mm.default"
        and [reader.target for reader in plan.graph.consumers[op.makes[0]]] == ["flow.accumulate"]
    }
    taken = {
        plan.graph.producer[plan.graph.producer[name].inputs[0]].name
        for _, work in regions(plan)
        for name in find_reused_addends(plan, work)
    }
    assert products and products <= taken
    assert products <= {
        name for _, work in regions(plan) for name in find_unordered_results(plan, work)
    }


def test_what_others_have_is_copied() -> None:
    """A result that is kept, or lies in the memory of another tensor."""
    plan = compiled(GPT, Layout()).plan
    for _, work in regions(plan):
        for name in find_reused_addends(plan, work):
            result = plan.graph.producer[plan.graph.producer[name].inputs[0]]
            kept = replace(work, makes=(*work.makes, *result.makes))
            assert name not in find_reused_addends(plan, kept)
        addends = {op.inputs[0] for op in work.ops if op.target == "flow.accumulate"}
        over = replace(work, overwrites=tuple((n, "x") for op in work.ops for n in op.makes))
        assert addends and find_reused_addends(plan, over) == frozenset()


def test_only_the_first_micro_batch_leaves_memory_behind() -> None:
    plan = compiled(GPT, Layout()).plan
    footprint = Footprint(plan, 0)
    for actor, work in regions(plan):
        first, later = (footprint.act(actor, frozenset(), first) for first in (True, False))
        sums = sum(map(footprint.tensor_bytes, sums_of(plan, work)))
        assert first.end - later.end == sums


def test_nothing_is_copied_that_may_be_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[bool] = []

    def watched(
        x: torch.Tensor, before: torch.Tensor | None = None, *, own: bool = False
    ) -> torch.Tensor:
        result = accumulate(x, before, own=own)
        if before is None:
            copied.append(result is not x)
            assert (result is x) == own
        return result

    plan = compiled(GPT, Layout()).plan
    steps = len(GPT.batches)
    monkeypatch.setattr(region_program, "accumulate", watched)
    run_plan(GPT, plan, steps)
    assert copied.count(False) == steps * sum(
        len(find_reused_addends(plan, w)) for _, w in regions(plan)
    )
