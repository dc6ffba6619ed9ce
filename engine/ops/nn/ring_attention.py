"""Attention of pieces of the length: what a rank computes with its own queries.

Where keys are gathered it has all of them.  Else they go from rank to rank, once around: each rank
attends to the block of them that it holds, and joins what it gets by logsumexp, which is exact
(Liu, Zaharia and Abbeel, arXiv 2310.01889).  Backward the gradients of keys and values go around
with them, and each rank adds its part.  Two axes that divide lengths are a ring of rings.

Of a causal mask the rank with the last tokens has most to compute.  So a call may be balanced: from
before its expansion's attention until after it, and nowhere else, the second half of each block of
queries (and of keys that go around) changes places with that of the mirrored block: of n, the last
one's for the first.  Then rank i has pieces 2i and 2(n-1-i)+1 of 2n, and all ranks see as many
pairs, in each turn.  All other ops see tokens in their order.

Tensors are (samples, heads, length, head width).  Turned keys stand some blocks further: block i of
the queries meets block i of turned keys, and each rank holds both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from flowrun.engine.ir.expansion import Expansion, LaidOutValue
from flowrun.engine.ir.graph import LogicalTensor, Op, Ref
from flowrun.engine.ir.sbp import B, P, S, Sbp
from flowrun.engine.ir.signature import OpRows, OpView, Signature, bind, places

TURN, SWAP_HALVES = "flow.turn", "flow.swap_halves"
BLOCK, BLOCK_BACKWARD = "flow.attend_block", "flow.attend_block_backward"
BALANCED = "balanced"  # an argument of an op that is to be expanded
_LENGTH = 2


# ---- who sees whom -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that stand together.

    at: where they begin in a tensor.  length: how many.  start: the place of the first in its
    sample.
    """

    at: int
    length: int
    start: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the piece of a tensor, as a view."""
        return tensor.narrow(_LENGTH, self.at, self.length)


@dataclass(frozen=True, slots=True)
class Meeting:
    """A piece of queries, and the keys that it sees: for each call of a kernel, some, and whether
    the mask hides part of them, which are then at the queries' own places.
    """

    queries: Piece
    keys: tuple[tuple[Piece, bool], ...]

    def count(self, block: int) -> float:
        """Return the pairs that a kernel computes with blocks of keys, up to their own."""
        pairs = (
            causal_pairs(keys.length, block) if own else self.queries.length * keys.length
            for keys, own in self.keys
        )
        return sum(pairs)


def causal_pairs(length: int, block: int) -> float:
    """Return the pairs that a kernel computes of as many queries and keys at the same places."""
    whole, rest = divmod(length, block)
    return block * block * whole * (whole + 1) / 2 + rest * length


def meet(queries: Iterable[Piece], keys: Sequence[Piece], causal: bool) -> tuple[Meeting, ...]:
    """Return what each piece of queries sees of the keys."""
    return tuple(Meeting(each, tuple(_seen_by(each, keys, causal))) for each in queries)


def _seen_by(queries: Piece, keys: Sequence[Piece], causal: bool) -> Iterator[tuple[Piece, bool]]:
    """Yield keys as a kernel of a causal mask takes them, as many as queries: those of GPUs align
    others differently.
    """
    before = [queries.start - each.start if causal else each.length for each in keys]
    for each, count in zip(keys, before, strict=True):
        if 0 <= count < each.length:
            yield Piece(each.at + count, queries.length, queries.start), True
    for each, count in zip(keys, before, strict=True):
        if count > 0:
            yield replace(each, length=min(count, each.length)), False


@dataclass(frozen=True, slots=True)
class KeyTurns:
    """Where queries and keys are.

    parts: pieces of the length on each axis that divides it, outermost first.
    by: how many ranks further turned keys stand on each; empty: all ranks have all keys, in order.
    block: tokens of one rank.  causal: whether a query sees no key after its own place.
    balanced: second halves of blocks of queries, and of turned keys, are mirrored.
    """

    parts: tuple[int, ...]
    by: tuple[int, ...]
    block: int
    causal: bool
    balanced: bool = False

    def meetings(self, start: int, length: int) -> tuple[Meeting, ...]:
        """Return what the queries of some blocks see of the keys that their rank has.

        start, length: of these blocks, in tokens.
        """
        made: list[Meeting] = []
        for here in range(start // self.block, (start + length) // self.block):
            at = here * self.block - start
            keys = [Piece(0, self.block * self.blocks, 0)]
            if self.by:
                keys = self._pieces(self._came_from(here), at)
            made += meet(self._pieces(here, at), keys, self.causal)
        return tuple(made)

    @property
    def blocks(self) -> int:
        """Blocks in a sample."""
        return math.prod(self.parts)

    def _pieces(self, block: int, at: int) -> list[Piece]:
        start, half = block * self.block, self.block // 2
        if not self.balanced:
            return [Piece(at, self.block, start)]
        mirrored = (self.blocks - block) * self.block - half
        return [Piece(at, half, start), Piece(at + half, half, mirrored)]

    def _came_from(self, here: int) -> int:
        came_from, scale = 0, 1
        for parts, by in zip(reversed(self.parts), reversed(self.by), strict=True):
            came_from += (here // scale - by) % parts * scale
            scale *= parts
        return came_from


@lru_cache(maxsize=1024)
def computed_share(turns: KeyTurns, block: int) -> float:
    """Return the share of pairs that the rank with most to do computes, of its queries with the
    keys that it has.  block: as of Meeting.count.
    """
    each = (turns.meetings(k * turns.block, turns.block) for k in range(turns.blocks))
    most = max(sum(met.count(block) for met in meetings) for meetings in each)
    return most / turns.block**2 / (1 if turns.by else turns.blocks)


def rings(view: OpView, lengths: Sequence[int]) -> bool:
    """True if a ring of `view.parts` ranks can share the lengths of queries and keys."""
    given = view.given
    alike = len(set(lengths)) == 1 and lengths[0] % view.parts == 0
    return alike and given.get("attn_mask") is None


def ring_dims(op: Op, tensors: Mapping[str, LogicalTensor]) -> tuple[int, ...]:
    """Return the length, if an axis splits queries along it and the call is written as others; else
    nothing.
    """
    return (_LENGTH,) if _ring_axes(op) or BALANCED in dict(op.kwargs) else ()


def _ring_axes(op: Op, *, keys: bool = True) -> list[int]:
    """Return the axes that split queries, and keys if they turn."""
    sbps = dict(zip(places(op), op.in_sbp, strict=True))
    pairs = enumerate(zip(sbps["query"], sbps["key" if keys else "query"], strict=True))
    return [axis for axis, pair in pairs if pair == (S(_LENGTH),) * 2]


# ---- the ordinary ops ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RingWriter:
    """The ring of an op that is being written.

    axes, parts: axes of the grid that divide the length, and ranks of each, outermost first.
    block: tokens of a rank.  turning: keys go around; else each rank has all.
    """

    p: Expansion
    axes: tuple[int, ...]
    parts: tuple[int, ...]
    block: int
    turning: bool
    balanced: bool

    @classmethod
    def of(cls, p: Expansion) -> _RingWriter:
        turning = _ring_axes(p.op)
        axes = tuple(turning or _ring_axes(p.op, keys=False))
        parts = tuple(p.grid[axis] for axis in axes)
        block = p.given("query").tensor.shape[_LENGTH] // math.prod(parts)
        return cls(p, axes, parts, block, bool(turning), BALANCED in dict(p.op.kwargs))

    def turns(self) -> Iterator[tuple[int, KeyTurns]]:
        """Yield (the axis around which keys turn first; -1 at the beginning, how they stand)."""
        causal = bind(self.p.op).get("is_causal", True)
        steps = [*itertools.product(*map(range, self.parts))] if self.turning else [()]
        for before, by in zip(steps[:1] + steps, steps, strict=False):
            changed = (k for k, (a, b) in enumerate(zip(before, by, strict=True)) if a != b)
            turns = KeyTurns(self.parts, by, self.block, causal, self.balanced)
            yield next(changed, -1), turns

    def turn(self, end: str, values: Sequence[LaidOutValue], first: int) -> list[LaidOutValue]:
        """Append a step of the values to the next rank on axis `first` of the ring; inner axes come
        full circle before.
        """
        inner = range(len(self.parts) - 1, first - 1, -1) if first >= 0 else ()
        return self._move(TURN, f"turn_{end}", values, inner)

    def swap(
        self, end: str, values: Sequence[LaidOutValue], *, turned: bool = False
    ) -> list[LaidOutValue]:
        """Append the exchange of second halves, which is its own inverse, if the call is balanced.

        turned: the values are keys, or gradients of theirs.
        """
        moves = self.balanced and (self.turning or not turned)
        return self._move(
            SWAP_HALVES, f"swap_{end}", values, range(len(self.parts)) if moves else ()
        )

    def _move(
        self, target: str, end: str, values: Sequence[LaidOutValue], axes: Iterable[int]
    ) -> list[LaidOutValue]:
        made = list(values)
        for k in axes:
            how = _LENGTH, math.prod(self.parts[:k]), self.parts[k], self.axes[k], self.block
            made = [
                self.p.call(f"{end}{n}_{k}", target, (Ref(x.tensor.name), *how), (x,), (x,))[0]
                for n, x in enumerate(made)
            ]
        return made

    def attend(
        self,
        end: str,
        target: str,
        read: Sequence[LaidOutValue],
        turns: KeyTurns,
        *like: LogicalTensor,
    ) -> list[LaidOutValue]:
        """Append what one block of keys gives.  like: shape and dtype of each output."""
        documents = [self.p.given("documents")] if self.p.has("documents") else []
        read = (*read, *documents)
        refs = (*(Ref(x.tensor.name) for x in read), *(() if documents else (None,)))
        args = (*refs, turns, bind(self.p.op)["scale"])
        made = map(LaidOutValue, like, self.p.op.out_sbp)
        return self.p.call(f"block_{end}", target, args, read, tuple(made))

    def output(self, k: int, value: LaidOutValue, *, turned: bool = False) -> None:
        """Write output k of the op, whose halves go back to their places."""
        wanted = self.p.tensors.get(self.p.op.outputs[k] or "", value.tensor).dtype
        if self.balanced and wanted != value.tensor.dtype:
            value = self.p.pointwise(f"narrow{k}", "aten._to_copy.default", value, dtype=wanted)
        self.p.output(k, *self.swap(f"out{k}", [value], turned=turned))


def expand_forward(p: Expansion) -> None:
    """Write (output, logsumexp), joined block by block in fp32."""
    ring = _RingWriter.of(p)
    (query,) = ring.swap("query", [p.given("query")])
    keys = ring.swap("keys", [p.given("key"), p.given("value")], turned=True)
    wide = _wide(query.tensor)
    rows, made = replace(wide, shape=wide.shape[:-1]), wide if ring.turning else query.tensor
    joined: list[LaidOutValue] = []
    for axis, turns in ring.turns():
        end = "_".join(map(str, turns.by))
        keys = ring.turn(end, keys, axis)
        block = ring.attend(end, BLOCK, (query, *keys), turns, made, rows)
        joined = _join(p, end, joined, block) if joined else block
    for k, value in enumerate(joined):
        ring.output(k, value)


def _join(
    p: Expansion, end: str, one: Sequence[LaidOutValue], other: Sequence[LaidOutValue]
) -> list[LaidOutValue]:
    """Append what two blocks of keys give together."""
    (out, lse), (more, of_more) = one, other
    both = p.pointwise(f"lse_{end}", "aten.logaddexp.default", lse, of_more)
    below = p.pointwise(f"below_{end}", "aten.sub.Tensor", of_more, both)
    share = p.pointwise(f"share_{end}", "aten.exp.default", below)
    share = p.view(f"shares_{end}", share, (*share.tensor.shape, 1), share.nd_sbp)
    return [p.pointwise(f"out_{end}", "aten.lerp.Tensor", out, more, share), both]


def expand_backward(p: Expansion) -> None:
    """Write (grad_query, grad_key, grad_value); the latter two go around with their keys."""
    ring = _RingWriter.of(p)
    names = places(p.op)[0], "query", "out", "logsumexp"
    grad, query, *made = ring.swap("queries", [p.given(name) for name in names])
    keys = ring.swap("keys", [p.given("key"), p.given("value")], turned=True)
    like = _wide(query.tensor) if ring.turning else query.tensor, *(x.tensor for x in keys)
    sums: list[LaidOutValue] = []
    for axis, turns in ring.turns():
        end = "_".join(map(str, turns.by))
        keys, sums[1:] = ring.turn(end, keys, axis), ring.turn(f"{end}_grad", sums[1:], axis)
        read = (grad, query, *keys, *made)
        block = ring.attend(end, BLOCK_BACKWARD, read, turns, *like)
        sums = _add(p, end, sums, block) if sums else block
    home = ring.turn("home", sums[1:], 0) if ring.turning else sums[1:]
    for k, value in enumerate((sums[0], *home)):
        ring.output(k, value, turned=k > 0)


def _add(
    p: Expansion, end: str, one: Sequence[LaidOutValue], other: Sequence[LaidOutValue]
) -> list[LaidOutValue]:
    pairs = enumerate(zip(one, other, strict=True))
    return [p.pointwise(f"sum{k}_{end}", "aten.add.Tensor", *pair) for k, pair in pairs]


def _wide(tensor: LogicalTensor) -> LogicalTensor:
    return replace(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


# ---- a block of queries --------------------------------------------------------------------------


def block(view: OpView) -> OpRows:
    """(output, logsumexp).  Linear in the value."""
    return (*_alike(view, S(_LENGTH)), _row(view, (B, B, P), P, B))


def block_backward(view: OpView) -> OpRows:
    """(grad_query, grad_key, grad_value).  Linear as `attention.backward` is."""
    of_grad = _row(view, (P, B, B, B, B, B), P, P, P)
    return (*_alike(view, P), of_grad, _row(view, (B, B, B, P, P, B), P, P, B))


def _alike(view: OpView, gathered: Sbp) -> Iterator[Signature]:
    """Yield rows that split all tensors alike, along the length but for keys that each rank has: no
    block of it is cut.  gathered: the outputs of a length, then, but for the first.
    """
    turns, shape = view.op.args[-2], view.in_shapes[0]
    tensors, backward = len(view.op.args) - 3, len(view.op.outputs) == 3
    for dim in range(3 if shape[_LENGTH] % (view.parts * turns.block) == 0 else 2):
        # not documents, turns and the scale
        ins: list[Sbp] = [S(dim)] * tensors
        outs: list[Sbp] = [S(dim)] * len(view.op.outputs)
        if dim == _LENGTH and not turns.by:
            ins[1 + backward : 3 + backward], outs[1:] = [B, B], [gathered] * (len(outs) - 1)
        yield _row(view, tuple(ins), *outs, of=B if dim else S(0))


def _row(view: OpView, inputs: tuple[Sbp, ...], *outputs: Sbp, of: Sbp = B) -> Signature:
    """of: the SBP of documents, if there are some."""
    return Signature((*inputs, of)[: len(view.op.inputs)], outputs)


def turn_pieces(x: Tensor, dim: int, outer: int, parts: int, *_: int) -> Tensor:
    """Return x with each of `parts` pieces of a dim one place further, within each of `outer`
    longer pieces.  The rest: the axis of the grid whose ranks hold the pieces; tokens of a rank.
    """
    pieces: Tensor = x.unflatten(dim, (outer, parts, -1))
    return pieces.roll(1, dim + 1).flatten(dim, dim + 2)


def swap_halves(x: Tensor, dim: int, outer: int, parts: int, _: int, block: int) -> Tensor:
    """Return x with the second half of each block in the place of that of the mirrored block, among
    `parts` pieces of a dim.  The arguments are those of turn_pieces.
    """
    first, second = x.unflatten(dim, (outer, parts, -1, 2, block // 2)).unbind(dim + 3)
    return torch.stack([first, second.flip(dim + 1)], dim + 3).flatten(dim, dim + 4)
