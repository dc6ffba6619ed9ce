"""Measurements made into a profile."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrun.engine.cost.calibrated import Timed, as_yaml, curve, level_of, line, with_device
from flowrun.engine.cost.hardware import Hardware
from flowrun.engine.cost.network import Level


@given(
    st.floats(0, 1e-2),
    st.floats(1e6, 1e12),
    st.lists(st.integers(0, 24), min_size=2, max_size=9, unique=True),
)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_a_line_that_was_measured_is_found(start: float, speed: float, sizes: list[int]) -> None:
    points = [(float(2**size), start + 2**size / speed) for size in sizes]
    found_start, found_speed = line(points)
    for work, seconds in points:
        assert found_start + work / found_speed == pytest.approx(seconds, rel=1e-3)


def test_a_level_has_the_latency_and_the_bandwidth_that_fit() -> None:
    timed = [Timed("all_reduce 2", work, 1e-4 + work / 2e9) for work in (1e3, 1e5, 1e7)]
    level = level_of(timed, Level(shared_memory=True))
    assert level == Level(latency_s=1e-4, bytes_per_s=2e9, shared_memory=True)


def test_a_level_has_the_latency_of_transfers_between_ops() -> None:
    alone = [Timed("all_reduce 2", work, 1e-4 + work / 2e9) for work in (1e3, 1e5, 1e7)]
    between = [Timed("all_reduce 2 between ops", 1e3, late) for late in (5e-4, 6e-4, 9e-4)]
    assert level_of([*alone, *between], Level()) == Level(latency_s=6e-4, bytes_per_s=2e9)


def test_a_curve_rises_to_the_fastest_product() -> None:
    timed = [Timed("fp32 forward", flop, flop / speed) for flop, speed in TIMES]
    products = curve(timed)
    assert (products.flops, products.flop) == (1e11, (1e6, 1e7, 1e8))
    assert products.share == (0.5, 0.5, 1.0)  # the dent at 1e7 is noise


TIMES = [(1e8, 1e11), (1e6, 4e10), (1e6, 5e10), (1e6, 6e10), (1e7, 2e10)]


def test_what_was_measured_replaces_what_was_shipped() -> None:
    timed = [
        Timed("fp32 forward", 1e8, 1e-3),
        Timed("fp32 backward", 1e8, 2e-3),
        Timed("attention fp32", 1e8, 4e-3),
        Timed("stream", 1e9, 0.1),
        Timed("op", 200, 1e-3),
        Timed("convolution", 1e8, 2e-3),
        Timed("convolution backward", 2e8, 8e-3),  # a fourth, half of which is backward's
        Timed("batched", 1e8, 10e-3),
        Timed("elements aten.gelu.default", 1e6, 1e-3),
    ]
    found = with_device(Hardware(), timed)
    assert found.fp32.flops == 1e11
    assert (found.backward_share, found.attention_share) == (0.5, 0.25)
    assert (found.memory_bytes_per_s, found.op_s) == (1e10, 5e-6)
    assert found.weight_grad_share == Hardware().weight_grad_share  # not measured
    assert found.bf16 == Hardware().bf16
    assert (found.convolution_share, found.batched_share) == (0.5, 0.1)
    assert found.elements_per_s == {"aten.gelu.default": 1e9}


def test_a_profile_is_plain_yaml() -> None:
    tree = yaml.safe_load(yaml.safe_dump(dict(as_yaml(Hardware(name="mine")))))
    assert tree["name"] == "mine"
    assert tree["fp32"]["share"] == list(Hardware().fp32.share)
    assert tree["levels"][0]["bytes_per_s"] == 1.5e9
