"""Same numbers everywhere, on real gloo processes: layouts of up to 4 ranks, each axis and stage of
ZeRO alone or with others.
"""

from pathlib import Path

import pytest

from support.layouts.gloo import run_on_gloo
from support.layouts.grids import CLIP, LAYOUTS, Layout, Run, assert_as_plain_torch, compiled
from support.layouts.plain_loop import STEPS, TINY_GPT
from support.plans.one_order import in_one_order

pytestmark = pytest.mark.processes

# whose parts others have, on the same processes
OF_A_KIND = {
    "data 2 x clipped",
    "tensor 2 x clipped",
    "data 2 x stages 2 x clipped",
    "data 4 x ZeRO 1 x clipped",
    "data 2 x tensor 2 x clipped",
    "data 2 x tensor 2 x ZeRO 1 x clipped",
    "data 2 x tensor 2 x ZeRO 2 x clipped",
    "data 4 x ZeRO 1 x in shared memory x clipped",
}
FEW_RANKS = [x for x in LAYOUTS if x.num_ranks <= 4 and str(x) not in OF_A_KIND]
ANY_LAYOUT = pytest.mark.parametrize("layout", FEW_RANKS, ids=str)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Every layout, trained on 2 processes or on 4, by its name."""
    out: dict[str, Run] = {}
    for world in (2, 4):
        mine = [x for x in FEW_RANKS if (x.num_ranks > 2) == (world > 2)]
        jobs = {str(layout): (TINY_GPT, compiled(TINY_GPT, layout).plan) for layout in mine}
        folder = tmp_path_factory.mktemp(f"world{world}")
        out.update(run_on_gloo(jobs, world, STEPS, folder))
    return out


@ANY_LAYOUT
def test_processes_train_as_plain_torch(runs: dict[str, Run], layout: Layout) -> None:
    assert_as_plain_torch(TINY_GPT, runs[str(layout)], CLIP)


@ANY_LAYOUT
def test_processes_send_the_bytes_that_the_rehearsal_foresaw(
    runs: dict[str, Run], layout: Layout
) -> None:
    foreseen = compiled(TINY_GPT, layout).rehearsal.sent_bytes
    assert sum(runs[str(layout)].sent_bytes.values()) == foreseen * STEPS


@ANY_LAYOUT
def test_live_versions_never_exceed_the_slots_in_processes(
    runs: dict[str, Run], layout: Layout
) -> None:
    found = runs[str(layout)]
    assert found.most_live
    for (_, register), most in found.most_live.items():
        assert most <= found.plan.registers[register].slots


def test_messages_in_groups_of_their_own_carry_the_same(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    """As they are on CUDA, whose library knows no tags."""
    layouts = [x for x in FEW_RANKS if x.stages == 2 and x.num_ranks == 2]
    plans = {str(layout): in_one_order(compiled(TINY_GPT, layout).plan) for layout in layouts}
    jobs = {name: (TINY_GPT, plan) for name, plan in plans.items()}
    found = run_on_gloo(jobs, 2, STEPS, tmp_path, own_groups=True)
    assert found
    for name, run in found.items():
        assert run.losses == runs[name].losses
