from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.ops.flow.recurrent import run, run_backward
from support.checks.bf16_lstm import need_lstm

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}


def both_sides(
    kind: str, both_ways: bool, autocast: torch.dtype | None = None
) -> tuple[list[Tensor], list[Tensor], list[Any], Any]:
    """Return output and gradients of torch's module, outputs of the op, arguments of its backward,
    and the gradient of the output.
    """
    module = KINDS[kind](4, 6, bidirectional=both_ways)
    x, ways = torch.randn(9, 3, 4), 1 + both_ways
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        out = module(x.requires_grad_().view_as(x))[0]
    grad = torch.randn_like(out)
    weights = list(module.parameters())
    expected = [out.detach(), *torch.autograd.grad(out, [x, *weights], grad)]
    states = [torch.zeros(ways, 3, 6)] * (2 if kind == "lstm" else 1)
    read = [each.detach() for each in (x, *states, *weights)]
    made = run(read, kind, both_ways, True, autocast)
    return expected, made, [read, made[-1], kind, both_ways, autocast], grad


def gradients(given: list[Any], grad: Tensor) -> list[Any]:
    states = 2 if given[2] == "lstm" else 1
    of_x, *rest = run_backward([grad, *[None] * states], *given)
    return [of_x, *rest[states:]]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_torch(
    kind: str, both_ways: bool, autocast: torch.dtype | None
) -> None:
    need_lstm(kind, autocast)
    expected, made, given, grad = both_sides(kind, both_ways, autocast)
    actual = [made[0], *gradients(given, grad)]
    assert all(map(torch.equal, actual, expected))
    assert not any(each.requires_grad for each in made)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_what_is_kept_does_as_well(kind: str) -> None:
    expected, _, given, grad = both_sides(kind, True)
    given[1] = given[1].clone()
    assert all(map(torch.equal, gradients(given, grad), expected[1:]))


def test_backward_may_run_again() -> None:
    _, _, given, grad = both_sides("gru", False)
    assert all(map(torch.equal, gradients(given, grad), gradients(given, grad)))


def test_what_is_kept_takes_no_memory_of_its_own_and_has_its_size_as_a_shape() -> None:
    _, made, *_ = both_sides("lstm", True)
    assert made[-1].data_ptr() == made[0].data_ptr()
    assert made[-1].shape == (9, 3, 2 * 17 * 6)


def test_gradients_that_nobody_wants_are_not_computed() -> None:
    _, _, given, grad = both_sides("gru", False)
    wanted = (False, True, False, True, False, True)
    found = run_backward([grad, None], *given, wanted=wanted)
    assert [each is not None for each in found] == [*wanted]


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # it is not oneDNN's kernel
def test_a_cell_stays_as_wide_as_it_comes_where_the_output_is_projected() -> None:
    module = nn.LSTM(4, 6, proj_size=2)
    x, h, c = torch.randn(9, 3, 4), torch.randn(1, 3, 2).bfloat16(), torch.randn(1, 3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        out, last = module(x, (h, c))
    read = [each.detach() for each in (x, h, c, *module.parameters())]
    made = run(read, "lstm", False, False, torch.bfloat16)
    assert made[2].dtype == torch.float32
    assert all(map(torch.equal, made, (out, *last)))
