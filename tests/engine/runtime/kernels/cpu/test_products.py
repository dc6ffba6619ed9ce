"""kernels/cpu/products.py: oneDNN's products are torch's, and only they are replaced.

Relied on of torch: torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], None) is
x @ weight.t() + bias, for strided weights too.
"""

import pytest
import torch

from flowrun.engine.runtime.kernels.cpu import products
from flowrun.engine.runtime.kernels.overrides import kernel_of

aten = torch.ops.aten
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)
SHAPES = [(512, 128, 256), (96, 1000, 104), (4096, 64, 33), (33, 600, 1000), (1, 4096, 2100)]


def _matrix(rows: int, columns: int, transposed: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    if transposed:
        return torch.randn(columns, rows, generator=generator).t()
    return torch.randn(rows, columns, generator=generator)


@needs_onednn
@pytest.mark.parametrize("rule", [products.HALF_WIDTH, products.FULL_WIDTH], ids=["half", "wide"])
@pytest.mark.parametrize("second", [True, False], ids=["second transposed", "second as it lies"])
@pytest.mark.parametrize("first", [True, False], ids=["first transposed", "first as it lies"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_torchs_within_rounding(
    shape: tuple[int, int, int],
    first: bool,
    second: bool,
    rule: products.ProductRule,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "rule", lambda: rule)
    m, k, n = shape
    x, y, bias = _matrix(m, k, first), _matrix(k, n, second), torch.linspace(-1, 1, n)
    assert products._is_large(x, y)
    exact = x.double() @ y.double()
    # fp32 sums of k products of numbers of size 1
    tolerance = {"rtol": 0.0, "atol": 1e-5 * k**0.5}
    made, added = products.mm(x, y), products.addmm(bias, x, y)
    assert made.is_contiguous() and added.is_contiguous()
    torch.testing.assert_close(made.double(), exact, **tolerance)
    torch.testing.assert_close(added.double(), exact + bias.double(), **tolerance)
    assert torch.equal(products.mm_any_stride(x, y), made)


@pytest.mark.parametrize(
    "first",
    [torch.ones(300, 600)[:, ::2], torch.ones(4, 4), torch.ones(400, 300).t()],
    ids=["strided", "small", "transposed, nearly square"],
)
def test_what_gains_nothing_is_torchs_to_the_bit(
    first: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "rule", lambda: products.HALF_WIDTH)
    second = torch.linspace(-1, 1, first.shape[1] * 300).view(first.shape[1], 300)
    assert torch.equal(products.mm(first, second), aten.mm.default(first, second))


@needs_onednn
def test_factors_and_a_matrix_that_is_added_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "rule", lambda: products.FULL_WIDTH)
    first, second = _matrix(512, 128, False), _matrix(128, 256, True)
    added = torch.randn(512, 256)
    for bias, factors in ((added, {}), (added[0], {"beta": 0.5}), (added[:, :1], {})):
        expected = aten.addmm.default(bias, first, second, **factors)
        assert torch.equal(products.addmm(bias, first, second, **factors), expected)


def test_other_ops_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "rule", lambda: products.FULL_WIDTH)
    assert kernel_of(aten.add.Tensor) is aten.add.Tensor
    assert kernel_of(aten.mm.default) is products.mm
    assert kernel_of(aten.addmm.default, any_stride=True) is products.addmm
    assert kernel_of(aten.mm.default, any_stride=True) is products.mm_any_stride
    monkeypatch.setattr(products, "rule", lambda: None)
    assert kernel_of(aten.mm.default) is aten.mm.default


@pytest.mark.parametrize("keys", [16, 512])
def test_a_gradient_of_attention_is_torchs(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the rounding of bf16; where there are many keys, to the bit."""
    monkeypatch.setattr(products, "rule", lambda: products.FULL_WIDTH)
    generator = torch.Generator().manual_seed(keys)
    query, key, value, grad = (
        torch.randn(2, keys, 3, 32, generator=generator).bfloat16().transpose(1, 2)
        for _ in range(4)
    )
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
    given = (grad, query, key, value, out, logsumexp, 0.0, True)
    run = kernel_of(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    expected = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(*given)
    for made, plain in zip(run(*given), expected, strict=True):
        assert (made.dtype, made.stride()) == (plain.dtype, plain.stride())
        if keys == 512:
            assert torch.equal(made, plain)
        torch.testing.assert_close(made, plain, rtol=2**-6, atol=2**-5)
