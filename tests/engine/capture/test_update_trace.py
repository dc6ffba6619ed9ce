from typing import Any

import pytest
import torch
from torch import Tensor

from flowrun.engine.capture.update_trace import (
    keywords_of,
    states_of,
    step_scalars_of,
    trace_update,
)
from flowrun.engine.errors import RecipeError

FP32 = torch.float32


def rooted(
    param: Tensor, grad: Tensor, seen: Tensor, *, step: Tensor, lr: Tensor, power: float = 0.5
) -> Any:
    return param - lr * grad / step**power, seen


def norms(param: Tensor, grad: Tensor, *, lr: Tensor) -> Any:
    return (param - lr * torch.linalg.vector_norm(param) * grad.norm(),)


def test_names_tell_states_fed_numbers_and_keywords() -> None:
    assert states_of(rooted) == (("seen", 0.0),)
    assert step_scalars_of(rooted) == ("step", "lr")
    assert keywords_of(rooted) == {"power": 0.5}


def test_placeholders_come_in_order_and_results_may_be_inputs() -> None:
    program = trace_update(rooted, (3, 4), FP32, (("power", 2.0),))
    assert program.results[1] == "seen"
    read = {name for op in program.ops for name in op.inputs}
    assert read >= {"param", "grad", "step", "lr"}


def test_a_norm_is_traced_as_the_root_of_a_sum_of_squares() -> None:
    targets = [op.target for op in trace_update(norms, (3, 4), FP32, ()).ops]
    assert targets.count("aten.sum.default") == targets.count("aten.sqrt.default") == 2
    assert not any("norm" in target for target in targets)


def test_every_line_is_an_aten_op_with_shape_and_dtype() -> None:
    program = trace_update(norms, (3, 4), FP32, ())
    assert all(op.target.startswith("aten.") for op in program.ops)
    assert program.tensors[program.results[0]].shape == (3, 4)


CONSTANT = torch.ones(4)
REFUSED: dict[str, tuple[Any, str]] = {
    "in place": (lambda param, grad, *, lr: (param.sub_(lr * grad),), "works in place"),
    "by value": (
        lambda param, grad, *, lr: (param if float(grad.sum()) > 0 else param - grad,),
        "could not trace",
    ),
    "too few": (lambda param, grad, seen, *, lr: (param - lr * grad,), "returns 1 tensors"),
    "a scalar": (
        lambda param, grad, *, lr: (lr * grad.sum(),),
        r"the new param is torch.float32 of shape \(\)",
    ),
    "a constant": (
        lambda param, grad, *, lr: (param - lr * grad * CONSTANT,),
        "could not trace|from outside",
    ),
    "any arguments": (lambda param, *rest: (param,), "its arguments are"),
}


@pytest.mark.parametrize(("function", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_an_update_is_refused_by_name(function: Any, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason) as error:
        trace_update(function, (3, 4), FP32, ())
    assert error.value.where == "optim.update" and function.__name__ in error.value.problem
