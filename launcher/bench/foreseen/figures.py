"""Turn a rehearsal into figures in the units of published tables.  Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flowrun.engine.rehearsal.rehearsal import Rehearsal
from flowrun.launcher.recipe.recipe import Recipe

Figure = Callable[[Recipe, Rehearsal], float]


def samples_per_s(recipe: Recipe, rehearsal: Rehearsal) -> float:
    """Samples of all ranks in a second."""
    return recipe.train.batch_size / rehearsal.step_s


def step_ms(recipe: Recipe, rehearsal: Rehearsal) -> float:
    """Milliseconds of a step."""
    return rehearsal.step_s * 1e3


def memory_mib(recipe: Recipe, rehearsal: Rehearsal) -> float:
    """MiB (2 ** 20 bytes) of the rank that takes most, as nvidia-smi counts: with what driver and
    libraries keep.
    """
    return (max(rehearsal.peak_bytes) + recipe.hardware.reserved_bytes) / 2**20


def tflops_per_gpu(recipe: Recipe, rehearsal: Rehearsal) -> float:
    """Tera-operations a second of one rank, by the formula of Megatron-LM (arXiv 2104.04473,
    equation 3); it counts the activations that are computed twice.
    """
    model, length = recipe.model, int(recipe.data["length"])
    flop = gpt_flop(
        recipe.train.batch_size,
        length,
        int(model["depth"]),
        int(model["width"]),
        int(model["vocabulary"]),
    )
    return flop / rehearsal.step_s / recipe.num_ranks / 1e12


def gpt_flop(samples: int, length: int, depth: int, width: int, vocabulary: int) -> float:
    """Count the operations of one step of a GPT whose blocks run forward twice (arXiv 2104.04473,
    eq. 3).

    samples: of a step.  length: tokens of a sample.  depth, width, vocabulary: of the model.
    """
    more = 1 + length / (6 * width) + vocabulary / (16 * depth * width)
    return 96.0 * samples * length * depth * width**2 * more


# unit -> (its name on the screen, how it is made)
UNITS: Mapping[str, tuple[str, Figure]] = {
    "samples_per_s": ("samples/s", samples_per_s),
    "step_ms": ("ms a step", step_ms),
    "memory_mib": ("MiB", memory_mib),
    "tflops_per_gpu": ("TFLOP/s per GPU", tflops_per_gpu),
}
