"""Samples of the engine's own random ops."""

import torch

from flowrun.engine.ops.proof.simulated_ranks import OpSample, sample
from support.samples.kernel_samples import same_shape
from support.samples.sample_values import T, mask, positive

DRAW, SEED = torch.tensor(7), 3


def random_samples() -> list[OpSample]:
    """Shapes of one, two and three dims: a dim that is split is the first, the last or between."""
    shapes = ((7,), (5, 4), (5, 3, 4))
    kinds = ("uniform", "normal")
    narrow = {"optimizer": "adamw", "draw": DRAW, "seed": SEED, "stream": "w"}
    numbers = {"lr": torch.tensor(0.1), "step": torch.tensor(2.0), "beta1": 0.9, "beta2": 0.95}
    numbers |= {"eps": 1e-3, "weight_decay": 0.1}
    return [
        *(sample("flow.dropout_mask", DRAW, SEED, "drop", shape, 0.4) for shape in shapes),
        *(
            sample(f"flow.{kind}", DRAW, SEED, kind, shape, dtype=torch.float64)
            for kind in kinds
            for shape in shapes
        ),
        sample("flow.uniform", DRAW, SEED, "scalar", (), dtype=torch.float32),
        sample("flow.integers", DRAW, SEED, "ids", (5, 4), -3, 9, dtype=torch.int64),
        sample("flow.permutation", DRAW, SEED, "order", (7,), dtype=torch.int64),
        sample("flow.round", T(5, 3).float(), DRAW, SEED, "round", (5, 3)),
        sample("flow.round", T(7).float(), DRAW, SEED, "round", (7,)),
        *(
            sample(
                "flow.update_narrow",
                *(x.bfloat16() for x in (T(*shape), T(*shape), T(*shape), positive(*shape))),
                sound=same_shape(0, 1, 2, 3),
                **narrow,
                shape=shape,
                **numbers,
            )
            for shape in shapes[:2]
        ),
        sample("aten.native_dropout_backward.default", T(5, 4), mask(5, 4), 1.25),
    ]
