"""flow.check: an op of torch's that makes nothing and is run for what it does, such as an assert.

It is there with `engine.check` alone (joint_graph.py).  The loss waits for it, by flow.after.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowrun.engine.ir.op_info import OpInfo, Trait
from flowrun.engine.ir.signature import LocalCall, LocalView, torch_callable, whole


def check(
    args: tuple[object, ...], target: str, module: str, line: str, **kwargs: object
) -> torch.Tensor:
    """Run the op `target`; return a number that stands for its success.

    args, kwargs: of the op.  module, line: the user's, for the error.
    Raises AssertionError with torch's message, the module and the user's line.
    """
    try:
        torch_callable(target)(*args, **kwargs)
    except RuntimeError as error:
        where = f"module {module}" if module else "the model"
        said = str(error).splitlines()[0]
        raise AssertionError(f"{said} ({where}{f', {line}' if line else ''})") from error
    return torch.ones((), dtype=torch.bool)


def local_check(view: LocalView) -> LocalCall:
    """The function, with what says where it stands."""
    args, target, line = view.op.args
    return LocalCall(check, (args, target, view.op.module, line), view.op.kwargs)


ASSERT, AFTER = "flow.check", "flow.after"  # flow.after: its first input, once the others are made

# An assert is of the whole tensor, and the loss waits with every rank.
OPS: Mapping[str, OpInfo] = {
    ASSERT: OpInfo(whole, local=local_check),
    AFTER: OpInfo(whole, traits=(Trait.IDENTITY, Trait.ALIASES)),
}
