from dataclasses import replace
from functools import cache

import pytest

from flowrun.engine.compile import Rehearsed
from flowrun.engine.rehearsal.rehearsal import Rehearsal
from flowrun.engine.rehearsal.reserved import count_reserved
from flowrun.launcher.bench.foreseen.published import UNITS, gpt_flop
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load

GPT = ("recipe=gpt_dp", "data.max_bytes=100000", "train.batch_size=32")
REHEARSAL = Rehearsal(
    step_s=0.25,
    first_step_s=0.3,
    bubble=(0.0, 0.0),
    peak_bytes=(2**20, 3 * 2**20),
    bound_bytes=(0, 0),
    sent_bytes=0.0,
    first_step=(),
    order=(),
)


@cache
def planned(step_s: float = 0.25) -> Rehearsed:
    """The plan of GPT, on 2 ranks, with what is foreseen of another."""
    plan = Job(load([*GPT, "engine.cache=false"]), values=False).training.plan
    return Rehearsed(plan, replace(REHEARSAL, step_s=step_s))


@pytest.mark.parametrize(
    ("unit", "figure"),
    [
        pytest.param("samples_per_s", 128.0, id="32 samples in a quarter of a second"),
        pytest.param("step_ms", 250.0, id="a quarter of a second"),
        pytest.param("tokens_per_s_per_gpu", 4096.0, id="each of 2 ranks has half of 32 x 64"),
        pytest.param("memory_mib", 3.0, id="the stage that takes most"),
        pytest.param("memory_gib", 3 / 1024, id="the same in GiB"),
    ],
)
def test_a_rehearsal_in_the_units_of_a_table(unit: str, figure: float) -> None:
    assert UNITS[unit][1](load([*GPT]), planned()) == pytest.approx(figure)


def test_memory_counts_what_driver_and_libraries_keep() -> None:
    recipe = load([*GPT, "hardware.reserved_bytes=1048576"])
    assert UNITS["memory_mib"][1](recipe, planned()) == 4.0
    assert UNITS["memory_gib"][1](recipe, planned()) == 3 / 1024


def test_reserved_memory_is_that_of_the_streams_of_fsdp() -> None:
    plan = planned().plan
    figure = UNITS["reserved_gib"][1](load([*GPT]), planned()) * 2**30
    assert figure == count_reserved(plan, streams_of_fsdp=True) != count_reserved(plan)


def test_the_formula_of_megatron_counts_each_weight_of_a_block_8_times_a_token() -> None:
    """2 in forward, 2 again, 4 in backward; attention and head come on top."""
    depth, width, tokens = 96, 12288, 2048
    weights = 12 * depth * width**2
    expected = pytest.approx(1 + tokens / (6 * width))
    assert gpt_flop(1, tokens, depth, width, 0) / (8 * weights * tokens) == expected
    head = gpt_flop(1, tokens, depth, width, 51200) - gpt_flop(1, tokens, depth, width, 0)
    assert head == pytest.approx(6 * width * 51200 * tokens)  # once forward, and 4 in backward


def test_operations_are_shared_by_all_ranks_of_all_stages() -> None:
    recipe = load(["recipe=gpt_hybrid", "model=gpt2", "data.length=1024", "train.batch_size=32"])
    flop = gpt_flop(32, 1024, 12, 768, 50257)
    found = UNITS["tflops_per_gpu"][1](recipe, planned(2.0))
    assert found == pytest.approx(flop / 2.0 / 4 / 1e12)
