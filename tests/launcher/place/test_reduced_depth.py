from dataclasses import replace

import pytest

from flowrun.launcher.place.planner import Planner
from flowrun.launcher.place.reduced_depth import ReducedDepthPlanner
from flowrun.launcher.place.space import Branch, Candidate
from flowrun.launcher.recipe.compose import load

LONG = [
    "recipe=gpt_tp",
    "model.depth=12",
    "model.width=2048",  # wide: where acts weigh little, real cuts are as even as estimated
    "model.heads=16",
    "data.length=256",
    "hardware=dgx_a100",
    "placement.axes={data:2,tensor:2}",
    "placement.stages=4",
    "train.batch_size=64",
    "train.micro_batches=16",
    "engine.cache=false",
    "eval.batches=0",
    "auto.placement=true",
]


@pytest.fixture(scope="module")
def short() -> ReducedDepthPlanner:
    return ReducedDepthPlanner(Planner.of(load(LONG)))


def grid(data: int, tensor: int, stages: int, micro_batches: int) -> Branch:
    return Branch((("data", data), ("tensor", tensor)), stages, micro_batches)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(grid(1, 2, 8, 16), "1f1b"),
        Candidate(grid(1, 2, 8, 16), "gpipe"),
        Candidate(grid(4, 2, 2, 2), "1f1b", zero=2, recompute=("blocks.*",)),
        Candidate(grid(16, 1, 1, 1), zero=3),
    ],
    ids=str,
)
def test_few_blocks_tell_of_all(short: ReducedDepthPlanner, candidate: Candidate) -> None:
    """Cuts of the whole are not quite even, and inside a block more tensors cross."""
    estimate, whole = short.plan(candidate), short.planner.plan(candidate)
    bound = short.bound(candidate)
    assert bound.seconds <= whole.step_s
    assert estimate.extrapolated and not whole.extrapolated
    assert not estimate.problem and not whole.problem
    assert estimate.step_s == pytest.approx(whole.step_s, rel=0.06)
    assert estimate.bytes == pytest.approx(whole.bytes, rel=0.1)
    assert estimate.sent_bytes == pytest.approx(whole.sent_bytes, rel=0.05)


@pytest.mark.parametrize("in_flight", [4, pytest.param(16, marks=pytest.mark.thorough)])
def test_few_blocks_tell_what_a_number_in_flight_holds(
    short: ReducedDepthPlanner, in_flight: int
) -> None:
    """And the fewer, the slower, as it is of the whole."""
    candidate = Candidate(grid(1, 2, 8, 16), in_flight)
    estimate, whole = short.plan(candidate), short.planner.plan(candidate)
    assert estimate.bytes == pytest.approx(whole.bytes, rel=0.1)
    fewer = short.plan(replace(candidate, in_flight=in_flight // 2))
    assert fewer.step_s > estimate.step_s and fewer.bytes < estimate.bytes


def test_no_more_stages_than_blocks_and_tensor_parallel_within_a_node(
    short: ReducedDepthPlanner,
) -> None:
    branches = [branch for branch, _ in short.branches()]
    assert short.skipped and len(branches) == len(set(branches))
    assert {dict(branch.axes)["tensor"] for branch in branches} == {1, 2, 4, 8}
    assert max(branch.stages for branch in branches) == 8
    assert all(branch.stages <= branch.micro_batches for branch in branches)


@pytest.mark.parametrize("in_flight", ["gpipe", pytest.param("3", marks=pytest.mark.thorough)])
def test_a_schedule_that_is_to_stay_is_the_only_one(in_flight: str) -> None:
    small = ["model.width=64", "model.heads=4", "hardware=cpu"]
    kept = ["auto.keep=[placement.in_flight]", f"placement.in_flight={in_flight}"]
    short = ReducedDepthPlanner(Planner.of(load([*LONG, *small, *kept])))
    found = {str(candidate.in_flight) for candidate, _ in short.open(grid(1, 2, 4, 16))}
    assert found == {in_flight}
