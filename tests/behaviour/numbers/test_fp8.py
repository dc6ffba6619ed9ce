"""precision.fp8: every layout trains as a plain loop whose linear layers round alike.

All else is fp64: in fp32 a sum in another order moves a value over the edge between two of 8 bits
every few steps, and a loss by 1e-5.
"""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.actors.plan import Plan
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import BACKWARD, WEIGHTS
from flowrun.engine.runtime.kernels.kernels import Kernel, eager_kernels
from flowrun.launcher.model.build import narrow_products
from flowrun.launcher.recipe.schema import Fp8
from flowrun.models.fp8 import Fp8Linear
from flowrun.models.gpt import GPT
from flowrun.models.losses import cross_entropy
from support.layouts.grids import FIVE, Layout, cluster, compiled, virtual_run
from support.layouts.plain_loop import CONTEXT, VOCABULARY, Training, gpt, micro_batch_loop, seeded

F64 = torch.float64
MODULES, STEPS, WIDTH = ("blocks.*.mlp", "head"), 10, 32
LAYOUTS = (*FIVE, Layout(data=2, tensor=2, zero=3))


def rounded(x: Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """x with the values that 8 bits hold.  dims: those that share a scale; one: a power of two."""
    top = torch.finfo(dtype).max
    scale = top / x.abs().amax(dims, True).double().clamp(min=1e-12)
    scale = torch.exp2(torch.floor(torch.log2(scale.float()))) if len(dims) == 1 else scale.float()
    return (x.float() * scale).clamp(-top, top).to(dtype).double() * (1 / scale)


class Rounded(torch.autograd.Function):
    """x @ w.t() and its gradients, by rounded operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, rowwise: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.rowwise = rowwise
        return ctx_product(ctx, x, w.t(), torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,), (x, w) = grads, ctx.saved_tensors
        dtype = torch.float8_e4m3fn if ctx.rowwise else torch.float8_e5m2
        return ctx_product(ctx, grad, w, dtype), ctx_product(ctx, grad.t(), x, dtype), None


def ctx_product(ctx: Any, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    of_a, of_b = ((1,), (0,)) if ctx.rowwise else ((0, 1), (0, 1))
    return rounded(a, of_a, dtype) @ rounded(b, of_b, torch.float8_e4m3fn)


class RoundedLinear(nn.Linear):
    rowwise = True

    def forward(self, input: Tensor) -> Tensor:
        rows = Rounded.apply(input.flatten(0, -2), self.weight, self.rowwise)
        out = rows.unflatten(0, input.shape[:-1])  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


def model(recipe: str = "", plain: bool = False, dtype: torch.dtype = F64) -> nn.Module:
    """A GPT that multiplies 8 bits in MODULES.  plain: by RoundedLinear."""
    made = GPT(VOCABULARY, CONTEXT, 2, 4, WIDTH, bias=True).to(dtype)
    if recipe:
        narrow_products(made, Fp8(MODULES, recipe))
    for layer in made.modules():
        if plain and isinstance(layer, Fp8Linear):
            layer.__class__ = RoundedLinear  # type: ignore[assignment]
    return made


@lru_cache
def training(recipe: str, plain: bool = False, dtype: torch.dtype = F64, seed: int = 0) -> Training:
    make, loss = partial(model, recipe, plain, dtype), partial(cross_entropy, narrow=True)
    return replace(gpt(2, WIDTH), model=partial(seeded, make, seed), loss=loss)


@lru_cache
def losses_of_loop(recipe: str, seed: int = 0, steps: int = STEPS) -> list[float]:
    return micro_batch_loop(training(recipe, plain=True, seed=seed), steps)[0]


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_train_as_a_plain_loop_that_rounds_alike(layout: Layout, recipe: str) -> None:
    found = virtual_run(training(recipe), layout, STEPS).losses
    assert found == pytest.approx(losses_of_loop(recipe), rel=1e-6)
    assert found != pytest.approx(losses_of_loop(""), rel=1e-4)


@pytest.mark.parametrize("layout", FIVE, ids=str)
def test_a_step_in_fp32_by_the_kernel_is_that_of_fp64(layout: Layout) -> None:
    """By the weights of one of nine seeds: by those of the others the sums of some processor move a
    value over an edge.  A kernel that rounds otherwise differs by all of them.
    """
    assert any(
        virtual_run(training("rowwise", dtype=torch.float32, seed=seed), layout, 2).losses
        == pytest.approx(losses_of_loop("rowwise", seed, 2), rel=1e-6)
        for seed in (7, 8, 11, *range(6))
    )


def held_of_weights(training: Training, layout: Layout) -> int:
    """Most bytes, made of weights once a step, that rank 0 holds while it goes backward."""
    plan, most, ranks = compiled(training, layout).plan, [0], {}
    makers = {a.id for a in plan.actors if a.phase == WEIGHTS}
    rings = [r.id for r in plan.registers if r.producer in makers]

    def run(kernel: Kernel, values: list[Tensor]) -> tuple[Tensor, ...]:
        versions = (v for k in rings for v in ranks[0].rings[k].versions.values())
        most.append(sum(x.nbytes for tensors in versions for x in tensors))
        return kernel(values)

    def counted(plan: Plan, rank: int, device: torch.device) -> dict[int, Kernel]:
        kernels = dict(eager_kernels(plan, rank, device))
        backward = (k for k in kernels if plan.actors[k].phase == BACKWARD)
        return kernels | {k: partial(run, kernels[k]) for k in backward if rank == 0}

    made = cluster(training, plan, kernels=counted)
    ranks |= made.ranks
    made.run(1)
    return max(most)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_under_zero_3_scales_alone_are_held_from_forward_to_backward(recipe: str) -> None:
    narrow = [m.weight for m in model(recipe).modules() if isinstance(m, Fp8Linear)]
    scales = sum(sum(weight.shape) for weight in narrow) * torch.float32.itemsize
    held = held_of_weights(training(recipe), Layout(data=2, zero=3))
    assert 0 < held <= 2 * scales


def test_a_pattern_that_names_no_linear_is_refused() -> None:
    with pytest.raises(RecipeError, match="'embed' matches no nn"):
        narrow_products(model(), Fp8(("embed",)))
