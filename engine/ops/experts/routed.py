"""Tokens that travel to the ranks of the experts that they choose, and what these make of them.

Where an axis divides tokens and experts, each rank sorts the pairs of its tokens and their choices
by the rank that has the expert, into a buffer with as many slots for each.  The buffers change
ranks by all-to-all, experts run on what has come, and the results go back the same way (GShard;
Lepikhin et al., arXiv 2006.16668).  No token is left out: a rank whose tokens want more slots than
there are ends the run, and says how many.

A buffer is (ranks, sources …, slots, width).  Each axis that divides pairs has a dim of sources, so
that the all-to-all of one axis leaves the others alone; a rank is one source.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrun.engine.ir.expansion import Expansion, LaidOutValue
from flowrun.engine.ir.graph import LogicalTensor, Op, Ref
from flowrun.engine.ir.placement import Shape, largest_shape
from flowrun.engine.ir.sbp import B, NdSbp, P, S, Sbp, Split
from flowrun.engine.ir.signature import (
    Function,
    Labels,
    Local,
    LocalCall,
    LocalView,
    OpRows,
    OpView,
    Signature,
    labelled_rows,
    places,
    sizes,
)
from flowrun.engine.ops.nn import expert_op

FIND, SEND, TAKE = "flow.find_slots", "flow.send_to_experts", "flow.take_from_experts"
RUN, GATED = "flow.routed_experts", "flow.routed_gated_experts"
RUN_BACKWARD, GATED_BACKWARD = f"{RUN}_backward", f"{GATED}_backward"
ROOM = "room"  # an argument of experts: slots for each rank, in even shares of a source's pairs
KEY = "engine.expert_room"  # of the recipe
_OF_TOKENS = ("x", "chosen", "share", "grad")
_NOBODY = -1  # the expert of an empty slot


@dataclass(frozen=True, slots=True)
class Routes:
    """Where pairs of a token and a choice travel.

    experts, ranks: how many there are; ranks have equal numbers of experts.  sources: pieces of the
    pairs on each axis that divides them.  pairs, slots: of the largest source, and what it has for
    each rank.
    """

    experts: int
    ranks: int
    sources: tuple[int, ...]
    pairs: int
    slots: int

    def shape(self, width: int) -> Shape:
        """Return the shape of a buffer."""
        return (self.ranks, *self.sources, self.slots, width)

    def of_piece(self, buffer: Shape) -> Routes:
        """Return the routes of the piece of a buffer that a rank has."""
        ranks, *sources = buffer[:-2]
        experts = self.experts * ranks // self.ranks
        return replace(self, experts=experts, ranks=ranks, sources=tuple(sources))


# ---- programs ------------------------------------------------------------------------------------


def find_slots(chosen: Tensor, routes: Routes) -> Tensor:
    """Return the slots of a source's pairs in its flat buffer.

    chosen: (tokens, choices) numbers of experts; the result has its shape.  A number that is none
    travels, too, and adds nothing.  Raises RuntimeError if there are too few slots.
    """
    number = chosen.long().clamp(0, routes.experts - 1)
    rank = (number // (routes.experts // routes.ranks)).flatten()
    counts = rank.new_zeros(routes.ranks).scatter_add_(0, rank, torch.ones_like(rank))
    if not expert_op.is_only_a_shape(chosen) and (most := int(counts.max())) > routes.slots:
        enough = math.ceil(10 * most * routes.ranks / routes.pairs) / 10
        raise RuntimeError(
            f"{most} of the {routes.pairs} choices of a rank's tokens are experts of one rank, "
            f"and there are {routes.slots} slots for them. Write {KEY}={enough} or more."
        )
    ranks, order = rank.sort(stable=True)
    before = (counts.cumsum(0) - counts)[ranks]
    slots = ranks * routes.slots + torch.arange(len(rank), device=rank.device) - before
    return torch.empty_like(rank).scatter_(0, order, slots).view_as(chosen)


def send(rows: Tensor, slots: Tensor, empty: int, routes: Routes) -> Tensor:
    """Return the buffer of rows (tokens, choices or 1, width).  empty: fills slots of no pair."""
    made = rows.new_full(routes.shape(rows.shape[2]), empty)
    made.flatten(0, -2)[slots] = rows.expand(-1, slots.shape[1], -1)
    return made


def take(made: Tensor, slots: Tensor) -> Tensor:
    """Return what a buffer has for each pair: (tokens, choices, width)."""
    return made.flatten(0, -2)[slots]


def run(
    x: Tensor, numbers: Tensor, act: str, routes: Routes, *matrices: Tensor, first: int = 0
) -> Tensor:
    """Return what the experts that are here make of a buffer.

    numbers: the experts of its slots.  act, matrices, first: as of expert_op.run.
    """
    flat, here = x.flatten(0, -2), numbers.flatten(0, -2)
    share = flat.new_ones(here.shape)
    made = expert_op.run(flat, here, share, act, routes.experts, *matrices, first=first)
    return made.view(*x.shape[:-1], made.shape[1])


def run_backward(
    grad: Tensor,
    x: Tensor,
    numbers: Tensor,
    share: Tensor,
    act: str,
    routes: Routes,
    *matrices: Tensor,
    first: int = 0,
) -> tuple[Tensor, ...]:
    """Return the gradients of a buffer, of the shares of its slots, and of the matrices here.

    grad: of the output, in the slots.  All else: as of run.
    """
    of_slots, here, shares = (each.flatten(0, -2) for each in (x, numbers, share))
    given = grad.flatten(0, -2), of_slots, here, shares, act, routes.experts
    of_x, of_share, *sums = expert_op.run_backward(*given, *matrices, first=first)
    return of_x.view_as(x), of_share.view_as(share), *sums


def on_a_rank(program: Function) -> Local:
    """Return the local program: a rank knows the routes of its piece of a buffer, and which experts
    are its own.
    """

    def local(view: LocalView) -> LocalCall:
        buffer = sizes(view.made if program is send else view.in_slices[0])
        args = (a.of_piece(buffer) if isinstance(a, Routes) else a for a in view.op.args)
        first = () if program is send else (("first", view.in_slices[-1][0][0]),)
        return LocalCall(program, tuple(args), first)

    return local


# ---- rows ----------------------------------------------------------------------------------------


def rows_of_slots(view: OpView) -> OpRows:
    """A rank is one source, of tokens or of choices."""
    dims = (0, 1) if view.parts in view.op.args[-1].sources else ()
    return tuple(_row((S(dim),), S(dim)) for dim in dims)


def rows_of_send(view: OpView) -> OpRows:
    """A rank is one source, of tokens or of choices; or it fills some slots of one buffer.  Linear
    in the rows, if empty slots are 0.
    """
    per_pair = S(1) if view.in_shapes[0][1] > 1 else B
    pairs = ((S(0), S(0)), (per_pair, S(1)))
    rows = [_row(pair, S(k)) for k in _sources(view, view.made) for pair in pairs]
    rows.append(_row((S(2), B), S(len(view.made) - 1)))
    return (*rows, *(_row(pair, P) for pair in ((P, B), *pairs) if not view.op.args[2]))


def rows_of_take(view: OpView) -> OpRows:
    """A rank is one source, of tokens or of choices, or reads one buffer.  Linear in that."""
    buffer = view.in_shapes[0]
    held: tuple[Sbp, ...] = (B, *map(S, _sources(view, buffer)))
    rows = (_row((of_buffer, S(dim)), S(dim)) for of_buffer in held for dim in (0, 1))
    return (*rows, _row((S(len(buffer) - 1), B), S(2)), _row((P, B), P))


def _sources(view: OpView, buffer: Shape) -> list[int]:
    """Return the dims of a buffer by which an axis may divide the sources."""
    return [k for k, n in enumerate(buffer[1:-2], 1) if n == view.parts]


def _row(inputs: tuple[Sbp, ...], *outputs: Sbp) -> Signature:
    return Signature(inputs, outputs)


def rows_of_run(view: OpView) -> OpRows:
    """Linear as experts are (dropless.py).  Experts are split with the ranks of a buffer, or where
    all have it.
    """
    backward = view.op.target in (RUN_BACKWARD, GATED_BACKWARD)
    outer = range(len(view.in_shapes[0]) - 1)
    of_slots = ("grad", "x", "numbers", "share") if backward else ("x", "numbers")
    count = len(view.in_shapes) - len(of_slots)
    matrices = ("gate", "up", "down")[-count:]
    names, made = (*of_slots, *matrices), ("x", "share", *matrices) if backward else ("grad",)
    dims: dict[str, Labels] = dict.fromkeys(of_slots, (*outer, None))
    dims |= {"grad": (*outer, "o"), "gate": ("e", None, "f"), "up": ("e", None, "f")}
    dims["down"] = ("e", "f", "o")
    sums = dict.fromkeys((*outer, "e", "f", "o"), P)
    split = labelled_rows([dims[n] for n in names], [dims[n] for n in made], sums)
    together = view.in_shapes[0][0] % view.parts == 0 == view.in_shapes[-1][0] % view.parts
    rows = [_row((S(0),) * len(names), *(S(0),) * len(made))] if together else []
    for linear in ("share", "down", *matrices[1:-1]):
        if linear in names:
            of = (B if name == linear else P for name in made)
            rows.append(_row(tuple(P if name == linear else B for name in names), *of))
    if backward:
        rows.append(_row((P, *[B] * (len(names) - 1)), *[P] * len(made)))
    return (*split, *rows)


def routed_row(view: OpView) -> OpRows:
    """Return the row that divides tokens and experts, if there is room and no axis before has
    divided the experts.
    """
    here = view.in_shapes[-1][0]
    evenly = here == count_experts(view.op) and here % view.parts == 0
    if ROOM not in dict(view.op.kwargs) or view.parts == 1 or not evenly:
        return ()
    sbps = (S(0),) * len(view.op.inputs), (S(0),) * len(view.op.outputs)
    return (Signature(*sbps, travels=True),)


def _slots(room: float, pairs: int, ranks: int) -> int:
    return min(math.ceil(room * pairs / ranks), pairs)


def count_experts(op: Op) -> int:
    """Return the number of all experts of flowrun's ops."""
    return int(op.args[4 + op.target.endswith("_backward.default")])


