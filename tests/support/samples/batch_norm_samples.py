"""Samples of batch norm, in training and with given statistics."""

from collections.abc import Sequence

import torch

from flowrun.engine.ir.placement import Shape
from flowrun.engine.ops.proof.simulated_ranks import OpSample, sample
from support.samples.sample_values import T, positive

aten = torch.ops.aten


def _sound(whole: int) -> object:
    """The kernels trust that every other input has one number a channel."""

    def fits(shapes: Sequence[Shape]) -> bool:
        first, *rest = shapes
        return all(s == first for s in rest[: whole - 1]) and all(
            s == first[1:2] for s in rest[whole - 1 :]
        )

    return fits


def batch_norm_samples() -> list[OpSample]:
    """(samples, channels), with an image's and a sequence's dims behind."""
    made = []
    backward = "aten.native_batch_norm_backward.default"
    asked = (1e-5, (True, True, True))
    for shape in ((7, 4), (5, 4, 3), (3, 4, 2, 3)):
        x = T(*shape)
        affine, running = (positive(4), T(4)), (T(4), positive(4))
        given = (x, *affine, *running, True, 0.2, 1e-5)
        _, *stats = aten._native_batch_norm_legit.no_stats(x, *affine, True, 0.2, 1e-5)
        read = (T(*shape), x, affine[0], None, None, *stats)
        made += [
            sample("aten._native_batch_norm_legit_functional.default", *given, sound=_sound(1)),
            sample(backward, *read, True, *asked, sound=_sound(2)),
        ]
    x, affine, running = T(5, 4, 3), (positive(4), T(4)), (T(4), positive(4))
    frozen = ("aten._native_batch_norm_legit_no_training.default", x)
    read = (T(5, 4, 3), x, affine[0], *running, None, None)
    return [
        *made,
        sample("aten._native_batch_norm_legit.no_stats", x, None, None, True, 0.2, 1e-5),
        sample(*frozen, *affine, *running, 0.2, 1e-5, sound=_sound(1)),
        sample(*frozen, None, None, *running, 0.2, 1e-5, sound=_sound(1)),
        sample(backward, *read, False, *asked, sound=_sound(2)),
    ]
