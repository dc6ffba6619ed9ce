from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flowrun.engine.capture.capture import capture
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ops.math.reduce import log_sum_exp
from flowrun.engine.ops.nn import cross_entropy
from flowrun.engine.ops.nn.loss import nll_of_classes
from flowrun.models import losses
from support.layouts.grids import example, task
from support.layouts.plain_loop import Training, gpt

GPT = gpt(blocks=1, width=16)


def captured(training: Training) -> LogicalGraph:
    return capture(task(training), example(training))


def targets(graph: LogicalGraph) -> set[str]:
    return {op.target for op in graph.ops if "softmax" in op.target or "entropy" in op.target}


def test_a_loss_and_its_gradient_are_made_of_logits() -> None:
    graph = captured(GPT)
    assert targets(graph) == {cross_entropy.FORWARD, cross_entropy.BACKWARD}
    (lse,) = (op for op in graph.ops if op.target == "aten.logsumexp.default")
    assert graph.tensors[lse.makes[0]].shape[1] == 1
    assert {op.target for op in graph.consumers[lse.makes[0]]} == targets(graph)


def test_log_probabilities_that_others_read_too_stay() -> None:
    smoothed = replace(GPT, loss=partial(losses.cross_entropy, label_smoothing=0.1))
    expected = {"aten._log_softmax.default", "aten._log_softmax_backward_data.default"}
    assert targets(captured(smoothed)) == expected


def test_log_probabilities_stay_where_the_task_says_so() -> None:
    graph = capture(replace(task(GPT), keep_logits=False), example(GPT))
    assert cross_entropy.FORWARD not in targets(graph)
    assert "aten._log_softmax.default" in targets(graph)


def test_nothing_as_large_as_narrow_logits_is_wide() -> None:
    graph = captured(replace(GPT, autocast=torch.bfloat16))
    (forward,) = (op for op in graph.ops if op.target == cross_entropy.FORWARD)
    (backward,) = (op for op in graph.ops if op.target == cross_entropy.BACKWARD)
    logits, lse = forward.inputs[:2]
    assert backward.inputs[1] == logits
    like = {t.dtype for t in graph.tensors.values() if t.shape == graph.tensors[logits].shape}
    assert like == {torch.bfloat16} and graph.tensors[lse].dtype == torch.float32


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("over", [False, True], ids=["new", "over its logits"])
def test_the_gradient_of_narrow_logits_is_rounded_once(
    on_cpu: bool, over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(3)).bfloat16() * 9
    lse = log_sum_exp(x, (1,), True, torch.float32)
    torch.testing.assert_close(lse, x.float().logsumexp(1, True))
    rest = (lse, torch.arange(6), None, 1, -100, torch.tensor(6.0), None)
    monkeypatch.setattr(torch.Tensor, "is_cpu", on_cpu)
    wide = cross_entropy.gradient_of_logits(torch.ones(()), x.float(), *rest)
    made = cross_entropy.gradient_of_logits(torch.ones(()), x, *rest, out=x if over else None)
    torch.testing.assert_close(made, wide.bfloat16())
    assert (made is x) == over


@pytest.mark.parametrize("masked", [slice(20, 24), slice(0, 4)], ids=["last", "first"])
@pytest.mark.parametrize("weighed", [False, True])
def test_loss_and_gradient_are_torchs(
    weighed: bool, masked: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words that are masked, targets that are ignored, logits far from 0; on other devices than
    the CPU each class is compared with the target.
    """
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(1)).double() * 30 + 500
    x[:, masked] = -torch.inf
    x.requires_grad_()
    target = torch.arange(40) % 20 + (4 if masked.start == 0 else 0)
    target[::7] = -100
    weight = torch.linspace(0.5, 2, 24).double() if weighed else None
    expected = F.cross_entropy(x, target, weight)
    expected.backward()
    lse = log_sum_exp(x.detach(), (1,), True)
    given = (x.detach(), lse, target, weight, 1, -100)
    loss, total = cross_entropy.loss_of_logits(*given)
    torch.testing.assert_close(loss, expected.detach())
    result = cross_entropy.gradient_of_logits(torch.ones(()).double(), *given, total, None)
    torch.testing.assert_close(result, x.grad)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    result = cross_entropy.gradient_of_logits(torch.ones(()).double(), *given, total, None)
    torch.testing.assert_close(result, x.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [(1,), (0, 2), (-1,)], ids=str)
def test_log_sum_exp_is_torchs(dims: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(2)) * 20).to(dtype)
    x[:, 1] = -torch.inf
    x[1, 2, 3] = torch.inf
    for keepdim in (True, False):
        expected = torch.logsumexp(x.double(), dims, keepdim).to(dtype)
        torch.testing.assert_close(log_sum_exp(x, dims, keepdim), expected)
    assert log_sum_exp(torch.full((2, 3), -torch.inf), (1,)).tolist() == [-torch.inf] * 2


@pytest.mark.parametrize("loss", [cross_entropy.loss_of_logits, nll_of_classes])
def test_a_class_that_is_masked_stands_in_for_no_other(loss: Callable[..., Any]) -> None:
    """Classes 4 to 7 are here, the first of them masked; no target is one of these."""
    x = torch.full((3, 4), -torch.inf)
    x[:, 1:] = 2.0
    between = (x, torch.full((3, 1), 5.0)) if loss is cross_entropy.loss_of_logits else (x,)
    part, total = loss(*between, torch.tensor([0, 1, 2]), None, 2, -100, 4)
    assert (part, total) == (0, 3)
