import pytest
import torch

from flowrun.engine.ops.shapes import create
from flowrun.engine.runtime.kernels.overrides import kernel_of

aten = torch.ops.aten


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False)], ids=str)
def test_a_norm_of_narrow_activations_is_the_cpus(
    wanted: tuple[bool, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(6, 32, generator=draws).bfloat16() for _ in range(2))
    weight, bias = (torch.randn(32, generator=draws) for _ in range(2))
    forward = kernel_of(aten.native_layer_norm.default)
    backward = kernel_of(aten.native_layer_norm_backward.default)
    found = []
    for on_cpu in (True, False):
        monkeypatch.setattr(torch.Tensor, "is_cpu", on_cpu)
        made, mean, rstd = forward(x, (32,), weight, bias, 1e-5)
        gradients = backward(grad, x, (32,), mean, rstd, weight, bias, wanted)
        assert [g is not None for g in gradients] == list(wanted)
        found.append([made, mean, rstd, *(g for g in gradients if g is not None)])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)


def test_numbers_are_brought_once_and_handed_out_to_be_written_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brought = []
    monkeypatch.setattr(
        torch, "tensor", lambda *a, of=torch.tensor, **k: brought.append(a) or of(*a, **k)
    )
    one, other = kernel_of(create.constant), kernel_of(create.constant)
    for _ in range(3):
        made = one((1.0, 2.0, 3.0, 4.0), (2, 2), ((1, 1), (0, 2)), dtype=torch.float32)
        assert made.tolist() == [[3.0, 4.0]]
        made.zero_()
    assert other((5, 6), (2,), dtype=torch.int64).tolist() == [5, 6]
    assert len(brought) == 2
