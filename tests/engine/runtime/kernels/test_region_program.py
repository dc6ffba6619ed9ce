from collections.abc import Iterator

import pytest
import torch

from flowrun.engine.actors.plan import RegionWork
from flowrun.engine.runtime.kernels.cpu import products
from flowrun.engine.runtime.kernels.program import ProgramCall
from flowrun.engine.runtime.kernels.region_program import region_program
from flowrun.engine.runtime.rank.rank import Rank
from support.layouts.grids import Layout, compiled, run_plan, virtual_run
from support.layouts.plain_loop import gpt

GPT = gpt(blocks=1, width=16)
ALONE = Layout()
WEIGHTS = 5  # queries, keys and values in one, what joins heads, two layers, the head
aten = torch.ops.aten
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN"
)


def lines(micro_batches: int, layout: Layout = ALONE) -> Iterator[ProgramCall]:
    plan = compiled(gpt(blocks=1, width=16, micro_batches=micro_batches), layout).plan
    for actor in plan.actors:
        if isinstance(actor.work, RegionWork):
            yield from region_program(plan, actor.work, 0).lines


def loose(found: Iterator[ProgramCall]) -> int:
    """Products whose result may lie in any order."""
    return [line.call.function for line in found if line.any_stride].count(aten.mm.default)


def test_gradients_of_weights_are_only_added_up_where_a_step_has_micro_batches() -> None:
    assert loose(lines(4)) == WEIGHTS
    assert not loose(lines(1))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_of_weights_are_only_sent_where_ranks_sum_those_of_one_micro_batch(
    zero: int,
) -> None:
    assert loose(lines(1, Layout(data=2, zero=zero))) == WEIGHTS


@needs_onednn
def test_what_is_added_up_as_it_comes_lies_row_by_row_when_the_sum_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts: list[bool] = []
    sums: list[bool] = []
    store = Rank.store

    def watched(self: Rank, actor: object, act: int, made: object) -> None:
        store(self, actor, act, made)  # type: ignore[arg-type]
        for port in self.bindings[actor.id].filled:  # type: ignore[attr-defined]
            if port.every > 1:
                version, part = divmod(act, port.every)
                done = part == port.every - 1
                found = (x.is_contiguous() for x in port.ring.versions[version])
                (sums if done else parts).extend(found)

    monkeypatch.setattr(Rank, "store", watched)
    monkeypatch.setattr(products, "rule", lambda: products.ProductRule(1, 1.0))
    found = virtual_run(GPT, Layout())
    assert not all(parts) and all(sums)
    monkeypatch.setattr(products, "rule", lambda: None)
    assert found.losses == pytest.approx(virtual_run(GPT, Layout()).losses, rel=1e-5)


@needs_onednn
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_what_is_sent_as_it_comes_trains_alike(
    zero: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, layout = (
        gpt(blocks=1, width=16, micro_batches=micro_batches),
        Layout(data=2, zero=zero),
    )
    expected = virtual_run(training, layout).losses
    monkeypatch.setattr(products, "rule", lambda: products.ProductRule(1, 1.0))
    found = run_plan(training, compiled(training, layout).plan, len(expected)).losses
    assert found == pytest.approx(expected, rel=1e-5)
