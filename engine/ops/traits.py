"""Questions about a target that are answered by yes or no, as passes, costs and the runtime ask.

What torch says of its own ops (that they return a view, that they draw random numbers) is asked of
torch.
"""

from __future__ import annotations

from functools import cache

import torch

from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ir.signature import torch_callable
from flowrun.engine.ops.registry import info
from flowrun.engine.torch_internals import schema_of


def has(target: str, trait: Trait) -> bool:
    """True if the target has the trait."""
    return trait in info(target).traits


@cache
def is_view(target: str) -> bool:
    """True if the op makes no new memory: what it makes is its first input, or shows it."""
    if has(target, Trait.IDENTITY) or has(target, Trait.VIEW):
        return True
    if is_engine_op(target):
        return False
    returns = schema_of(torch_callable(target)).returns
    return bool(returns) and returns[0].alias_info is not None


@cache
def makes_list(target: str) -> bool:
    """True if the op makes a list of tensors, though it be one (torch.split, unbind)."""
    if is_engine_op(target):
        return False
    returns = schema_of(torch_callable(target)).returns
    return len(returns) == 1 and str(returns[0].type).startswith("List")


@cache
def is_random(target: str) -> bool:
    """True if torch draws random numbers for it."""
    if is_engine_op(target):
        return False
    return torch.Tag.nondeterministic_seeded in torch_callable(target).tags


def is_engine_op(target: str) -> bool:
    """True for flow.*, ops that torch does not know."""
    return target.startswith("flow.")
