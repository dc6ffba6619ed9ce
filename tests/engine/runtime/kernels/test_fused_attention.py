"""Fused attention: which kernel runs, and the shapes that it makes, without a GPU.

What the kernels compute, tests/engine/runtime/test_cuda.py compares with the CPU's, on a GPU or on
the stand-in for one (.ci/gpu).
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flowrun.engine import torch_internals as internals
from flowrun.engine.runtime.kernels import fused_attention as attention
from flowrun.engine.runtime.kernels.overrides import kernel_of

aten = torch.ops.aten
EQUAL, ODD = (2, 3, 64, 64, 16), (1, 2, 33, 20, 12)  # samples, heads, queries, keys, width


def _given(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Gradient, query, key and value as heads of one product lie."""
    samples, heads, queries, keys, width = shape
    draws = torch.Generator().manual_seed(width)
    return tuple(
        torch.randn(samples, n, heads, width, generator=draws).to(dtype).transpose(1, 2)
        for n in (queries, queries, keys, keys)
    )


@pytest.fixture
def forgotten() -> Iterator[None]:
    yield
    attention._cudnn_stats.cache_clear()


def test_cudnns_is_used_where_torch_would_and_it_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    _, query, key, value = _given(EQUAL, torch.bfloat16)
    monkeypatch.setattr(attention, "_cudnn_choices", {})
    assert not attention._is_cudnn(query, key, value, None, True)  # on a CPU
    monkeypatch.setattr(attention, "_cudnn_choices", {})
    monkeypatch.setattr(attention, "_cudnn_stats", lambda device: (1,))
    monkeypatch.setattr(internals, "choose_attention", lambda *given: 3)
    assert attention._is_cudnn(query, key, value, None, True)
    assert not attention._is_cudnn(query, key, value, torch.zeros(64, 64), False)
    assert not attention._is_cudnn(query.to("meta"), key, value, None, True)


@pytest.mark.filterwarnings("default:attention is FlashAttention's")
def test_cudnns_is_not_used_where_it_fails(
    forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, query, key, value = _given(EQUAL, torch.bfloat16)
    monkeypatch.setattr(attention, "_cudnn_choices", {})
    monkeypatch.setattr(internals, "choose_attention", lambda *given: 3)
    with pytest.warns(UserWarning, match="instead of cuDNN's attention: .*backend"):
        assert not attention._is_cudnn(query, key, value, None, True)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["heads", "tokens"])
@pytest.mark.parametrize("cut", [False, True])
def test_results_of_cudnn_lie_as_those_of_flash_attention(
    order: tuple[int, ...], cut: bool
) -> None:
    sizes = [(2, 3, 33, 64)[d] for d in order]
    whole = torch.empty(*sizes[:3], 3 * 64, dtype=torch.bfloat16, device="meta").permute(order)
    q, k, v = whole.split(64, 3) if cut else (whole[..., :64].clone() for _ in range(3))
    one, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
    other, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    assert one.stride() == other.stride() and lse.shape[:3] == (2, 3, 33)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_shapes_are_known_without_a_device(dtype: torch.dtype) -> None:
    given = [x.to("meta") for x in _given(ODD, dtype)]
    grad, query, key, value = given
    run = kernel_of(aten._scaled_dot_product_flash_attention_for_cpu.default)
    out, lse = run(query, key, value, 0.0, True)
    assert (out.shape, out.dtype, lse.shape) == (query.shape, dtype, query.shape[:3])
    run = kernel_of(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    grads = run(grad, query, key, value, out, lse, 0.0, True)
    assert [x.shape for x in grads] == [x.shape for x in (query, key, value)]


def test_half_precision_without_a_mask_is_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16), torch.zeros(1, 1, 8, 64)
    mask = torch.zeros(8, 8)
    assert attention.is_flash(narrow, None)
    assert not attention.is_flash(narrow, mask)
    assert not attention.is_flash(wide, None)
    assert not attention.is_flash(torch.zeros(1, 1, 8, 264, dtype=torch.bfloat16), None)
    monkeypatch.setattr(attention, "_has_flash", lambda: False)
    assert not attention.is_flash(narrow, None)


def test_on_the_cpu_nothing_changes() -> None:
    _, query, key, value = _given(ODD, torch.float32)
    run = aten._scaled_dot_product_flash_attention_for_cpu.default
    for made, plain in zip(
        kernel_of(run)(query, key, value, 0.0, True), run(query, key, value, 0.0, True), strict=True
    ):
        assert torch.equal(made, plain)
