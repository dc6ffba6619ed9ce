"""kernels/attention.py: what is asked of torch's CUDA kernels, which this machine may lack.

Relied on of torch: names, arguments and results of `_scaled_dot_product_flash_attention`,
`…_cudnn_attention` and `…_efficient_attention` and of their gradients, None for the places of
sequences of many lengths.
Here stand-ins on the CPU take the same arguments, insist on what the kernels insist on, and compute
by the formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrun.engine.runtime.kernels import fused_attention as attention
from flowrun.engine.runtime.kernels.overrides import kernel_of

aten = torch.ops.aten
SHAPES = {"equal": (2, 3, 64, 64, 16), "odd": (1, 2, 33, 20, 12)}


def _scores(
    query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    made = (query.float() @ key.float().mT) * (scale or query.shape[-1] ** -0.5)
    made = made if bias is None else made + bias.float()
    return made.masked_fill(torch.ones_like(made).triu(1).bool(), -math.inf) if causal else made


def _insist(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.shape[-1] % 8 == 0 and x.stride(-1) == 1


def _forward(query: Tensor, key: Tensor, value: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    _insist(query, key, value)
    return (scores.softmax(-1) @ value.float()).to(query.dtype), scores.logsumexp(-1)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, p: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    _insist(grad, query, key, value, out)
    given = (grad, query, key, value, out)
    g, q, k, v, o = (x.float() for x in given)
    ds = p * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * scale
    return tuple(x.to(query.dtype) for x in (ds @ k, ds.mT @ q, p.mT @ g))  # type: ignore[return-value]


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    assert q.dtype in (torch.bfloat16, torch.float16) and not debug and p == 0
    out, lse = _forward(q, k, v, _scores(q, k, None, causal, scale))
    return out, lse, None, None, q.shape[2], k.shape[2], lse.new_empty(2), lse.new_empty(()), out


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    of_queries: Tensor | None,
    of_keys: Tensor | None,
    queries: int,
    keys: int,
    p: float,
    causal: bool,
    seed: Tensor,
    offset: Tensor,
    *,
    scale: float | None = None,
) -> Any:
    assert (of_queries, of_keys, queries, keys) == (None, None, q.shape[2], k.shape[2]) and p == 0
    assert (seed.shape, seed.dtype, offset.shape) == ((2,), torch.uint64, ())
    p_ = (_scores(q, k, None, causal, scale) - lse.unsqueeze(-1)).exp()
    return _backward(grad, q, k, v, out, p_, scale or q.shape[-1] ** -0.5)


def cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    wants_lse: bool,
    p: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    assert bias is None and wants_lse
    out, lse, *rest = flash(q, k, v, p, causal, debug, scale=scale)
    return out, lse.unsqueeze(-1), *rest


def cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    of_queries: Tensor | None,
    of_keys: Tensor | None,
    queries: int,
    keys: int,
    p: float,
    causal: bool,
    *,
    scale: float | None = None,
) -> Any:
    assert (of_queries, of_keys, queries, keys) == (None, None, q.shape[2], k.shape[2]) and p == 0
    assert bias is None and lse.shape == (*q.shape[:3], 1)
    p_ = (_scores(q, k, None, causal, scale) - lse).exp()
    return _backward(grad, q, k, v, out, p_, scale or q.shape[-1] ** -0.5)


def efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    wants_lse: bool,
    p: float = 0.0,
    causal: bool = False,
    *,
    scale: float,
) -> Any:
    _insist_on_bias(bias, q, k)
    assert wants_lse and p == 0
    out, lse = _forward(q, k, v, _scores(q, k, bias, causal, scale))
    seed = torch.zeros((), dtype=torch.int64)
    rows = torch.nn.functional.pad(lse, (0, -q.shape[2] % 32), value=math.inf)
    return out, rows, seed, seed.clone()


def efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    p: float,
    wanted: list[bool],
    causal: bool = False,
    *,
    scale: float,
) -> Any:
    _insist_on_bias(bias, q, k)
    assert lse.shape[-1] % 32 == 0 and wanted == [True, True, True, False] and p == 0
    rows = lse[..., : q.shape[2], None]
    return *_backward(
        grad, q, k, v, out, (_scores(q, k, bias, causal, scale) - rows).exp(), scale
    ), None


def _insist_on_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> None:
    if bias is not None:
        assert bias.dtype == q.dtype and bias.shape == (*q.shape[:3], k.shape[2])
        assert bias.stride(-1) == 1 and all(n % 16 == 0 for n in bias.stride()[:-1])


@pytest.fixture
def kernels() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, stand_in in {
            "_scaled_dot_product_flash_attention": flash,
            "_scaled_dot_product_flash_attention_backward": flash_backward,
            "_scaled_dot_product_cudnn_attention": cudnn,
            "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
            "_scaled_dot_product_efficient_attention": efficient,
            "_scaled_dot_product_efficient_attention_backward": efficient_backward,
        }.items():
            library.impl(name, stand_in, "CPU")
        yield


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


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_cudnns_does_so_too(
    shape: tuple[int, ...],
    causal: bool,
    scale: float | None,
    kernels: None,
    forgotten: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grad, query, key, value = _given(shape, torch.bfloat16)
    monkeypatch.setattr(attention, "_is_cudnn", lambda *given: False)
    expected = attention._attention(query, key, value, None, causal, scale)
    grads = attention._attention_backward(grad, query, key, value, *expected, None, causal, scale)
    monkeypatch.setattr(attention, "_is_cudnn", lambda *given: True)
    found = attention._attention(query, key, value, None, causal, scale)
    for made, other in zip(found, expected, strict=True):
        assert torch.equal(made, other)
    again = attention._attention_backward(grad, query, key, value, *found, None, causal, scale)
    for made, other in zip(again, grads, strict=True):
        assert torch.equal(made, other)


def test_cudnns_is_used_where_torch_would_and_it_agrees(
    kernels: None, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, query, key, value = _given(SHAPES["equal"], torch.bfloat16)
    monkeypatch.setattr(attention, "_cudnn_choices", {})
    assert not attention._is_cudnn(query, key, value, None, True)  # on a CPU
    monkeypatch.setattr(attention, "_cudnn_choices", {})
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *given: 3)
    assert attention._is_cudnn(query, key, value, None, True)
    assert not attention._is_cudnn(query, key, value, torch.zeros(64, 64), False)
    assert not attention._is_cudnn(query.to("meta"), key, value, None, True)


@pytest.mark.filterwarnings("default:attention is FlashAttention's")
def test_cudnns_is_not_used_where_it_fails(
    forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, query, key, value = _given(SHAPES["equal"], torch.bfloat16)
    monkeypatch.setattr(attention, "_cudnn_choices", {})
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *given: 3)
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


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("how", ["plain", "causal", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernels_of_cuda_do_what_the_one_of_the_cpu_does(
    shape: tuple[int, ...], dtype: torch.dtype, how: str, scale: float | None, kernels: None
) -> None:
    grad, query, key, value = _given(shape, dtype)
    causal = how == "causal"
    mask = None
    if how == "masked":
        mask = torch.randn(shape[2:4], generator=torch.Generator().manual_seed(3)).to(dtype)
    out, lse = attention._attention(query, key, value, mask, causal, scale)
    run = aten._scaled_dot_product_flash_attention_for_cpu.default
    expected, rows = run(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    near = (
        {"rtol": 2**-6, "atol": 2**-5} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    )
    torch.testing.assert_close(out, expected, **near)
    torch.testing.assert_close(lse, rows, **near)
    assert lse.dtype == torch.float32
    grads = attention._attention_backward(grad, query, key, value, out, lse, mask, causal, scale)
    run = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    wanted = run(grad, query, key, value, expected, rows, 0.0, causal, attn_mask=mask, scale=scale)
    for made, plain in zip(grads, wanted, strict=True):
        torch.testing.assert_close(made, plain, **near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_shapes_are_known_without_a_device(dtype: torch.dtype) -> None:
    given = [x.to("meta") for x in _given(SHAPES["odd"], dtype)]
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
    _, query, key, value = _given(SHAPES["odd"], torch.float32)
    run = aten._scaled_dot_product_flash_attention_for_cpu.default
    for made, plain in zip(
        kernel_of(run)(query, key, value, 0.0, True), run(query, key, value, 0.0, True), strict=True
    ):
        assert torch.equal(made, plain)
