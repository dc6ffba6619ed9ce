from functools import partial
from typing import Any

import pytest

from flowrun.engine.ir.graph import Ref
from flowrun.engine.ir.sbp import B, S
from flowrun.engine.ir.signature import LocalCall
from flowrun.engine.ops.flow import update
from flowrun.engine.runtime.inductor.built import BuiltRegions
from flowrun.engine.runtime.kernels.kernels import batch_updates
from flowrun.engine.runtime.kernels.program import ProgramCall, describe
from support.layouts.grids import Layout, compiled
from support.layouts.plain_loop import gpt

GPT = gpt(blocks=3, width=16)


def regions(layout: Layout) -> BuiltRegions:
    return BuiltRegions(compiled(GPT, layout).plan, "cpu", 1)


def scaled(factor: float) -> Any:
    def scale(x: float) -> float:
        return x * factor

    return scale


def test_equal_blocks_are_compiled_once() -> None:
    two, three = (
        len(BuiltRegions(compiled(gpt(n, 16), Layout()).plan, "cpu", 1).different) for n in (2, 3)
    )
    assert two == three


def test_ranks_that_hold_equal_parts_share_all_programs() -> None:
    data = regions(Layout(data=2))
    assert len(data.different) == len(regions(Layout()).different)


def test_ranks_that_hold_other_rows_of_a_table_look_them_up_by_themselves() -> None:
    def lookups(layout: Layout) -> int:
        parts = regions(layout).different.values()
        return sum("look_up_rows" in str(part.piece.program) for part in parts)

    assert (lookups(Layout(data=2)), lookups(Layout(tensor=2))) == (0, 2)


def test_text_is_the_same_in_the_next_process() -> None:
    parts = regions(Layout(data=2, tensor=2, clip_norm=1.0)).different.values()
    assert not [part for part in parts if " at 0x" in str(part.piece.program)]


def test_a_program_is_another_with_more_threads_or_other_settings_of_inductor() -> None:
    plan = compiled(GPT, Layout()).plan
    others = ((1, {}), (2, {}), (1, {"max_autotune": True}), (1, {"max_autotune": False}))
    keys = [set(BuiltRegions(plan, "cpu", n, options.items()).different) for n, options in others]
    assert len({*keys[0], *keys[1], *keys[2], *keys[3]}) == sum(map(len, keys))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (scaled(2.0), scaled(2.0), True),
        (scaled(2.0), scaled(3.0), False),
        (partial(max, 1), partial(max, 1), True),
        (partial(max, 1), partial(min, 1), False),
        (S(1), S(1), True),
        (S(1), B, False),
        ((1, (2,)), (1, 2), False),
        (1, 1.0, False),
        (object(), object(), False),
    ],
)
def test_text_tells_what_a_call_does(one: Any, other: Any, equal: bool) -> None:
    assert (describe(one) == describe(other)) is equal


def test_updates_that_follow_one_another_by_the_same_numbers_are_one_line() -> None:
    """What is between them, and other numbers, keep them apart."""

    def line(function: Any, weight: int, lr: float) -> ProgramCall:
        return ProgramCall(
            LocalCall(function, (Ref(str(weight)),), (("lr", lr),)), (None,), True, (weight,)
        )

    lines = [
        line(update.adamw, 0, 0.1),
        line(update.adamw, 1, 0.1),
        line(update.adamw, 2, 0.2),
        line(update.sumsq, 2, 0.2),
        line(update.sumsq, 2, 0.2),
        line(update.adamw, 3, 0.2),
        line(update.adamw, 4, 0.2),
    ]
    first, *between, last = batch_updates(lines)
    assert between == lines[2:5]
    assert first.call == LocalCall(
        update.adamw_of_many, (((Ref("0"),), (Ref("1"),)),), (("lr", 0.1),)
    )
    assert (first.outputs, first.changes, first.reads) == ((), (0, 1), (0, 1))
    assert last.changes == (3, 4)
