from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from flowrun.engine.actors.plan import BOX, REGION, Actor, BoxWork, Plan, RegionWork, TensorMove
from flowrun.engine.boxing.boxing import BoxingStep
from flowrun.engine.ir.graph import LogicalGraph, LogicalTensor, Op, Ref, Variable
from flowrun.engine.ir.location import Location
from flowrun.engine.ir.placement import Placement
from flowrun.engine.ir.sbp import B, NdSbp, P, S
from flowrun.engine.lowering.share_weights import mark_shared_gathers
from flowrun.engine.runtime.rank.rank import Rank
from flowrun.engine.runtime.transport.arena import Arena, ArenaPiece
from flowrun.engine.runtime.transport.shared_weight_memory import Weight, side_by_side, wholes
from support.layouts.grids import Layout, compiled, initial
from support.layouts.plain_loop import gpt, mlp

# a weight, what is gathered of it, its gradient as a partial sum and as a shard, its next value
NAMES = ("w", "whole", "partial", "grad", "new", "shown", "late")


def graph(*ops: Op, dim: int = 0) -> LogicalGraph:
    """A weight of 4 x 6, split over the one axis."""
    weight = Variable("w", "w", "parameter", "new", nd_sbp=(S(dim),))
    return LogicalGraph(
        ops, {name: LogicalTensor(name, (4, 6), torch.float32) for name in NAMES}, (weight,)
    )


def region(name: str, reads: Sequence[str], makes: Sequence[str]) -> Actor:
    """Compute once a step; what makes `new` updates the weight."""
    updates = (("w", "new"),) if "new" in makes else ()
    kept = tuple(name for name in makes if name != "new")
    work = RegionWork(ops=(), reads=tuple(reads), makes=kept, accumulates=(), updates=updates)
    return Actor(0, name, REGION, 0, phase="backward", per_step=True, work=work)


def move(read: str, made: str, shape: tuple[int, ...], source: NdSbp, target: NdSbp) -> TensorMove:
    """On stage 0."""
    places = {"source": Location(0, source), "target": Location(0, target)}
    return TensorMove(read=read, made=made, shape=shape, dtype=torch.float32, **places)


def collective(step: BoxingStep, read: str, made: str) -> Actor:
    """Over the one axis, once a step."""
    work = BoxWork((step,), (move(read, made, (4, 6), (step.source,), (step.target,)),))
    return Actor(0, made, BOX, 0, phase="update", per_step=True, work=work)


GATHER = collective(BoxingStep(0, S(0), B), "w", "whole")
BACKWARD = region("backward", ["whole"], ["partial", "shown"])
SCATTER = collective(BoxingStep(0, P, S(0)), "partial", "grad")
UPDATE = region("update", ["w", "grad"], ["new"])


def lies_once(*actors: Actor, grid: tuple[int, ...] = (2,), ops: Sequence[Op] = ()) -> bool:
    """Whether the gather, which is the first actor, moves no byte."""
    work = mark_shared_gathers(actors, graph(*ops), [grid])[0].work
    assert isinstance(work, BoxWork)
    return work.one_copy


def test_a_weight_that_is_read_before_its_gradient_is_summed_lies_once() -> None:
    assert lies_once(GATHER, BACKWARD, SCATTER, UPDATE)


def test_a_reader_that_nothing_orders_before_the_sum_keeps_the_gather() -> None:
    late = region("late", ["whole"], ["late"])
    assert not lies_once(GATHER, BACKWARD, SCATTER, UPDATE, late)


def test_a_reader_of_a_view_counts_as_a_reader() -> None:
    late = region("late", ["shown"], ["late"])
    view = Op("shown", "aten.t.default", (Ref("whole"),), outputs=("shown",))
    fresh = replace(view, target="aten.mm.default", args=(Ref("whole"), Ref("whole")))
    assert not lies_once(GATHER, BACKWARD, SCATTER, UPDATE, late, ops=[view])
    assert lies_once(GATHER, BACKWARD, SCATTER, UPDATE, late, ops=[fresh])


def test_an_update_that_waits_for_no_other_rank_keeps_the_gather() -> None:
    assert not lies_once(GATHER, region("backward", ["whole"], ["grad"]), UPDATE)


def test_pieces_that_are_not_one_stretch_of_the_whole_keep_the_gather() -> None:
    columns = collective(BoxingStep(0, S(1), B), "w", "whole")
    actors = (columns, BACKWARD, SCATTER, UPDATE)
    work = mark_shared_gathers(actors, graph(dim=1), [(2,)])[0].work
    assert isinstance(work, BoxWork) and not work.one_copy


