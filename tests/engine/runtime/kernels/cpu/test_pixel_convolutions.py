"""pixel_convolutions.py: convolutions by one pixel are torch's, whoever multiplies.

Relied on of torch: aten.convolution and its gradients are given to oneDNN where they are dilated.
"""

import pytest
import torch
from torch.autograd.profiler import profile

from flowrun.engine.runtime.kernels.cpu import pixel_convolutions as pointwise
from flowrun.engine.runtime.kernels.cpu import products
from flowrun.engine.runtime.kernels.overrides import kernel_of

aten = torch.ops.aten
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)

# samples, channels, height and width, channels made, stride: a large image, a large weight, and one
# whose sides are no multiples of the stride
SHAPES = [(2, 64, (28, 28), 96, 1), (2, 512, (3, 4), 300, 1), (3, 512, (5, 7), 256, 2)]


def _tensors(
    samples: int, channels: int, size: tuple[int, int], out: int, stride: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(out)
    high, wide = (-(-n // stride) for n in size)
    shapes = ((samples, channels, *size), (out, channels, 1, 1), (samples, out, high, wide))
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, weight, grad


def _given(stride: int = 1, padding: int = 0, groups: int = 1) -> tuple[object, ...]:
    return ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)


@needs_onednn
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_convolution_by_one_pixel_is_torchs_within_rounding(
    shape: tuple[int, int, tuple[int, int], int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "rule", lambda: products.FULL_WIDTH)
    (x, weight, grad), given = _tensors(*shape), _given(shape[-1])
    assert pointwise._is_product(x, weight, given)
    bias = torch.linspace(-1, 1, len(weight))
    made = pointwise.convolution(x, weight, bias, *given)
    exact = aten.convolution(x.double(), weight.double(), bias.double(), *given)
    assert made.stride() == exact.stride()
    # fp32 sums of that many products of numbers of size 1
    torch.testing.assert_close(made.double(), exact, rtol=0.0, atol=1e-5 * shape[1] ** 0.5)

    for wanted in ((True, True, True), (False, True, False), (True, False, False)):
        args = ([len(weight)], *given, wanted)
        found = pointwise.convolution_backward(grad, x, weight, *args)
        exacts = aten.convolution_backward(grad.double(), x.double(), weight.double(), *args)
        for want, one, right in zip(wanted, found, exacts, strict=True):
            assert (one is not None) == want
            if one is not None:
                assert one.stride() == right.stride()
                atol = 1e-5 * max(len(weight), grad[:, 0].numel()) ** 0.5
                torch.testing.assert_close(one.double(), right, rtol=0.0, atol=atol)


@needs_onednn
def test_it_is_onednns_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "rule", lambda: products.FULL_WIDTH)
    x, weight, grad = _tensors(*SHAPES[0])
    with profile(use_cpu=True) as seen:
        kernel_of(aten.convolution.default)(x, weight, None, *_given())
        kernel_of(aten.convolution_backward.default)(
            grad, x, weight, None, *_given(), (True, True, False)
        )
    assert "aten::mkldnn_convolution" in {event.name for event in seen.function_events}
    assert "aten::_slow_conv2d_forward" not in {event.name for event in seen.function_events}


@pytest.mark.parametrize(
    ("weight", "given"),
    [
        (torch.ones(96, 64, 3, 3), _given(padding=1)),
        (torch.ones(96, 64, 1, 1), _given(padding=1)),
        (torch.ones(96, 32, 1, 1), _given(groups=2)),
        (torch.ones(2, 64, 1, 1), _given()),
        (torch.ones(96, 64, 1, 1, dtype=torch.bfloat16), _given()),
    ],
    ids=["three pixels", "padded", "in groups", "small", "bf16"],
)
def test_other_convolutions_are_torchs_to_the_bit(
    weight: torch.Tensor, given: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "rule", lambda: products.FULL_WIDTH)
    x = torch.linspace(-1, 1, 64 * 28 * 28).view(1, 64, 28, 28).to(weight.dtype)
    assert not pointwise._is_product(x, weight, given)
    expected = aten.convolution(x, weight, None, *given)
    assert torch.equal(pointwise.convolution(x, weight, None, *given), expected)


def test_one_along_a_line_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "rule", lambda: products.FULL_WIDTH)
    x, weight, given = torch.ones(4, 64, 500), torch.ones(96, 64, 1), ([1], [0], [1], False, [0], 1)
    assert pointwise.convolution(x, weight, None, *given).shape == (4, 96, 500)
