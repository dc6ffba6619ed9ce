from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrun.engine.hardware.hardware import AttentionSpeed, Hardware
from flowrun.engine.hardware.network import Level
from flowrun.engine.runtime.calibration.calibrated import (
    Moved,
    TimedWork,
    as_yaml,
    crowded_share,
    curve,
    exchange_bytes,
    is_used,
    level_of,
    line,
    typical,
    with_device,
)


@given(
    st.floats(0, 1e-2),
    st.floats(1e6, 1e12),
    st.lists(st.integers(0, 24), min_size=2, max_size=9, unique=True),
)
@settings(max_examples=200)
def test_a_line_that_was_measured_is_found(start: float, speed: float, sizes: list[int]) -> None:
    points = [(float(2**size), start + 2**size / speed) for size in sizes]
    found_start, found_speed = line(points)
    for work, seconds in points:
        assert found_start + work / found_speed == pytest.approx(seconds, rel=1e-3)


def test_a_level_has_the_latency_and_the_bandwidth_that_fit() -> None:
    level = level_of(ALONE, Level(shared_memory=True))
    assert level == Level(latency_s=1e-4, bytes_per_s=2e9, shared_memory=True)


def test_of_several_rounds_each_figure_is_its_median() -> None:
    """One slow round changes none, whichever figures it made slow."""
    slow = [replace(one, seconds=5 * one.seconds) for one in ALONE]
    assert typical([ALONE, slow, ALONE]) == typical([slow, ALONE, ALONE]) == list(ALONE)
    mixed = [a if k % 2 else b for k, (a, b) in enumerate(zip(ALONE, slow, strict=True))]
    other = [b if k % 2 else a for k, (a, b) in enumerate(zip(ALONE, slow, strict=True))]
    assert typical([ALONE, mixed, other]) == list(ALONE)
    with pytest.raises(ValueError, match="shorter"):
        typical([ALONE, ALONE[:-1]])


def test_a_level_has_the_latency_of_transfers_between_ops() -> None:
    between = [replace(BETWEEN, seconds=late) for late in (5e-4, 6e-4, 9e-4)]
    assert level_of([*ALONE, *between], Level()) == Level(latency_s=6e-4, bytes_per_s=2e9)


def test_a_core_is_busy_for_a_part_of_the_latency_at_most() -> None:
    rounds = [replace(BETWEEN, busy_s=busy_s) for busy_s in (1e-4, 2e-4, 9e-4)]
    (usual,) = typical([[one] for one in rounds])
    assert usual == replace(BETWEEN, busy_s=2e-4)
    for one, busy_s in zip(rounds, (1e-4, 2e-4, 6e-4), strict=True):
        assert level_of([*ALONE, one], Level()).busy_s == busy_s


@pytest.mark.parametrize(
    ("exchanged_s", "most"),
    [
        ((1e-4, 2e-4, 4e-3, 8e-2), 65536),
        ((1e-4, 4e-4, 2e-3, 8e-2), 1 << 20),  # one that is late by chance does not count
        ((1e-4, 2e-4, 2e-3, 1e-2), 1 << 24),
        ((4e-3, 4e-3, 4e-3, 8e-2), 0),
    ],
)
def test_messages_are_exchanged_up_to_the_size_with_which_all_take_least(
    exchanged_s: tuple[float, ...], most: int
) -> None:
    assert exchange_bytes(both_ways(exchanged_s)) == most


def test_a_level_is_fitted_to_the_way_that_it_uses() -> None:
    moved = both_ways((1e-4, 2e-4, 4e-3, 8e-2))
    level = Level(exchange_bytes={4: 65536})
    used = [one for one in moved if is_used(one, level) and not one.between_ops]
    assert [(one.kind, one.message_bytes) for one in used] == [
        ("all_reduce", 1 << 20),
        ("all_reduce", 1 << 24),
        ("exchange", 4096),
        ("exchange", 65536),
    ]
    assert level_of(moved, level).bytes_per_s == level_of(used, level).bytes_per_s
    assert level_of(moved, level).latency_s == 1e-4
    assert level_of(moved, Level()).latency_s == 1e-3


