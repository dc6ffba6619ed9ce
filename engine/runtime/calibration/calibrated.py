"""calibrated: measurements -> a hardware profile; pure functions.  calibration.py measures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from math import log
from statistics import fmean, median
from typing import TypeVar

import numpy as np

from flowrun.engine.boxing.boxing import ALL_REDUCE, EXCHANGE
from flowrun.engine.hardware.hardware import AttentionSpeed, Hardware, Products
from flowrun.engine.hardware.network import Level

FORWARD, BACKWARD, WEIGHT_GRAD = "forward", "backward", "weight_grad"
CONVOLUTION, CONVOLUTION_BACKWARD = "convolution", "convolution backward"
BATCHED, ELEMENTS, ATTENTION = "batched", "elements", "attention"
_IN_A_STEP = 3.4  # time of a small op after a product of 512 x 256 x 512, over that after its like


@dataclass(frozen=True, slots=True)
class TimedWork:
    """The seconds that a device takes for one kind of work.

    what: "fp32 forward" and the like, "attention forward 32 128" (width of a head, keys),
        "convolution", "batched", "elements" and an op, "stream", "op".
    work: operations, bytes, elements or ops, according to `what`.
    """

    what: str
    work: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The seconds of one kind of communication.

    kind: of a boxing step (boxing.py), or "message".
    members: number of ranks that take part.
    message_bytes: size of the tensor that they share or send.
    sent_bytes: bytes that each rank sends.
    seconds: of a call in a loop; if between_ops, what a call adds to the ops around it.
    busy_s: seconds in which the cores of a rank work for it, if between_ops.
    """

    kind: str
    members: int
    message_bytes: int
    sent_bytes: float
    seconds: float
    between_ops: bool = False
    busy_s: float = 0.0


# kind of work -> the key of the profile for its speed relative to fp32 products of forward
_SHARES = {
    f"fp32 {BACKWARD}": "backward_share",
    f"fp32 {WEIGHT_GRAD}": "weight_grad_share",
    BATCHED: "batched_share",
}


One = TypeVar("One", TimedWork, Moved)


def typical(rounds: Sequence[Sequence[One]]) -> list[One]:
    """Return each measurement with the median of its seconds over all rounds.

    rounds: the same measurements in the same order.  A machine that others use has slow minutes.
    """
    return [
        replace(
            same[0],
            **{
                key: median(getattr(one, key) for one in same)
                for key in ("seconds", "busy_s")
                if hasattr(same[0], key)
            },
        )
        for same in zip(*rounds, strict=True)
    ]


_OF_A_RUN = {"core", "cores"}  # keys that depend on the number of ranks of a host


def with_device(base: Hardware, timed: Sequence[TimedWork]) -> Hardware:
    """Return the profile `base` with the measured figures of a rank's device."""
    by_kind: dict[str, list[TimedWork]] = {}
    for one in timed:
        by_kind.setdefault(one.what, []).append(one)
    products = {
        what.split()[0]: curve(profile)
        for what, profile in by_kind.items()
        if what.endswith(f" {FORWARD}")
    }
    profile = replace(base, **products)  # type: ignore[arg-type]
    changes = {
        key: _share(by_kind[kind], profile.fp32) for kind, key in _SHARES.items() if kind in by_kind
    }
    profile = replace(profile, **changes)  # type: ignore[arg-type]
    if CONVOLUTION in by_kind:
        backward = by_kind.get(CONVOLUTION_BACKWARD, ())
        share = _convolution_share(by_kind[CONVOLUTION], backward, profile)
        profile = replace(profile, convolution_share=share)
    if heads := [one for one in timed if one.what.startswith(ATTENTION)]:
        tables = _tables(heads, profile.fp32.flops)
        profile = replace(profile, attention=tables, attention_share=1.0)
    if "stream" in by_kind:
        profile = replace(profile, memory_bytes_per_s=_speed(by_kind["stream"]))
    if "op" in by_kind:
        profile = replace(profile, op_s=digits(_IN_A_STEP / _speed(by_kind["op"])))
    elements = {
        kind.partition(" ")[2]: _speed(timed)
        for kind, timed in by_kind.items()
        if kind.startswith(ELEMENTS)
    }
    return replace(profile, elements_per_s={**profile.elements_per_s, **elements})


def _convolution_share(
    forward: Sequence[TimedWork], backward: Sequence[TimedWork], hardware: Hardware
) -> float:
    """Return the speed of convolutions, relative to products, over all layers of a net together.

    Their median would be that of no net.  The products of gradients have a share of their own.
    """
    measured_s = sum(one.seconds for one in forward)
    measured_s += sum(one.seconds * hardware.backward_share for one in backward)
    foreseen_s = sum(hardware.fp32.seconds(one.work) for one in (*forward, *backward))
    return digits(foreseen_s / measured_s)