def gathers(plan: Plan) -> list[BoxWork]:
    return [
        actor.work
        for actor in plan.actors
        if isinstance(actor.work, BoxWork)
        and actor.work.step.kind == "all_gather"
        and all(move.read in plan.variables for move in actor.work.moves)
    ]


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.thorough), 3])
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
    memory: dict[int, ArenaPiece] = {}
    asked = [_Asked(memory), _Asked(memory)]
    found = [side_by_side(plan, rank, asked[rank]) for rank in (0, 1)]
    assert found[0].keys() == found[1].keys() and found[0]
    for name in found[0]:
        one, other = (each[name] for each in found)
        one.piece.fill_(1.0)
        other.piece.fill_(2.0)
        assert torch.equal(one.whole, other.whole)
        assert torch.equal(one.whole, torch.cat([one.piece, other.piece]))
        assert one.piece.untyped_storage().nbytes() == one.piece.nbytes
    assert asked[0].of == asked[1].of
    sizes = [num_bytes for _, _, num_bytes in asked[0].of]
    of_first = sum(num_bytes for _, owner, num_bytes in asked[0].of if owner == 0)
    assert abs(2 * of_first - sum(sizes)) <= max(sizes)
    assert wholes(plan, found[0])


def test_all_members_of_a_group_name_the_same_owner_where_ranks_are_in_several() -> None:
    """A rank counts what members of a group have for that group alone: others know no more."""
    plan = two_axes()
    asked = [_Asked({}) for _ in range(4)]
    for rank in range(4):
        side_by_side(plan, rank, asked[rank])
    owners: dict[tuple[int, ...], set[tuple[tuple[int, int], ...]]] = {}
    for each in asked:
        for group in {ranks for ranks, _, _ in each.of}:
            told = tuple((owner, size) for ranks, owner, size in each.of if ranks == group)
            owners.setdefault(group, set()).add(told)
    assert set(owners) == {(0, 1), (2, 3), (0, 2), (1, 3)}
    assert all(len(told) == 1 for told in owners.values())


def test_a_variable_that_lies_there_begins_as_elsewhere() -> None:
    plan = compiled(mlp(), Layout(data=2, zero=1)).plan
    state = next(v for v in plan.graph.variables if v.kind == "state" and len(v.nd_sbp) == 1)
    plain = Rank(plan, 0, mlp().rows, initial(mlp()), torch.device("cpu")).variables[state.tensor]
    lying = Weight(0, torch.empty(0), torch.full_like(plain, 7.0))
    there = {state.tensor: lying}
    rank = Rank(plan, 0, mlp().rows, initial(mlp()), torch.device("cpu"), side_by_side=there)
    assert rank.variables[state.tensor] is lying.piece
    assert torch.equal(lying.piece, plain)


def two_axes() -> Plan:
    """On data 2 x tensor 2, gathers a larger weight over tensor and two over data."""
    homes = {"v": (8, (B, S(0))), "u": (6, (S(0), B)), "w": (4, (S(0), B))}
    variables, actors, tensors = [], [], {}
    for k, (name, (rows, home)) in enumerate(homes.items()):
        axis = home.index(S(0))
        step = BoxingStep(axis, S(0), B)
        tensors |= {n: LogicalTensor(n, (rows, 2), torch.float32) for n in (name, f"{name}*")}
        variables.append(Variable(name, name, "parameter", nd_sbp=home))
        moves = (move(name, f"{name}*", (rows, 2), home, (B, B)),)
        work = BoxWork((step,), moves, one_copy=True)
        actors.append(Actor(k, f"gather{k}", BOX, 0, phase="weights", per_step=True, work=work))
    graph = LogicalGraph((), tensors, tuple(variables))
    placement = Placement((("data", 2), ("tensor", 2)), (0, 1, 2, 3))
    made_of = {"placements": (placement,), "axes": ("data", "tensor"), "graph": graph}
    known = {"tensors": tensors, "variables": graph.variable_of}
    return Plan(**made_of, actors=tuple(actors), registers=(), micro_batches=1, **known)


class _Asked:
    """Gives memory, and keeps what was asked for.  memory: of all ranks, by number."""

    def __init__(self, memory: dict[int, ArenaPiece]) -> None:
        self.memory = memory
        self.of: list[tuple[tuple[int, ...], int, int]] = []

    def __call__(self, ranks: tuple[int, ...], owner: int, num_bytes: int) -> ArenaPiece:
        made = self.memory.setdefault(len(self.of), ArenaPiece(Arena(bytearray(num_bytes)), 0))
        self.of.append((ranks, owner, num_bytes))
        return made
