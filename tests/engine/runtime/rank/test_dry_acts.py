from collections import Counter
from functools import partial

import torch

from flowrun.engine.actors.plan import RegionWork
from flowrun.engine.actors.sums import sums_of
from flowrun.engine.runtime.kernels.region_program import regions_of
from flowrun.engine.runtime.rank.dry_acts import act_dry
from flowrun.engine.runtime.rank.readers import Readers
from support.layouts.grids import Layout, compiled
from support.nets.packed import GPT_PACKED

CPU = torch.device("cpu")


def test_each_region_acts_with_and_without_sums_on_what_earlier_ones_made() -> None:
    plan, acts = compiled(GPT_PACKED, Layout(tensor=2, stages=2)).plan, Counter[int]()
    made: set[str] = set()
    fields = Readers(plan=plan, rank=3, batches=GPT_PACKED.rows, device=CPU).read_first()

    def act(actor: int, work: RegionWork, values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        acts[actor] += 1
        for name, value in zip(work.reads, values, strict=False):
            assert (value.dtype == torch.float64) is (name in made)
            assert name not in fields or value is fields[name]
        made.update(work.makes)
        return tuple(torch.ones(2, dtype=torch.float64) for _ in work.makes)

    regions = dict(regions_of(plan, 3))
    act_dry(plan, 3, {k: partial(act, k, work) for k, work in regions.items()}, fields, CPU)
    assert fields and acts == {k: 1 + bool(sums_of(plan, work)) for k, work in regions.items()}