def travels(op: Op) -> bool:
    """Return whether the op is one of those whose tokens may travel."""
    return op.target.startswith(("flowrun.experts", "flowrun.gated_experts"))


def note_idle_room(ops: Iterable[Op]) -> tuple[str, ...]:
    """Return a note of the modules with room whose tokens do not travel; else nothing."""
    idle = [op for op in ops if ROOM in dict(op.kwargs) and not _routing_axes(op)]
    modules = ", ".join(dict.fromkeys(op.module for op in idle))
    why = "no axis of this layout divides both its tokens and its experts"
    return (f"{KEY} has no effect on {modules}: {why}",) if idle else ()


def routes_of(op: Op) -> Routes | None:
    """Return the routes of an op of this file."""
    return next((arg for arg in op.args if isinstance(arg, Routes)), None)


def routing_dims(op: Op, tensors: Mapping[str, LogicalTensor]) -> tuple[int, ...]:
    """Return the dim of tokens, if an axis divides it and experts; else nothing."""
    return (0,) if _routing_axes(op) else ()


def _routing_axes(op: Op) -> list[int]:
    sbps = dict(zip(places(op), op.in_sbp, strict=True))
    pairs = enumerate(zip(sbps["x"], sbps["down"], strict=True))
    return [axis for axis, pair in pairs if pair == (S(0), S(0))]


