import math
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrun.engine.cost.op_cost import SizedOp
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.hardware.measured_ops import Factors, factor, shapes_of, text_of
from flowrun.engine.ir.graph import FORWARD, LogicalTensor, Op, Ref

SHAPES = st.lists(st.lists(st.integers(1, 4096), min_size=1, max_size=4).map(tuple), max_size=4)
ADD = "aten.add.Tensor"


@given(st.sampled_from(["fp32", "bf16"]), SHAPES.map(tuple))
@settings(max_examples=100)
def test_shapes_are_text_and_back(dtype: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    assert shapes_of(text_of(dtype, shapes)) == (dtype, shapes)


def test_a_scalar_is_one_element() -> None:
    assert text_of("fp32", [(), (3, 4)]) == "fp32 1 3x4"


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=8, unique=True))
@settings(max_examples=100)
def test_what_was_timed_has_its_own_factor(sizes: list[int]) -> None:
    known = Factors({ADD: {text_of("fp32", [(n,)]): 1.0 + n for n in sizes}})
    for n in sizes:
        assert factor(known, ADD, "fp32", ((n,),)) == 1.0 + n


def test_other_shapes_have_the_factor_of_the_nearest() -> None:
    known = Factors({ADD: {"fp32 64x8": 3.0, "fp32 64x512": 2.0, "bf16 32x8": 9.0}})
    assert factor(known, ADD, "fp32", ((32, 8),)) == 3.0
    assert factor(known, ADD, "fp32", ((64, 256),)) == 2.0
    assert factor(known, ADD, "bf16", ((64, 256),)) == 9.0


def test_what_is_unlike_all_that_was_timed_is_foreseen_by_the_formula() -> None:
    known = Factors({ADD: {"fp32 64x8": 3.0}})
    assert factor(known, "aten.mul.Tensor", "fp32", ((64, 8),)) == 1.0
    assert factor(known, ADD, "bf16", ((64, 8),)) == 1.0
    assert factor(known, ADD, "fp32", ((64, 8, 1),)) == 1.0
    assert factor(known, ADD, "fp32", ((64, 8), (64, 8))) == 1.0


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    st.lists(
        st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), max_size=2),
        max_size=8,
        unique_by=str,
    ),
)
@settings(max_examples=200)
def test_the_nearest_is_that_of_looking_at_all(
    shapes: tuple[tuple[int, ...], ...], timed: list[list[tuple[int, ...]]]
) -> None:
    """The first of those that are as near, in octaves over all dims."""
    known = Factors({ADD: {text_of("fp32", each): 2.0 + k for k, each in enumerate(timed)}})
    best, least = 1.0, math.inf
    for k, each in enumerate(timed):
        if list(map(len, each)) == list(map(len, shapes)):
            dims = [zip(one, other, strict=True) for one, other in zip(shapes, each, strict=True)]
            away = sum(sum(abs(math.log2(a / b)) for a, b in pairs) for pairs in dims)
            best, least = (2.0 + k, away) if away < least else (best, least)
    assert factor(known, ADD, "fp32", shapes) == best


def test_an_op_takes_its_factor_times_the_formula() -> None:
    shape = (64, 512)
    op = Op("z", ADD, (Ref("x"), Ref("y")), (), outputs=("z",), module="net", phase=FORWARD)
    tensors = {name: LogicalTensor(name, shape, torch.float32) for name in "xyz"}
    plain = Hardware()
    timed = replace(plain, ops={ADD: {"fp32 64x512 64x512 64x512": 1.75}})
    halved = timed.slow_down(0.5)
    seconds = [
        SizedOp(op, [shape] * 2, [shape], tensors).seconds(h) for h in (plain, timed, halved)
    ]
    assert seconds[1] == 1.75 * seconds[0]
    assert seconds[2] == 2 * seconds[1]
