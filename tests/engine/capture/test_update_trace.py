from typing import Any

import pytest
import torch

from flowrun.engine.capture.update_trace import trace_update
from flowrun.engine.errors import RecipeError

FP32 = torch.float32


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
    assert error.value.where == "optim" and function.__name__ in error.value.problem
