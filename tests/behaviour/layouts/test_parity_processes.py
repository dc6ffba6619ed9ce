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
OF_TWO_STAGES = [x for x in FEW_RANKS if x.stages == 2 and x.num_ranks == 2]
Runs = dict[str, Run]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Every layout of a test that runs, trained on 2 processes or on 4, by its name."""
    tests = [item for item in request.session.items if item.path == request.path]
    asked = {str(test.callspec.params["layout"]) for test in tests if hasattr(test, "callspec")}
    layouts = [x for x in FEW_RANKS if str(x) in asked or x in OF_TWO_STAGES]
    out: Runs = {}
    for world in (2, 4):
        mine = [x for x in layouts if (x.num_ranks > 2) == (world > 2)]
        jobs = {str(layout): (TINY_GPT, compiled(TINY_GPT, layout).plan) for layout in mine}
        folder = tmp_path_factory.mktemp(f"world{world}")
        out.update(run_on_gloo(jobs, world, STEPS, folder))
    return out


@pytest.mark.parametrize("layout", FEW_RANKS, ids=str)
def test_processes_train_as_plain_torch_and_as_was_foreseen(runs: Runs, layout: Layout) -> None:
    """The bytes that they send, and the versions that are live at once, are the rehearsal's."""
    found, foreseen = runs[str(layout)], compiled(TINY_GPT, layout).rehearsal.sent_bytes
    assert_as_plain_torch(TINY_GPT, found, CLIP)
    assert sum(found.sent_bytes.values()) == foreseen * STEPS
    assert found.most_live
    for (_, register), most in found.most_live.items():
        assert most <= found.plan.registers[register].slots


def test_messages_in_groups_of_their_own_carry_the_same(runs: Runs, tmp_path: Path) -> None:
    """As they are on CUDA, whose library knows no tags."""
    plans = {str(x): in_one_order(compiled(TINY_GPT, x).plan) for x in OF_TWO_STAGES}
    jobs = {name: (TINY_GPT, plan) for name, plan in plans.items()}
    found = run_on_gloo(jobs, 2, STEPS, tmp_path, own_groups=True)
    assert found
    for name, run in found.items():
        assert run.losses == runs[name].losses