def _tables(timed: Sequence[TimedWork], flops: float) -> tuple[AttentionSpeed, ...]:
    """Return the speed of attention as a share of `flops`, at most all of it, a table for each
    width of a head.
    """
    shares: dict[int, dict[int, dict[str, float]]] = {}
    for one in timed:
        _, way, width, keys = one.what.split()
        ways = shares.setdefault(int(width), {}).setdefault(int(keys), {})
        ways[way] = min(1.0, digits(one.work / one.seconds / flops))
    return tuple(
        AttentionSpeed(width, tuple(map(float, of)), *_columns(of.values()))
        for width, of in shares.items()
    )


def _columns(rows: Iterable[Mapping[str, float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row[way] for row in rows) for way in (FORWARD, BACKWARD))


def curve(timed: Sequence[TimedWork]) -> Products:
    """Return the highest speed of products, and the share of it that each size reaches: a size
    counts as at least as fast as the sizes below it.
    """
    sizes = sorted({one.work for one in timed})
    speeds = [median(t.work / t.seconds for t in timed if t.work == size) for size in sizes]
    rising = [max(speeds[: k + 1]) for k in range(len(speeds))]
    shares = tuple(digits(speed / rising[-1]) for speed in rising)
    return Products(digits(rising[-1]), tuple(sizes), shares)


def exchange_bytes(moved: Sequence[Moved]) -> int:
    """Return the size of message up to which an exchange is faster than an all-reduce; 0: never.

    moved: measurements of one group, both ways.  Those between ops count: in a loop without ops an
    exchange among more ranks than cores looks faster than it is in a step.  The result is the size
    with the least sum of log seconds over all sizes, for figures differ by a factor of three.
    """
    ways = {
        kind: {m.message_bytes: m.seconds for m in moved if m.kind == kind and m.between_ops}
        for kind in (ALL_REDUCE, EXCHANGE)
    }

    def total_log_seconds(most: int) -> float:
        return sum(
            log(ways[EXCHANGE if size <= most else ALL_REDUCE][size]) for size in ways[EXCHANGE]
        )

    return min((0, *sorted(ways[EXCHANGE])), key=total_log_seconds)


def crowded_share(paces: Sequence[Sequence[tuple[float, float]]], cores: int) -> float:
    """Return the speed of a rank among more ranks than cores, over its share of a core's speed.

    paces: for every rank and round, (pace with all ranks at work, pace with one rank a core at
    work; 0 if this rank paused).  cores: of the host.  Rounds are compared one by one.
    """
    share = min(1.0, cores / len(paces))
    rounds = [
        fmean(all_pace for all_pace, _ in each) / (fmean(own for _, own in each if own) * share)
        for each in zip(*paces, strict=True)
    ]
    return digits(min(1.0, median(rounds)))


def is_used(moved: Moved, level: Level) -> bool:
    """Return whether the level would run an all-reduce of this size in this way."""
    if moved.kind not in (ALL_REDUCE, EXCHANGE):
        return True
    exchanged = moved.message_bytes <= level.max_exchange_bytes(moved.members)
    return exchanged == (moved.kind == EXCHANGE)


def level_of(moved: Sequence[Moved], level: Level) -> Level:
    """Return the level with measured latency, busy time and bandwidth.

    moved: measurements, of which those that the level would use count.  Bandwidth comes from
    transfers one after another, latency and busy time from the smallest message between ops.
    """
    used = [one for one in moved if is_used(one, level)]
    least = min(one.message_bytes for one in used)
    between = [one for one in used if one.between_ops and one.message_bytes == least]
    alone = [(one.sent_bytes, one.seconds) for one in used if not one.between_ops]
    latency_s, bytes_per_s = line(alone)
    busy_s = level.busy_s
    if between:
        latency_s = median(one.seconds for one in between)
        busy_s = min(latency_s, median(one.busy_s for one in between))
    return replace(
        level, latency_s=digits(latency_s), busy_s=digits(busy_s), bytes_per_s=digits(bytes_per_s)
    )


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit a line by least squares of relative errors; return (seconds at 0, work per second).

    points: (work, seconds), of at least two sizes.
    """
    work, seconds = np.array(points).T
    slope, at_zero = np.polyfit(work, seconds, 1, w=1 / seconds)
    assert slope > 0, f"more work takes no longer: {points}"
    return max(0.0, float(at_zero)), 1 / float(slope)


def as_yaml(hardware: Hardware) -> Mapping[str, object]:
    """Return the keys of a profile as in a file of the config group `hardware`."""
    names = (name for name in Hardware.__dataclass_fields__ if name not in _OF_A_RUN)
    return {name: _plain(getattr(hardware, name)) for name in names}


def _plain(value: object) -> object:
    """Return mappings and lists for what YAML does not know."""
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _share(timed: Sequence[TimedWork], products: Products) -> float:
    return digits(median(products.seconds(one.work) / one.seconds for one in timed))


def _speed(timed: Sequence[TimedWork]) -> float:
    return digits(median(one.work / one.seconds for one in timed))


def digits(value: float) -> float:
    """Round to three significant digits, the precision of these measurements."""
    return float(f"{value:.3g}")
