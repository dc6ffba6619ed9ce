"""Weights that a host has once: which gathers move no byte, and where their pieces lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from flowrun.engine.boxing import Step
from flowrun.engine.draft import Draft
from flowrun.engine.graph import LogicalGraph, Op, Ref, Tensor, Variable
from flowrun.engine.one_copy import one_copy
from flowrun.engine.plan import BOX, REGION, BoxWork, Plan, RegionWork
from flowrun.engine.runtime.side_by_side import Memory, side_by_side, wholes
from flowrun.engine.sbp import B, P, S
from support.layouts import Layout, compiled
from support.plain_loop import gpt, mlp

# a weight, what is gathered of it, its gradient as a partial sum and as a shard, its next value
NAMES = ("w", "whole", "partial", "grad", "new", "shown", "late")


def graph(*ops: Op, dim: int = 0) -> LogicalGraph:
    """A weight of 4 x 6, split over the one axis."""
    weight = Variable("w", "w", "parameter", "new", nd_sbp=(S(dim),))
    return LogicalGraph(
        ops, {name: Tensor(name, (4, 6), torch.float32) for name in NAMES}, (weight,)
    )


def region(name: str, reads: Sequence[str], makes: Sequence[str], *, once: bool = False) -> Draft:
    """Compute; what makes `new` updates the weight."""
    updates = (("w", "new"),) if "new" in makes else ()
    work = RegionWork((), tuple(reads), tuple(makes), (), updates)
    return Draft(name, REGION, 0, "backward", once, work, tuple(reads), tuple(makes))


def collective(step: Step, read: str, made: str) -> Draft:
    """Over the one axis, once a step."""
    work = BoxWork((step,), ((read, made),))
    return Draft(made, BOX, 0, "update", True, work, (read,), (made,))


GATHER = collective(Step(0, S(0), B), "w", "whole")
BACKWARD = region("backward", ["whole"], ["partial", "shown"], once=True)
SCATTER = collective(Step(0, P, S(0)), "partial", "grad")
UPDATE = region("update", ["w", "grad"], ["new"], once=True)


def lies_once(*drafts: Draft, grid: tuple[int, ...] = (2,), ops: Sequence[Op] = ()) -> bool:
    """Whether the gather, which is the first draft, moves no byte."""
    work = one_copy(drafts, graph(*ops), [grid])[0].work
    assert isinstance(work, BoxWork)
    return work.one_copy


def test_a_weight_that_is_read_before_its_gradient_is_summed_lies_once() -> None:
    assert lies_once(GATHER, BACKWARD, SCATTER, UPDATE)


def test_a_reader_that_nothing_orders_before_the_sum_keeps_the_gather() -> None:
    late = region("late", ["whole"], ["late"], once=True)
    assert not lies_once(GATHER, BACKWARD, SCATTER, UPDATE, late)


def test_a_reader_of_a_view_counts_as_a_reader() -> None:
    late = region("late", ["shown"], ["late"], once=True)
    view = Op("shown", "aten.t.default", (Ref("whole"),), outputs=("shown",))
    fresh = replace(view, target="aten.mm.default", args=(Ref("whole"), Ref("whole")))
    assert not lies_once(GATHER, BACKWARD, SCATTER, UPDATE, late, ops=[view])
    assert lies_once(GATHER, BACKWARD, SCATTER, UPDATE, late, ops=[fresh])


def test_an_update_that_waits_for_no_other_rank_keeps_the_gather() -> None:
    assert not lies_once(GATHER, replace(BACKWARD, makes=("grad",)), UPDATE)


def test_pieces_that_are_not_one_stretch_of_the_whole_keep_the_gather() -> None:
    columns = collective(Step(0, S(1), B), "w", "whole")
    drafts = (columns, BACKWARD, SCATTER, UPDATE)
    work = one_copy(drafts, graph(dim=1), [(2,)])[0].work
    assert isinstance(work, BoxWork) and not work.one_copy


def gathers(plan: Plan) -> list[BoxWork]:
    return [
        actor.work
        for actor in plan.actors
        if isinstance(actor.work, BoxWork)
        and actor.work.step.kind == "all_gather"
        and all(read in plan.variables for read, _ in actor.work.pairs)
    ]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_in_shared_memory_gathers_no_byte(zero: int) -> None:
    layout = Layout(data=2, zero=zero, shared=True)
    shared = compiled(gpt(), layout)
    copied = compiled(gpt(), replace(layout, shared=False))
    assert gathers(shared.plan) and all(work.one_copy for work in gathers(shared.plan))
    assert not any(work.one_copy for work in gathers(copied.plan))
    assert shared.rehearsal.sent_bytes < copied.rehearsal.sent_bytes
    assert max(shared.rehearsal.peak_bytes) < max(copied.rehearsal.peak_bytes)


def test_pieces_lie_in_the_whole_and_members_have_equal_parts_of_all() -> None:
    plan = compiled(mlp(), Layout(data=2, zero=1, shared=True)).plan
    asked: list[tuple[int, int]] = []
    made: list[_Memory] = []

    def share(_: tuple[int, ...], owner: int, num_bytes: int) -> Memory:
        asked.append((owner, num_bytes))
        made.append(_Memory(num_bytes))
        return made[-1]

    found = [side_by_side(plan, 0, share)]
    again, first = iter(made), list(asked)
    found.append(side_by_side(plan, 1, lambda *_: next(again)))
    assert found[0].keys() == found[1].keys() and found[0]
    for name in found[0]:
        one, other = (each[name] for each in found)
        one.piece.fill_(1.0)
        other.piece.fill_(2.0)
        assert torch.equal(one.whole, other.whole)
        assert torch.equal(one.whole, torch.cat([one.piece, other.piece]))
        assert one.piece.untyped_storage().nbytes() == one.piece.nbytes
    bytes_of = [sum(size for owner, size in first if owner == rank) for rank in (0, 1)]
    assert abs(bytes_of[0] - bytes_of[1]) <= max(size for _, size in first)
    assert wholes(plan, found[0])


class _Memory:
    def __init__(self, num_bytes: int) -> None:
        self.bytes = bytearray(num_bytes)

    def tensor(self, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.frombuffer(self.bytes, dtype=dtype, count=count, offset=start)