# ---- the ordinary ops ----------------------------------------------------------------------------


class _RouteWriter:
    """The ordinary ops of experts whose tokens travel, while they are written."""

    def __init__(self, p: Expansion) -> None:
        self.p, self.chosen = p, p.given("chosen")
        (self.axis,) = _routing_axes(p.op)
        of_pairs = [a for a, sbp in enumerate(self.chosen.nd_sbp) if isinstance(sbp, Split)]
        self.source_dims = {a: k for k, a in enumerate(of_pairs, 1)}
        sources, ranks = tuple(p.grid[a] for a in of_pairs), p.grid[self.axis]
        pairs = math.prod(largest_shape(self.chosen.tensor.shape, self.chosen.nd_sbp, p.grid))
        slots = _slots(dict(p.op.kwargs)[ROOM], pairs, ranks)
        self.routes = Routes(count_experts(p.op), ranks, sources, pairs, slots)
        args, like = (Ref(self.chosen.tensor.name), self.routes), (self.chosen,)
        (self.slots,) = p.call("slots", FIND, args, (self.chosen,), like)
        self.numbers = self.send("numbers", self.chosen, of_pairs=True, empty=_NOBODY)

    def send(
        self, end: str, value: LaidOutValue, *, of_pairs: bool = False, empty: int = 0
    ) -> LaidOutValue:
        """Append what puts rows into slots; readers have them where the experts are.

        value: (tokens, width), or (tokens, choices) numbers of pairs.
        """
        rows, width = self.rows(end, value, of_pairs=of_pairs), value.tensor.shape[1]
        like = self.buffer(value, 1 if of_pairs else width, value.nd_sbp)
        args = Ref(rows.tensor.name), Ref(self.slots.tensor.name), empty, self.routes
        home = LaidOutValue(like.tensor, self._at_sources(like.nd_sbp))
        (made,) = self.p.call(f"send_{end}", SEND, args, (rows, self.slots), (home,))
        return LaidOutValue(made.tensor, like.nd_sbp)

    def rows(self, end: str, value: LaidOutValue, *, of_pairs: bool) -> LaidOutValue:
        """Append a view of (tokens, width) as (tokens, 1, width), or of (tokens, choices) as
        (tokens, choices, 1).
        """
        tokens, width = value.tensor.shape
        shape = (tokens, width, 1) if of_pairs else (tokens, 1, width)
        nd_sbp = value.nd_sbp if of_pairs else _rename_dim(value.nd_sbp, 1, 2)
        return self.p.view(f"rows_{end}", value, shape, nd_sbp)

    def buffer(self, value: LaidOutValue, width: int, nd_sbp: NdSbp) -> LaidOutValue:
        """Return the form of a buffer where the experts are.

        value: has its dtype.  nd_sbp: of (tokens, width), where no axis divides pairs.
        """
        shape, last = self.routes.shape(width), len(self.routes.sources) + 2
        dims = self.source_dims | {self.axis: 0}
        renamed = enumerate(_rename_dim(nd_sbp, 1, last))
        nd_sbp = tuple(S(dims[axis]) if axis in dims else sbp for axis, sbp in renamed)
        return LaidOutValue(replace(value.tensor, shape=shape), nd_sbp)

    def run(
        self, target: str, read: Sequence[LaidOutValue], like: Sequence[LaidOutValue]
    ) -> list[LaidOutValue]:
        """Append what the experts make of buffers."""
        op = self.p.op
        matrices = [self.p.given(name) for name in places(op) if name not in _OF_TOKENS]
        buffers, weights = ([Ref(x.tensor.name) for x in side] for side in (read, matrices))
        args = (*buffers, op.args[len(op.args) - len(matrices) - 2], self.routes, *weights)
        return self.p.call("run", target, args, (*read, *matrices), like)

    def take(self, end: str, made: LaidOutValue) -> LaidOutValue:
        """Append (tokens, choices, width): what a buffer has for each pair."""
        last = len(self.routes.sources) + 2
        home = LaidOutValue(made.tensor, self._at_sources(made.nd_sbp))
        pairs = zip(self.chosen.nd_sbp, _rename_dim(home.nd_sbp, last, 2), strict=True)
        nd_sbp = tuple(of_pair if isinstance(of_pair, Split) else sbp for of_pair, sbp in pairs)
        shape = (*self.chosen.tensor.shape, made.tensor.shape[-1])
        like = LaidOutValue(replace(made.tensor, shape=shape), nd_sbp)
        args = Ref(made.tensor.name), Ref(self.slots.tensor.name)
        return self.p.call(f"take_{end}", TAKE, args, (home, self.slots), (like,))[0]

    def sum(self, end: str, rows: LaidOutValue) -> LaidOutValue:
        """Append the sum over choices: (tokens, width)."""
        tokens, _, width = rows.tensor.shape
        nd_sbp = tuple(P if sbp == S(1) else sbp for sbp in rows.nd_sbp)
        like = LaidOutValue(replace(rows.tensor, shape=(tokens, width)), _rename_dim(nd_sbp, 2, 1))
        args = Ref(rows.tensor.name), (1,)
        return self.p.call(f"sum_{end}", "aten.sum.dim_IntList", args, (rows,), (like,))[0]

    def wide(self, end: str, value: LaidOutValue) -> LaidOutValue:
        """Append a cast to fp32 of what is narrower."""
        if value.tensor.dtype.itemsize >= 4:
            return value
        return self.p.pointwise(f"wide_{end}", "aten._to_copy.default", value, dtype=torch.float32)

    def _at_sources(self, nd_sbp: NdSbp) -> NdSbp:
        home = S(self.source_dims[self.axis])
        return (*nd_sbp[: self.axis], home, *nd_sbp[self.axis + 1 :])


