"""What only a GPU can show: a rank on CUDA trains as on the CPU, and no step waits for the device.

Relied on of torch: set_sync_debug_mode("error") raises where an op waits for the device.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrun.engine.actors.plan import Plan
from flowrun.engine.ops.nn.attention import attend, attend_backward
from flowrun.engine.ops.nn.ring_attention import Piece, meet
from flowrun.engine.runtime.drivers.distributed import DistributedRank
from flowrun.engine.runtime.drivers.recorder import RecordedRank
from flowrun.engine.runtime.inductor.built import BuiltRegions
from flowrun.engine.runtime.kernels import fused_attention as attention
from flowrun.engine.runtime.kernels.kernels import Kernel, Kernels, eager_kernels
from flowrun.engine.runtime.kernels.overrides import kernel_of
from flowrun.engine.runtime.kernels.region_program import regions_of
from flowrun.engine.runtime.transport.links import Links
from flowrun.engine.trace.trace import What
from flowrun.models.mlp import MLP
from support.layouts.grids import Layout, compiled, initial
from support.layouts.plain_loop import (
    TINY_CONVNET,
    TINY_GPT,
    TINY_MLP,
    Training,
    loss_difference,
    plain_loop,
    seeded,
)
from support.nets.packed import GPT_PACKED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

aten = torch.ops.aten
NARROW = replace(TINY_GPT, autocast=torch.bfloat16)
NARROW_PACKED = replace(GPT_PACKED, autocast=torch.bfloat16)


class Weighed(MLP):
    """Pixels count more to one side, by numbers that are written in forward."""

    def forward(self, x_BI: Tensor) -> Tensor:
        return super().forward(x_BI * torch.tensor([0.5 + k / 64 for k in range(64)]))


NUMBERS = replace(TINY_MLP, model=partial(seeded, partial(Weighed, 64, 12, 10)), pins=())


@pytest.fixture(autouse=True)
def whole_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions too, as on the CPU."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@contextmanager
def a_rank(
    training: Training, compiler: str = "eager", kernels: Kernels = eager_kernels
) -> Iterator[DistributedRank]:
    training = replace(training, batches=4 * training.batches)  # tests run more steps
    plan, device = compiled(training, Layout()).plan, torch.device("cuda", 0)
    kernels = BuiltRegions(plan, "cuda", 1) if compiler == "inductor" else kernels
    with closing(Links(0, device)) as links:
        values = initial(training)
        yield DistributedRank(plan, 0, training.rows, values, device, links, kernels=kernels)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize(
    ("training", "plain"),
    [
        (TINY_MLP, TINY_MLP),
        (TINY_GPT, TINY_GPT),
        (TINY_CONVNET, TINY_CONVNET),
        (NUMBERS, NUMBERS),
        (NARROW, TINY_GPT),
        (GPT_PACKED, GPT_PACKED),
        (NARROW_PACKED, GPT_PACKED),
    ],
    ids=["mlp", "gpt", "convnet", "numbers", "bf16", "packed", "bf16 packed"],
)
def test_a_rank_trains_as_a_plain_loop_on_the_cpu(
    training: Training, plain: Training, compiler: str
) -> None:
    with a_rank(training, compiler) as rank:
        losses = [result["loss"] for result in rank.run(6)]
    within = 1e-4 if training is plain else 2e-2
    assert loss_difference(losses, plain_loop(plain, steps=6)) < within


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize(
    "training",
    [NARROW, NUMBERS, GPT_PACKED, NARROW_PACKED],
    ids=["bf16", "numbers", "packed", "bf16 packed"],
)
def test_no_step_waits_for_the_device(training: Training, compiler: str) -> None:
    with a_rank(training, compiler) as rank:
        try:
            torch.cuda.set_sync_debug_mode("error")
            rank.run(6)  # from the first on
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_batches_are_copied_beside_what_computes() -> None:
    """By a stream of its own, which all reader threads have."""
    with a_rank(TINY_MLP) as rank:
        current = partial(torch.cuda.current_stream, rank.device)
        assert rank.pool.submit(current).result() != current()
        assert current() == torch.cuda.default_stream(rank.device)


def test_each_region_has_acted_before_the_first_step() -> None:
    acted: list[int] = []

    def noted(plan: Plan, rank: int, device: torch.device) -> Mapping[int, Kernel]:
        def act(actor: int, kernel: Kernel, values: list[Tensor]) -> tuple[Tensor, ...]:
            acted.append(actor)
            return kernel(values)

        return {k: partial(act, k, it) for k, it in eager_kernels(plan, rank, device).items()}

    with a_rank(TINY_GPT, kernels=noted) as rank:
        assert set(acted) == dict(regions_of(rank.plan, 0)).keys()


def test_a_trace_tells_the_time_of_the_device() -> None:
    plan, device = compiled(NARROW, Layout()).plan, torch.device("cuda", 0)
    with closing(Links(0, device)) as links:
        rank = RecordedRank(plan, 0, NARROW.rows, initial(NARROW), device, links, trace=2)
        begin = time.perf_counter_ns()
        rank.run(4)
        notes = rank.read_notes()
        end = time.perf_counter_ns()
    computed = sorted((n.begin, n.end) for n in notes if n.what == What.COMPUTE)
    assert computed and begin < computed[0][0] and computed[-1][1] < end
    assert all(one[1] <= other[0] + 1000 for one, other in pairwise(computed))


def _near(dtype: torch.dtype) -> dict[str, Any]:
    return {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [64, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_is_the_cpus(dtype: torch.dtype, width: int, masked: bool, causal: bool) -> None:
    draws = torch.Generator().manual_seed(width)
    query, key, value, grad = (
        torch.randn(2, 65, 3, width, generator=draws).to(dtype).transpose(1, 2) for _ in range(4)
    )
    mask = torch.randn(65, 65, generator=draws).to(dtype) if masked else None
    scale = 0.5 if width == 20 else None
    forward = kernel_of(aten._scaled_dot_product_flash_attention_for_cpu.default)
    backward = kernel_of(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    found = []
    for device in ("cpu", "cuda"):
        q, k, v, g = (x.to(device) for x in (query, key, value, grad))
        how = {"attn_mask": None if mask is None else mask.to(device), "scale": scale}
        out, lse = forward(q, k, v, 0.0, causal, **how)
        grads = backward(g, q, k, v, out, lse, 0.0, causal, **how)
        found.append(
            (out, lse, *grads, *backward(g, q, k, v, out.contiguous(), lse, 0.0, causal, **how))
        )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other.cpu(), one, **_near(dtype))


@pytest.mark.parametrize("width", [64, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_within_documents_is_the_cpus(dtype: torch.dtype, width: int) -> None:
    draws = torch.Generator().manual_seed(width)
    grad, query, key, value = (
        torch.randn(3, 65, 4, width, generator=draws).to(dtype).transpose(1, 2) for _ in range(4)
    )
    scale = 0.5 if width == 20 else None
    documents = torch.tensor([[7, 20, 38, 0], [65, 0, 0, 0], [1, 1, 0, 63]])
    forward, backward = (
        kernel_of(getattr(torch.ops.flowrun, name).default)
        for name in ("document_attention", "document_attention_backward")
    )
    found = []
    for device in ("cpu", "cuda"):
        g, q, k, v, d = (x.to(device) for x in (grad, query, key, value, documents))
        made = forward(q, k, v, d, scale)
        met = meet([Piece(0, 25, 40)], [Piece(0, 65, 0)], causal=True)
        of_some = attend(met, q[:, :, 40:], k, v, documents=d, scale=scale)
        given = g[:, :, 40:], q[:, :, 40:], k, v, *of_some
        of_some += attend_backward(met, *given, documents=d, scale=scale)
        found.append((*made, *backward(g, q, k, v, *made, d, scale), *of_some))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other.cpu(), one, **_near(dtype))
        assert one.stride() == other.stride()


def test_flash_attention_is_what_narrow_heads_take() -> None:
    assert attention._has_flash() == (torch.cuda.get_device_capability()[0] >= 8)
