"""Whatever differs in what a compiler is given gives another digest; what hides parts, none."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.ir.graph import Feed, LogicalGraph, LogicalTensor, Op, Ref, Variable
from flowrun.engine.ir.placement import Placement
from flowrun.engine.ir.sbp import B, S
from flowrun.engine.strategy import (
    Decided,
    LossScale,
    Optimizer,
    ParameterGroup,
    Pin,
    Preparation,
    Strategy,
)
from flowrun.launcher.job.digest import Undigested, digest

GRAPH = LogicalGraph(
    ops=(
        Op(
            "double",
            "aten.mul.Tensor",
            (Ref("x"), 2.0, (1, 2)),
            (("dtype", torch.float32),),
            outputs=("double",),
            module="net.body",
            in_sbp=((B,),),
            out_sbp=((S(0),),),
            moment=3,
        ),
    ),
    tensors={"x": LogicalTensor("x", (4, 2), torch.float32)},
    variables=(Variable("w", "w", "parameter", "w'", aliases=("tied",), nd_sbp=(B,)),),
    feeds=(Feed("x", "x", values=(0.1,)),),
    results=(("loss", "double"),),
    notes=("a note",),
)
STRATEGY = Strategy(
    axes=("data",),
    placements=(Placement((("data", 2),), (0, 1)),),
    pins=(Pin("w", "variable", "data", S(0)),),
    stage_modules=(("net.*",),),
    decided=Decided(((("net", "aten.mm", 0), 1),), (("w", 1),)),
    optimizer=Optimizer(arguments=(("lr", 0.1),), groups=(ParameterGroup("w", (("lr", 0.2),)),)),
    loss_scale=LossScale(),
    preparation=(Preparation("decode", 0.1, 10),),
    hardware=Hardware(ops={"aten.mm.default": {"fp32 8x8": 1.5}}),
)


def others(value: Any) -> Iterator[Any]:
    """Values that differ from one in a single place, however deep."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1 if value < 1e300 else 1.0
        yield str(value)
    elif isinstance(value, str):
        yield f"{value}_"
    elif isinstance(value, torch.dtype):
        yield torch.int8
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from ({**value, key: other} for other in others(item))
            yield from ({other: item} for other in others(key))
        yield {**value, "one more": 1}
    elif isinstance(value, tuple):
        for k, item in enumerate(value):
            yield from ((*value[:k], other, *value[k + 1 :]) for other in others(item))
        yield (*value, "one more")
    elif value is None:
        yield 1
    elif dataclasses.is_dataclass(value):
        for name in (field.name for field in dataclasses.fields(value) if field.init):
            yield from (with_field(value, name, other) for other in others(getattr(value, name)))


def with_field(value: Any, name: str, other: Any) -> Any:
    """As `replace`, for values that a class's own checks would not let pass."""
    made = copy.copy(value)
    object.__setattr__(made, name, other)
    return made


@pytest.mark.parametrize("value", [GRAPH, STRATEGY], ids=["graph", "strategy"])
def test_every_field_counts_however_deep(value: Any) -> None:
    known = digest(value)
    assert digest(copy.deepcopy(value)) == known
    found = [digest(other) for other in others(value)]
    assert len(found) > 60
    assert known not in found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ((1, 2), [1, 2]),
        (((1,), 2), ((1, 2),)),
        ("1", 1),
        (1, True),
        (0.0, -0.0),
        (1.0, 1),
        ("a\nint 1", "a"),
        (("a", "b"), ("a\nstr 'b'",)),
        (torch.float32, torch.float16),
        (torch.device("cpu"), torch.device("meta")),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 1), torch.zeros(1, 2)),
        (frozenset({1, 2}), frozenset({1, 3})),
    ],
    ids=repr,
)
def test_other_values_have_another_digest(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)
    assert digest(one) == digest(copy.deepcopy(one))


def test_the_order_of_a_set_does_not_count() -> None:
    words = [f"word {k}" for k in range(50)]
    assert digest(frozenset(words)) == digest(frozenset(reversed(words)))


@pytest.mark.parametrize(
    "hides", [threading.Lock(), len, functools.partial(len), nn.Linear(2, 2), Undigested, lambda: 0]
)
def test_what_may_hide_something_is_refused(hides: Any) -> None:
    with pytest.raises(Undigested):
        digest([replace(GRAPH, notes=(hides,))])
