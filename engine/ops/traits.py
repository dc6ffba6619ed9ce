"""Traits of ops: what passes, costs and the runtime ask of a target beside its signatures.

One table, TARGETS.  What torch says of its own ops (that they return a view, that they draw random
numbers) is asked of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache

import torch

from flowrun.engine.ops.signature import torch_callable


class Trait(Enum):
    """One question, answered yes or no for each target."""

    IDENTITY = "the output is the first input; the runtime runs nothing"
    VIEW = "the output shows the first input, though torch's schema does not say so"
    RESHAPE = "the elements get another shape and keep their order"
    SUM = "runs with every micro-batch and makes one value a step"
    IN_PLACE = "the new values are the variables, changed where they are"
    FUSED = "one kernel over weight, gradient and states"
    PLAIN = "never compiled: fused by hand, of no fixed shape, or summed in an order that counts"
    PRODUCT = "a matrix product, attention or convolution of forward"
    CONSTANT = "a value that is part of the op: the engine's, but with no wish where it is made"


TARGETS: Mapping[Trait, tuple[str, ...]] = {
    Trait.IDENTITY: ("flow.after", "flow.pin", "flow.own", "flow.share"),
    Trait.VIEW: ("aten._unsafe_view.default", "flow.check_range"),
    Trait.RESHAPE: (
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten._reshape_alias.default",
        "aten.reshape.default",
    ),
    Trait.SUM: ("flow.accumulate", "flow.collect"),
    Trait.IN_PLACE: ("flow.adamw", "flow.sgd", "flow.assign", "flow.ema", "flow.update_rows"),
    Trait.FUSED: ("flow.adamw", "flow.sgd"),
    Trait.PLAIN: (
        "flow.accumulate",
        "flow.check_range",
        "flow.adamw",
        "flow.sgd",
        "flow.update_rows",
        "flow.coalesce",
        "aten.embedding_dense_backward.default",
        "aten.scatter_add.default",
    ),
    Trait.PRODUCT: (
        "aten.mm.default",
        "aten.bmm.default",
        "aten.matmul.default",
        "aten.addmm.default",
        "aten.baddbmm.default",
        "aten.convolution.default",
        "transformers.grouped_mm_fallback.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
    ),
    Trait.CONSTANT: ("flow.constant",),
}


def has(target: str, trait: Trait) -> bool:
    """True if the target has the trait."""
    return target in TARGETS[trait]


@cache
def is_view(target: str) -> bool:
    """True if the op makes no new memory: what it makes is its first input, or shows it."""
    if has(target, Trait.IDENTITY) or has(target, Trait.VIEW):
        return True
    if is_engines(target):
        return False
    returns = torch_callable(target)._schema.returns
    return bool(returns) and returns[0].alias_info is not None


@cache
def makes_list(target: str) -> bool:
    """True if the op makes a list of tensors, though it be one (torch.split, unbind)."""
    if is_engines(target):
        return False
    returns = torch_callable(target)._schema.returns
    return len(returns) == 1 and str(returns[0].type).startswith("List")


@cache
def is_random(target: str) -> bool:
    """True if torch draws random numbers for it."""
    if is_engines(target):
        return False
    return torch.Tag.nondeterministic_seeded in torch_callable(target).tags


def is_engines(target: str) -> bool:
    """True for flow.*, ops that torch does not know."""
    return target.startswith("flow.")