def _rename_dim(nd_sbp: NdSbp, dim: int, to: int) -> NdSbp:
    """Return the layout of a tensor whose dim has another number."""
    return tuple(S(to) if sbp == S(dim) else sbp for sbp in nd_sbp)


def expand_forward(p: Expansion) -> None:
    """Write the output: the sum over choices of what came back, in fp32, by their shares."""
    r, share = _RouteWriter(p), p.argument("share")
    x, (of_out,) = p.given("x"), p.op.out_sbp
    pairs = zip(of_out, share.nd_sbp, strict=True)
    of_made = tuple(B if of_share == P else sbp for sbp, of_share in pairs)
    width = p.given("down").tensor.shape[2]
    read = [r.send("x", x), r.numbers]
    target = GATED if p.has("gate") else RUN
    (made,) = r.run(target, read, [r.buffer(x, width, of_made)])
    rows = r.wide("rows", r.take("rows", made))
    shares = r.rows("share", share, of_pairs=True)
    p.output(0, r.sum("rows", p.pointwise("shared", "aten.mul.Tensor", rows, shares)))


def expand_backward(p: Expansion) -> None:
    """Write the gradients of x, of the shares and of the matrices, which are made where they
    are.
    """
    r, (of_x, of_share, *of_matrices) = _RouteWriter(p), p.op.out_sbp
    x, share = p.given("x"), p.given("share")
    read = [r.send("grad", p.given("grad")), r.send("x", x), r.numbers]
    read.append(r.send("share", share, of_pairs=True))
    matrices = [p.given(name) for name in places(p.op) if name not in _OF_TOKENS]
    like = [r.buffer(x, x.tensor.shape[1], of_x), r.buffer(share, 1, of_share)]
    like += map(LaidOutValue, (w.tensor for w in matrices), of_matrices)
    made = r.run(GATED_BACKWARD if p.has("gate") else RUN_BACKWARD, read, like)
    p.output(0, r.sum("x", r.wide("x", r.take("x", made[0]))))
    rows = r.take("share", made[1])
    p.output(1, p.view("share", rows, share.tensor.shape, rows.nd_sbp))
    for k, value in enumerate(made[2:], 2):
        p.output(k, value)
