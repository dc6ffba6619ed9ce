"""kernels/packed_attention.py: what is asked of torch's CUDA kernels, which this machine may lack.

Relied on of torch: names, arguments and results of `_flash_attention_forward`,
`_efficient_attention_forward` and of their gradients, for a list of tokens.  Here stand-ins on the
CPU take the same arguments, insist on what the kernels insist on, and compute by the formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrun.engine.ops.nn import document_op as op
from flowrun.engine.runtime.kernels import packed_attention as packed

aten = torch.ops.aten
LENGTH = 20


def _pieces(starts: Tensor, longest: int) -> Iterator[tuple[int, int]]:
    """Yield where documents with tokens begin and end."""
    assert starts.dtype == torch.int32 and starts[0] == 0
    for start, end in pairwise(starts.tolist()):
        assert 0 <= end - start <= longest
        if end > start:
            yield start, end


def _run(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float) -> Any:
    """Return output (tokens, heads, width) and logsumexp (heads, tokens)."""
    out, rows = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for x in (q, k, v):
        assert x.dim() == 3 and x.shape[-1] % 8 == 0 and x.stride(-1) == 1
    for start, end in _pieces(starts, longest):
        part = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        made, lse = aten._scaled_dot_product_flash_attention_for_cpu(*part, 0.0, True, scale=scale)
        out[start:end], rows[:, start:end] = made[0].transpose(0, 1), lse[0]
    return out, rows


def _run_backward(tensors: Any, rows: Tensor, starts: Tensor, longest: int, scale: float) -> Any:
    grads = tuple(torch.empty_like(x) for x in tensors[1:4])
    for start, end in _pieces(starts, longest):
        part = [x[start:end].transpose(0, 1).unsqueeze(0) for x in tensors]
        made = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *part, rows[:, start:end].contiguous().unsqueeze(0), 0.0, True, scale=scale
        )
        for grad, new in zip(grads, made, strict=True):
            grad[start:end] = new[0].transpose(0, 1)
    return grads


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    of_keys: Tensor,
    longest: int,
    keys: int,
    p: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
    **more: Any,
) -> Any:
    assert q.dtype == torch.bfloat16 and causal and not debug and p == 0
    assert torch.equal(starts, of_keys) and longest == keys == LENGTH
    out, rows = _run(q, k, v, starts, longest, scale)
    seed = torch.zeros(2, dtype=torch.uint64)
    return out, rows, seed, seed[0], torch.empty(0)


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    rows: Tensor,
    starts: Tensor,
    of_keys: Tensor,
    longest: int,
    keys: int,
    p: float,
    causal: bool,
    seed: Tensor,
    offset: Tensor,
    *,
    scale: float,
    **more: Any,
) -> Any:
    assert rows.shape == (q.shape[1], len(q)) and rows.dtype == torch.float32 and causal
    assert (seed.shape, seed.dtype, offset.shape) == ((2,), torch.uint64, ())
    return _run_backward((grad, q, k, v, out), rows, starts, longest, scale)


def efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    starts: Tensor,
    of_keys: Tensor,
    longest: int,
    keys: int,
    p: float,
    kind: int,
    wants_rows: bool = False,
    *,
    scale: float,
    **more: Any,
) -> Any:
    assert bias is None and kind == 1 and wants_rows and len(q) == 1
    out, rows = _run(q[0], k[0], v[0], starts, longest, scale)
    padded = torch.full((len(starts) - 1, len(rows), longest + -longest % 32), math.inf)
    for k_, (start, end) in enumerate(pairwise(starts.tolist())):
        padded[k_, :, : end - start] = rows[:, start:end]
    seed = torch.zeros((), dtype=torch.int64)
    return out.unsqueeze(0), padded, seed, seed.clone(), longest, keys


def efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    starts: Tensor,
    of_keys: Tensor,
    longest: int,
    keys: int,
    rows: Tensor,
    p: float,
    seed: Tensor,
    offset: Tensor,
    kind: int,
    bias_grad: bool,
    *,
    scale: float,
    **more: Any,
) -> Any:
    assert bias is None and kind == 1 and not bias_grad and rows.shape[-1] % 32 == 0
    spans = enumerate(pairwise(starts.tolist()))
    flat = torch.cat([rows[n, :, : end - start] for n, (start, end) in spans], 1)
    tensors = [x[0] for x in (grad, q, k, v, out)]
    made = _run_backward(tensors, flat, starts, longest, scale)
    return *(x.unsqueeze(0) for x in made), torch.empty(())


@pytest.fixture
def kernels() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, stand_in in {
            "_flash_attention_forward": flash,
            "_flash_attention_backward": flash_backward,
            "_efficient_attention_forward": efficient,
            "_efficient_attention_backward": efficient_backward,
        }.items():
            library.impl(name, stand_in, "CPU")
        yield


def given(dtype: torch.dtype, width: int = 12) -> tuple[Tensor, ...]:
    """Gradient, query, key and value as heads of one product lie, and documents."""
    draws = torch.Generator().manual_seed(1)
    shape = (3, LENGTH, 2, width)
    tensors = (torch.randn(shape, generator=draws).to(dtype).transpose(1, 2) for _ in range(4))
    documents = torch.tensor([[7, 4, 9, 0], [LENGTH, 0, 0, 0], [1, 1, 0, LENGTH - 2]])
    return *tensors, documents


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_of_cuda_do_what_the_one_of_the_cpu_does(
    dtype: torch.dtype, scale: float | None, kernels: None
) -> None:
    grad, query, key, value, documents = given(dtype)
    rest = (query, key, value)
    near = (
        {"rtol": 2**-6, "atol": 2**-5} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    )
    out, rows = op.document_attention(*rest, documents, scale)
    found, lse = packed._forward(*rest, documents, scale)
    torch.testing.assert_close(found, out, **near)
    torch.testing.assert_close(lse, rows, **near)
    assert (found.stride(), lse.stride()) == (out.stride(), rows.stride())
    expected = op.document_attention_backward(grad, *rest, out, rows, documents, scale)
    grads = packed._backward(grad, *rest, found, lse, documents, scale)
    for made, plain in zip(grads, expected, strict=True):
        torch.testing.assert_close(made, plain, **near)
        assert made.stride() == plain.stride()


def test_documents_that_do_not_fill_their_sample_stop_the_device(kernels: None) -> None:
    *_, query, key, value, documents = given(torch.float32)
    for wrong in (documents - torch.tensor([1, 0, 0, 0]), documents - torch.tensor([-2, 2, 0, 0])):
        with pytest.raises(RuntimeError, match="documents do not fill their sample"):
            packed._forward(query, key, value, wrong, None)


def test_on_the_cpu_each_document_has_the_gradient_that_suits_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grad, *rest, documents = given(torch.float32)
    made = op.document_attention(*rest, documents, None)
    run = torch.ops.flowrun.document_attention_backward.default
    sizes, plain = [], packed.products.attention_backward

    def counted(*given: Any, **more: Any) -> Any:
        sizes.append(given[0].shape[2])
        return plain(*given, **more)

    monkeypatch.setattr(packed.products, "attention_backward", counted)
    found = run(grad, *rest, *made, documents, None)
    assert sizes == [7, 4, 9, LENGTH, 1, 1, LENGTH - 2]
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    expected = op.run_backward(kernel, grad, *rest, *made, documents, None)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
