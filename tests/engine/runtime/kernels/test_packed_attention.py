"""Attention within documents: what is refused, and the kernel of each document on a CPU.

What CUDA's kernels compute, tests/engine/runtime/test_cuda.py compares with the CPU's.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from flowrun.engine.ops.nn import document_op as op
from flowrun.engine.runtime.kernels import packed_attention as packed

aten = torch.ops.aten
LENGTH = 20


def given(dtype: torch.dtype, width: int = 12) -> tuple[Tensor, ...]:
    """Gradient, query, key and value as heads of one product lie, and documents."""
    draws = torch.Generator().manual_seed(1)
    shape = (3, LENGTH, 2, width)
    tensors = (torch.randn(shape, generator=draws).to(dtype).transpose(1, 2) for _ in range(4))
    documents = torch.tensor([[7, 4, 9, 0], [LENGTH, 0, 0, 0], [1, 1, 0, LENGTH - 2]])
    return *tensors, documents


def test_documents_that_do_not_fill_their_sample_stop_the_device() -> None:
    *_, documents = given(torch.float32)
    for wrong in (documents - torch.tensor([1, 0, 0, 0]), documents - torch.tensor([-8, 8, 0, 0])):
        with pytest.raises(RuntimeError, match="documents do not fill their sample"):
            packed._starts(wrong, LENGTH)


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
