"""engine/runtime/region_program.py: gradients that are only added up may lie as they come."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flowrun.engine.plan import RegionWork
from flowrun.engine.runtime import products
from flowrun.engine.runtime.program import Line
from flowrun.engine.runtime.rank import Rank
from flowrun.engine.runtime.region_program import region_program
from support.layouts import Layout, compiled, virtual_run
from support.plain_loop import gpt

GPT = gpt(blocks=1, width=16)
aten = torch.ops.aten


def lines(micro_batches: int) -> Iterator[Line]:
    plan = compiled(gpt(blocks=1, width=16, micro_batches=micro_batches), Layout()).plan
    for actor in plan.actors:
        if isinstance(actor.work, RegionWork):
            yield from region_program(plan, actor.work, 0, ()).lines


def test_gradients_of_weights_are_only_added_up_where_a_step_has_micro_batches() -> None:
    summed = [line.call.function for line in lines(4) if line.summed]
    weights = 5  # queries, keys and values in one, what joins heads, two layers, the head
    assert summed.count(aten.mm.default) == weights
    assert not any(line.summed for line in lines(1))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
def test_what_is_added_up_as_it_comes_lies_row_by_row_when_the_sum_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts: list[bool] = []
    sums: list[bool] = []
    store = Rank.store

    def watched(self: Rank, actor: object, act: int, made: object) -> None:
        store(self, actor, act, made)  # type: ignore[arg-type]
        for port in self.filled[actor.id]:  # type: ignore[attr-defined]
            if port.every > 1:
                version, part = divmod(act, port.every)
                done = part == port.every - 1
                found = (x.is_contiguous() for x in port.ring.versions[version])
                (sums if done else parts).extend(found)

    monkeypatch.setattr(Rank, "store", watched)
    monkeypatch.setattr(products, "rule", lambda: products.Rule(1, 1.0))
    found = virtual_run(GPT, Layout())
    assert not all(parts) and all(sums)
    monkeypatch.setattr(products, "rule", lambda: None)
    assert found.losses == pytest.approx(virtual_run(GPT, Layout()).losses, rel=1e-5)
