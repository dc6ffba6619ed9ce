"""Calibrated: measurements -> a hardware profile.  Pure; runtime/calibration.py measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from flowrun.engine.cost.hardware import Hardware, Products
from flowrun.engine.cost.network import Level

FORWARD, BACKWARD, WEIGHT_GRAD = "forward", "backward", "weight_grad"
CONVOLUTION, CONVOLUTION_BACKWARD = "convolution", "convolution backward"
BATCHED, ELEMENTS = "batched", "elements"
BETWEEN_OPS = " between ops"  # behind what moved bytes


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one kind of work.  work: operations, bytes, elements or pieces, as `what` has it.

    what: "fp32 forward" and the like, "attention fp32", "convolution", "batched", "elements" and
    an op, "stream", "op", or how bytes were moved.
    """

    what: str
    work: float
    seconds: float


# What is timed -> the key that says how fast it is beside forward's fp32 products of equal work.
_SHARES = {
    f"fp32 {BACKWARD}": "backward_share",
    f"fp32 {WEIGHT_GRAD}": "weight_grad_share",
    "attention fp32": "attention_share",
    BATCHED: "batched_share",
}


def with_device(base: Hardware, timed: Sequence[Timed]) -> Hardware:
    """The profile with what was measured of one rank's device; the rest as it was."""
    by_kind: dict[str, list[Timed]] = {}
    for one in timed:
        by_kind.setdefault(one.what, []).append(one)
    products = {
        what.split()[0]: curve(found) for what, found in by_kind.items() if what.endswith(FORWARD)
    }
    found = replace(base, **products)  # type: ignore[arg-type]
    changes = {
        key: _share(by_kind[kind], found.fp32) for kind, key in _SHARES.items() if kind in by_kind
    }
    found = replace(found, **changes)  # type: ignore[arg-type]
    if CONVOLUTION in by_kind:
        backward = by_kind.get(CONVOLUTION_BACKWARD, ())
        share = _convolution_share(by_kind[CONVOLUTION], backward, found)
        found = replace(found, convolution_share=share)
    if "stream" in by_kind:
        found = replace(found, memory_bytes_per_s=_speed(by_kind["stream"]))
    if "op" in by_kind:
        found = replace(found, op_s=digits(median(t.seconds / t.work for t in by_kind["op"])))
    elements = {
        kind.partition(" ")[2]: _speed(timed)
        for kind, timed in by_kind.items()
        if kind.startswith(ELEMENTS)
    }
    return replace(found, elements_per_s={**found.elements_per_s, **elements})


def _convolution_share(
    forward: Sequence[Timed], backward: Sequence[Timed], hardware: Hardware
) -> float:
    """Of all layers together, as a net has them: their median would be that of none.  Gradients'
    products have a share of their own already.
    """
    measured_s = sum(one.seconds for one in forward)
    measured_s += sum(one.seconds * hardware.backward_share for one in backward)
    foreseen_s = sum(hardware.fp32.seconds(one.work) for one in (*forward, *backward))
    return digits(foreseen_s / measured_s)


def curve(timed: Sequence[Timed]) -> Products:
    """The fastest, and what each size reaches of it; never less than a smaller one does."""
    sizes = sorted({one.work for one in timed})
    speeds = [median(t.work / t.seconds for t in timed if t.work == size) for size in sizes]
    rising = [max(speeds[: k + 1]) for k in range(len(speeds))]
    shares = tuple(digits(speed / rising[-1]) for speed in rising)
    return Products(digits(rising[-1]), tuple(sizes), shares)


def level_of(timed: Sequence[Timed], level: Level) -> Level:
    """A level of latency and bandwidth as measured: work is the bytes that a rank sends.  Bandwidth
    is that of transfers one after another; latency that of small ones between ops.
    """
    between = [one.seconds for one in timed if one.what.endswith(BETWEEN_OPS)]
    alone = [(one.work, one.seconds) for one in timed if not one.what.endswith(BETWEEN_OPS)]
    latency_s, bytes_per_s = line(alone)
    if between:
        latency_s = median(between)
    return replace(level, latency_s=digits(latency_s), bytes_per_s=digits(bytes_per_s))


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(seconds at 0, work per second): the line with the least squares of relative errors.

    points: (work, seconds), of at least two sizes.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    along = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    slope = along / spread
    assert slope > 0, f"more takes no longer: {points}"
    return max(0.0, mean_y - slope * mean_x), 1 / slope


def as_yaml(hardware: Hardware) -> Mapping[str, object]:
    """The keys of a profile, as a file of the group `hardware` has them."""
    tree: dict[str, object] = {}
    for name in Hardware.__dataclass_fields__:
        value = getattr(hardware, name)
        if isinstance(value, Products):
            tree[name] = {"flops": value.flops, "flop": [*value.flop], "share": [*value.share]}
        elif name == "levels":
            tree[name] = [
                {key: getattr(level, key) for key in Level.__dataclass_fields__} for level in value
            ]
        elif name == "ops":
            tree[name] = {target: dict(known) for target, known in value.items()}
        else:
            tree[name] = value
    return tree


def _share(timed: Sequence[Timed], products: Products) -> float:
    """Of the speed of forward's products, the median."""
    return digits(median(products.seconds(one.work) / one.seconds for one in timed))


def _speed(timed: Sequence[Timed]) -> float:
    """Work a second, the median."""
    return digits(median(one.work / one.seconds for one in timed))


def digits(value: float) -> float:
    """Three of them: more says nothing."""
    return float(f"{value:.3g}")