ALONE = [
    Moved(
        kind="all_to_all",
        members=2,
        message_bytes=work,
        sent_bytes=float(work),
        seconds=1e-4 + work / 2e9,
    )
    for work in (10**3, 10**5, 10**7)
]
BETWEEN = replace(ALONE[0], sent_bytes=5e2, seconds=6e-4, between_ops=True)
AROUND_S = (1e-3, 3e-4, 3e-3, 2e-2)


def both_ways(exchanged_s: tuple[float, ...]) -> list[Moved]:
    """All-reduces of 4 ranks, of four sizes."""
    sizes = (4096, 65536, 1 << 20, 1 << 24)
    timed = [("all_reduce", 1.5, AROUND_S), ("exchange", 3.0, exchanged_s)]
    return [
        Moved(
            kind=kind,
            members=4,
            message_bytes=size,
            sent_bytes=share * size,
            seconds=seconds,
            between_ops=between,
        )
        for between in (False, True)
        for kind, share, each in timed
        for size, seconds in zip(sizes, each, strict=True)
    ]


def test_a_curve_rises_to_the_fastest_product() -> None:
    timed = [TimedWork("fp32 forward", flop, flop / speed) for flop, speed in TIMES]
    products = curve(timed)
    assert (products.flops, products.flop) == (1e11, (1e6, 1e7, 1e8))
    assert products.share == (0.5, 0.5, 1.0)  # the dent at 1e7 is noise


TIMES = [(1e8, 1e11), (1e6, 4e10), (1e6, 5e10), (1e6, 6e10), (1e7, 2e10)]


def test_what_was_measured_replaces_what_was_shipped() -> None:
    timed = [
        TimedWork("fp32 forward", 1e8, 1e-3),
        TimedWork("fp32 backward", 1e8, 2e-3),
        TimedWork("attention forward 32 64", 1e8, 4e-3),
        TimedWork("attention backward 32 64", 1e8, 2e-3),
        TimedWork("attention forward 32 128", 1e8, 2e-3),
        TimedWork("attention backward 32 128", 1e8, 1e-3),
        TimedWork("attention forward 64 128", 2e8, 2e-3),
        TimedWork("attention backward 64 128", 1e8, 2e-3),
        TimedWork("stream", 1e9, 0.1),
        TimedWork("op", 200, 1e-3),
        TimedWork("convolution", 1e8, 2e-3),
        TimedWork("convolution backward", 2e8, 8e-3),  # a fourth, half of which is backward's
        TimedWork("batched", 1e8, 10e-3),
        TimedWork("elements aten.gelu.default", 1e6, 1e-3),
    ]
    found = with_device(Hardware(), timed)
    assert found.fp32.flops == 1e11
    assert (found.backward_share, found.attention_share) == (0.5, 1.0)
    assert found.attention == (
        AttentionSpeed(32, (64.0, 128.0), (0.25, 0.5), (0.5, 1.0)),
        AttentionSpeed(64, (128.0,), (1.0,), (0.5,)),
    )
    assert (found.memory_bytes_per_s, found.op_s) == (1e10, 17e-6)  # in a loop 5e-6
    assert found.weight_grad_share == Hardware().weight_grad_share  # not measured
    assert found.bf16 == Hardware().bf16
    assert (found.convolution_share, found.batched_share) == (0.5, 0.1)
    assert found.elements_per_s == {"aten.gelu.default": 1e9}


def test_a_profile_is_plain_yaml() -> None:
    tree = yaml.safe_load(yaml.safe_dump(dict(as_yaml(Hardware(name="mine")))))
    assert tree["name"] == "mine"
    assert tree["fp32"]["share"] == list(Hardware().fp32.share)
    assert tree["levels"][0]["bytes_per_s"] == 1.5e9


def test_ranks_in_a_crowd_are_compared_with_one_a_core_round_by_round() -> None:
    """4 ranks on 2 cores: of half a core each reaches 0.8 of its speed, in a slow round too; one
    round was disturbed.
    """
    rounds = [(4.0, 10.0), (2.0, 5.0), (1.0, 10.0)]
    aside = [(crowded, 0.0) for crowded, _ in rounds]
    assert crowded_share([rounds, rounds, aside, aside], cores=2) == 0.8
    assert crowded_share([[(9.0, 9.0)], [(9.0, 9.0)]], cores=2) == 1.0
    assert crowded_share([[(6.0, 10.0)], [(6.0, 0.0)]], cores=1) == 1.0  # never faster than alone
