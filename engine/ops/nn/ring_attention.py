"""Attention around a ring: what attention is where queries, keys and values are split alike.

Keys and values go from rank to rank, once around.  Each rank attends to the block of them that it
holds, and joins what it gets by logsumexp, which is exact (Liu, Zaharia and Abbeel,
arXiv 2310.01889).  Backward the gradients of keys and values go around with them, and each rank
adds its part.  Two axes that divide lengths are a ring of rings.

Tensors are (samples, heads, length, head width).  Turned keys stand some blocks further: block i of
the queries meets block i of turned keys, and each rank holds both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flowrun.engine.ir.expansion import Expansion, LaidOutValue
from flowrun.engine.ir.graph import LogicalTensor, Op, Ref
from flowrun.engine.ir.sbp import B, P, S, Sbp
from flowrun.engine.ir.signature import (
    Function,
    Local,
    LocalCall,
    LocalView,
    OpRows,
    OpView,
    Signature,
    bind,
    places,
)
from flowrun.engine.ops.nn.document_op import attend_to_block, attend_to_block_backward
from flowrun.engine.torch_internals import cpu_attention, cpu_attention_backward

TURN, BLOCK, BLOCK_BACKWARD = "flow.turn", "flow.attend_block", "flow.attend_block_backward"
_LENGTH = 2
_WHOLE, _CAUSAL, _HIDDEN = "whole", "causal", "hidden"  # what queries see of a block of keys


class SeenBlock(NamedTuple):
    """What a block of queries sees of the keys at its place, and where both were, in tokens."""

    how: str
    start: int
    first: int


@dataclass(frozen=True, slots=True)
class KeyTurns:
    """How far turned keys are from where they were.

    parts: pieces of the length on each axis of the ring, outermost first.
    by: how many ranks further the keys stand on each.
    block: tokens of one rank.  causal: whether a query sees no key after its own place.
    """

    parts: tuple[int, ...]
    by: tuple[int, ...]
    block: int
    causal: bool

    def seen(self, start: int, length: int) -> tuple[SeenBlock, ...]:
        """Return what each block of queries sees of the keys at its place.

        start, length: of the queries, in tokens.
        """
        return tuple(map(self._seen, range(start // self.block, (start + length) // self.block)))

    def _seen(self, here: int) -> SeenBlock:
        came_from, scale = 0, 1
        for parts, by in zip(reversed(self.parts), reversed(self.by), strict=True):
            came_from += (here // scale - by) % parts * scale
            scale *= parts
        how = _WHOLE
        if self.causal and came_from >= here:
            how = _CAUSAL if came_from == here else _HIDDEN
        return SeenBlock(how, here * self.block, came_from * self.block)


def rings(view: OpView, lengths: Sequence[int]) -> bool:
    """True if a ring of `view.parts` ranks can share the lengths of queries and keys."""
    given = view.given
    alike = len(set(lengths)) == 1 and lengths[0] % view.parts == 0
    return alike and given.get("attn_mask") is None


def ring_dims(op: Op, tensors: Mapping[str, LogicalTensor]) -> tuple[int, ...]:
    """Return the length, if an axis splits queries and keys along it; else nothing."""
    return (_LENGTH,) if _ring_axes(op) else ()


def _ring_axes(op: Op) -> list[int]:
    sbps = dict(zip(places(op), op.in_sbp, strict=True))
    pairs = enumerate(zip(sbps["query"], sbps["key"], strict=True))
    return [axis for axis, pair in pairs if pair == (S(_LENGTH),) * 2]


# ---- the ordinary ops ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RingWriter:
    """The ring of an op that is being written.

    axes, parts: axes of the grid, and ranks of each, outermost first.  block: tokens of a rank.
    """

    p: Expansion
    axes: tuple[int, ...]
    parts: tuple[int, ...]
    block: int

    @classmethod
    def of(cls, p: Expansion) -> _RingWriter:
        axes = tuple(_ring_axes(p.op))
        parts = tuple(p.grid[axis] for axis in axes)
        return cls(p, axes, parts, p.given("query").tensor.shape[_LENGTH] // math.prod(parts))

    def turns(self) -> Iterator[tuple[int, KeyTurns]]:
        """Yield (the axis around which keys turn first; -1 at the beginning, how they stand)."""
        causal, before = bind(self.p.op).get("is_causal", True), (0,) * len(self.parts)
        for by in itertools.product(*map(range, self.parts)):
            changed = (k for k, (a, b) in enumerate(zip(before, by, strict=True)) if a != b)
            yield next(changed, -1), KeyTurns(self.parts, by, self.block, causal)
            before = by

    def turn(self, end: str, values: Sequence[LaidOutValue], first: int) -> list[LaidOutValue]:
        """Append a step of the values to the next rank on axis `first` of the ring; inner axes come
        full circle before.
        """
        made = list(values)
        for k in range(len(self.parts) - 1, first - 1, -1) if first >= 0 else ():
            how = _LENGTH, math.prod(self.parts[:k]), self.parts[k], self.axes[k]
            made = [
                self.p.call(f"turn{n}_{end}_{k}", TURN, (Ref(x.tensor.name), *how), (x,), (x,))[0]
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


def expand_forward(p: Expansion) -> None:
    """Write (output, logsumexp), joined block by block in fp32."""
    ring, query, keys = _RingWriter.of(p), p.given("query"), [p.given("key"), p.given("value")]
    wide = _wide(query.tensor)
    joined: list[LaidOutValue] = []
    for axis, turns in ring.turns():
        end = "_".join(map(str, turns.by))
        keys = ring.turn(end, keys, axis)
        rows = replace(wide, shape=wide.shape[:-1])
        block = ring.attend(end, BLOCK, (query, *keys), turns, wide, rows)
        joined = _join(p, end, joined, block) if joined else block
    for k, value in enumerate(joined):
        p.output(k, value)


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
    ring, query, keys = _RingWriter.of(p), p.given("query"), [p.given("key"), p.given("value")]
    given = (p.given(places(p.op)[0]), query), (p.given("out"), p.given("logsumexp"))
    sums: list[LaidOutValue] = []
    for axis, turns in ring.turns():
        end = "_".join(map(str, turns.by))
        keys, sums[1:] = ring.turn(end, keys, axis), ring.turn(f"{end}_grad", sums[1:], axis)
        read = (*given[0], *keys, *given[1])
        like = _wide(query.tensor), *(x.tensor for x in keys)
        block = ring.attend(end, BLOCK_BACKWARD, read, turns, *like)
        sums = _add(p, end, sums, block) if sums else block
    for k, value in enumerate((sums[0], *ring.turn("home", sums[1:], 0))):
        p.output(k, value)


def _add(
    p: Expansion, end: str, one: Sequence[LaidOutValue], other: Sequence[LaidOutValue]
) -> list[LaidOutValue]:
    pairs = enumerate(zip(one, other, strict=True))
    return [p.pointwise(f"sum{k}_{end}", "aten.add.Tensor", *pair) for k, pair in pairs]


def _wide(tensor: LogicalTensor) -> LogicalTensor:
    return replace(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


# ---- a block of keys -----------------------------------------------------------------------------


def block(view: OpView) -> OpRows:
    """(output, logsumexp).  Linear in the value."""
    return (*_alike(view), _row(view, (B, B, P), P, B))


def block_backward(view: OpView) -> OpRows:
    """(grad_query, grad_key, grad_value).  Linear as `attention.backward` is."""
    of_grad = _row(view, (P, B, B, B, B, B), P, P, P)
    return (*_alike(view), of_grad, _row(view, (B, B, B, P, P, B), P, P, B))


def _alike(view: OpView) -> Iterator[Signature]:
    """Yield rows that split all tensors alike: no block of the length is cut."""
    turns, shape = view.op.args[-2], view.in_shapes[0]
    for dim in range(3 if shape[_LENGTH] % (view.parts * turns.block) == 0 else 2):
        tensors = len(view.op.args) - 3  # not documents, turns and the scale
        documents = B if dim else S(0)
        yield _row(view, (S(dim),) * tensors, *(S(dim),) * len(view.op.outputs), of=documents)


def _row(view: OpView, inputs: tuple[Sbp, ...], *outputs: Sbp, of: Sbp = B) -> Signature:
    """of: the SBP of documents, if there are some."""
    return Signature((*inputs, of)[: len(view.op.inputs)], outputs)


def attend_blocks(
    seen: Sequence[SeenBlock],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None = None,
    *,
    scale: float | None = None,
    run: Function = cpu_attention,
) -> tuple[Tensor, Tensor]:
    """Return (output, logsumexp) of each block of queries with the keys at its place, in fp32.

    seen: what each block sees of its keys; of nothing the output is 0.  documents: of whole
    samples.  scale: of the scores.  run: the kernel of whole tensors without documents.
    """
    made = []
    for (how, start, first), *given in zip(seen, *_blocks(seen, query, key, value), strict=True):
        if how == _HIDDEN:
            rows = query.new_full(given[0].shape[:-1], -math.inf)
            made.append((torch.zeros_like(given[0]), rows))
        elif documents is not None:
            at = {"start": start, "first": first}
            made.append(attend_to_block(*given, **at, documents=documents, scale=scale))
        else:
            made.append(run(*given, 0.0, how == _CAUSAL, scale=scale)[:2])
    wide = torch.promote_types(query.dtype, torch.float32)
    out, logsumexp = (torch.cat(parts, _LENGTH).to(wide) for parts in zip(*made, strict=True))
    return out, logsumexp


def attend_blocks_backward(
    seen: Sequence[SeenBlock],
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    documents: Tensor | None = None,
    *,
    scale: float | None = None,
    run: Function = cpu_attention_backward,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query (in fp32), key and value, of each block with the keys at its
    place.

    out, logsumexp: of all keys.  seen, documents, scale, run: as of attend_blocks.
    """
    made = []
    given = grad, query, key, value, out, logsumexp
    for (how, start, first), *each in zip(seen, *_blocks(seen, *given), strict=True):
        if how == _HIDDEN:
            made.append([torch.zeros_like(x) for x in each[1:4]])
        elif documents is not None:
            at = {"start": start, "first": first}
            of_each = attend_to_block_backward(*each, **at, documents=documents, scale=scale)
            made.append([*of_each])
        else:
            made.append(run(*each, 0.0, how == _CAUSAL, scale=scale))
    of_query, of_key, of_value = (torch.cat(parts, _LENGTH) for parts in zip(*made, strict=True))
    return of_query.to(torch.promote_types(query.dtype, torch.float32)), of_key, of_value


def _blocks(seen: Sequence[SeenBlock], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return (tensor.chunk(len(seen), _LENGTH) for tensor in tensors)


def as_whole(program: Function) -> Function:
    """Return the function of whole tensors: what a rank runs that holds all blocks."""
    return lambda *given: program(
        given[-2].seen(0, given[0].shape[_LENGTH]), *given[:-2], scale=given[-1]
    )


def on_a_rank(program: Function) -> Local:
    """Return the local program: a rank knows its place."""

    def local(view: LocalView) -> LocalCall:
        *tensors, turns, scale = view.op.args
        seen = turns.seen(*view.in_slices[0][_LENGTH])
        return LocalCall(program, (seen, *tensors), (("scale", scale),))

    return local


def turn_pieces(x: Tensor, dim: int, outer: int, parts: int, axis: int) -> Tensor:
    """Return x with each of `parts` pieces of a dim one place further, within each of `outer`
    longer pieces.  axis: of the grid, whose ranks hold the pieces.
    """
    pieces: Tensor = x.unflatten(dim, (outer, parts, -1))
    return pieces.roll(1, dim + 1).flatten(dim, dim + 2)
