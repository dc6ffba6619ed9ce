from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch

from flowrun.engine.actors.sums import sums_of
from flowrun.engine.runtime.kernels.kernels import eager_kernels
from flowrun.engine.runtime.kernels.region_program import regions_of
from flowrun.engine.runtime.rank.dry_acts import act_dry
from flowrun.engine.runtime.rank.readers import Readers
from support.layouts.grids import Layout, compiled
from support.nets.packed import GPT_PACKED

CPU = torch.device("cpu")


def test_each_region_acts_with_and_without_sums_of_earlier_micro_batches() -> None:
    plan, acts = compiled(GPT_PACKED, Layout(tensor=2, stages=2)).plan, Counter[int]()
    kernels = eager_kernels(plan, 3, CPU)

    def act(actor: int, values: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        acts[actor] += 1
        return kernels[actor](values)

    fields = Readers(plan=plan, rank=3, batches=GPT_PACKED.rows, device=CPU).read_first()
    assert fields
    counted = {actor: partial(act, actor) for actor in kernels}
    act_dry(plan, 3, counted, fields, CPU)  # type: ignore[arg-type]
    assert acts == {k: 1 + bool(sums_of(plan, work)) for k, work in regions_of(plan, 3)}
    assert set(acts.values()) == {1, 2}
