"""Simulated ranks: run one op, or the ops that it expands to, as every rank of a grid would.

A row holds if each rank, given its pieces of the inputs, makes pieces that together are what the op
makes of whole tensors.  Partial pieces are random, of mixed signs and unlike each other, so nothing
holds by luck.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from flowrun.engine.ir.graph import LogicalTensor, Op, Ref, map_refs
from flowrun.engine.ir.placement import Shape, Slices, local_slices, split_range
from flowrun.engine.ir.sbp import (
    P_LOGSUMEXP,
    P_MAX,
    P_MIN,
    B,
    NdSbp,
    P,
    Partial,
    Sbp,
    Split,
    format_nd_sbp,
)
from flowrun.engine.ir.signature import LocalCall, LocalView, NdSignature
from flowrun.engine.ops import registry
from flowrun.engine.ops.nn.ring_attention import SWAP_HALVES, TURN

Grid = tuple[int, ...]
Pieces = dict[tuple[int, ...], torch.Tensor]  # coordinate -> what the rank there holds
OTHER_PARTIALS: tuple[Sbp, ...] = (P_MAX, P_MIN, P_LOGSUMEXP)
# what an op raises at arguments that do not fit it
FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)


@dataclass(frozen=True, kw_only=True)
class OpSample:
    """An op with values for its inputs and what it makes of them whole.

    sound: False for local input shapes that the kernel would read beyond the end of, because it
    does not check them.
    """

    label: str
    op: Op
    values: Mapping[str, torch.Tensor]
    made: tuple[torch.Tensor | None, ...]
    sound: Callable[[Sequence[Shape]], bool] = lambda shapes: True

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Values of op.inputs, in order."""
        return [self.values[name] for name in self.op.inputs]

    @property
    def in_shapes(self) -> list[Shape]:
        """Shapes of op.inputs."""
        return [tuple(value.shape) for value in self.inputs]

    @property
    def out_shapes(self) -> list[Shape | None]:
        """Shapes of op.outputs."""
        return [None if value is None else tuple(value.shape) for value in self.made]

    @property
    def tensors(self) -> dict[str, LogicalTensor]:
        """Logical tensors of inputs and outputs."""
        named = [*self.values.items(), *zip(self.op.outputs, self.made, strict=True)]
        made = ((n, v) for n, v in named if n and v is not None)
        return {n: LogicalTensor(n, tuple(v.shape), v.dtype) for n, v in made}


def sample(
    target: str,
    *args: object,
    sound: Callable[[Sequence[Shape]], bool] = lambda shapes: True,
    **kwargs: object,
) -> OpSample:
    """A sample of a target, run on whole tensors; tensors among the arguments become Refs."""
    values: dict[str, torch.Tensor] = {}

    def named(value: object) -> object:
        if isinstance(value, torch.Tensor):
            values[name := f"x{len(values)}"] = value
            return Ref(name)
        if isinstance(value, list | tuple):
            return tuple(named(item) for item in value)
        return value

    op = Op("op", target, tuple(map(named, args)), tuple((k, named(v)) for k, v in kwargs.items()))
    made = run(LocalCall(registry.whole_function(target), op.args, op.kwargs), values)
    names = tuple(None if value is None else f"y{k}" for k, value in enumerate(made))
    shapes = "; ".join("x".join(map(str, v.shape)) or "scalar" for v in values.values())
    rest = [a for a in op.args if not isinstance(a, Ref | tuple)]
    rest += [a for a in kwargs.values() if not isinstance(a, torch.Tensor)]
    label = f"{target}({shapes}{''.join(f', {a}' for a in rest)})"
    op = replace(op, outputs=names)
    return OpSample(label=label, op=op, values=values, made=made, sound=sound)


def run(call: LocalCall, values: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """Outputs of a call, run on copies, for update ops write in place."""
    lookup = lambda ref: values[ref.name].clone()  # noqa: E731
    args, kwargs = map_refs(call.args, lookup), map_refs(call.kwargs, lookup)
    outputs = call.function(*args, **dict(kwargs))
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


# ---- laying out and putting together -------------------------------------------------------------


def coordinates(grid: Grid) -> list[tuple[int, ...]]:
    """Every rank of a grid, in order."""
    return list(itertools.product(*map(range, grid)))


def lay_out(whole: torch.Tensor, nd_sbp: NdSbp, grid: Grid) -> Pieces:
    """Cut a tensor into what each rank of a grid holds in the layout `nd_sbp`, outer axis first."""
    if not grid:
        return {(): whole}
    parts = _cut(whole, nd_sbp[0], grid[0])
    return {
        (k, *rest): piece
        for k, part in enumerate(parts)
        for rest, piece in lay_out(part, nd_sbp[1:], grid[1:]).items()
    }


def _cut(whole: torch.Tensor, sbp: Sbp, parts: int) -> list[torch.Tensor]:
    if isinstance(sbp, Split):
        ranges = [split_range(whole.shape[sbp.dim], parts, k) for k in range(parts)]
        return [whole.narrow(sbp.dim, start, length).contiguous() for start, length in ranges]
    if not isinstance(sbp, Partial) or parts == 1:
        return [whole] * parts
    others = _draw_others(whole, parts)
    if sbp.reduce == "sum":
        return [*others, whole - sum(others)]
    if sbp.reduce == "logsumexp":
        shares = torch.stack([other.abs() for other in [*others, whole + 1]]).log_softmax(0)
        return [whole + share for share in shares]
    sign = -1 if sbp.reduce == "max" else 1
    return [whole, *(whole + sign * other.abs() for other in others)]


def _draw_others(whole: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Return noise for all ranks but one; its size is that of `whole`, or, where it is narrow,
    less: pieces are rounded as numbers as large as the whole are.
    """
    noise = torch.Generator().manual_seed(_fingerprint(whole))
    narrow = whole.dtype.is_floating_point and whole.dtype.itemsize < 4
    most = parts if narrow else 1
    drawn = (
        torch.randn(whole.shape, generator=noise, dtype=torch.float64) for _ in range(parts - 1)
    )
    return [(x * (k + 2) / most).to(whole.dtype) for k, x in enumerate(drawn)]


def _fingerprint(whole: torch.Tensor) -> int:
    """A seed from the values: unlike for two tensors, whose noise must not cancel."""
    plain = torch.view_as_real(whole) if whole.is_complex() else whole
    return int(plain.double().nan_to_num(0, 1, -1).abs().sum() * 1e6) % 2**31


def put_together(pieces: Pieces, nd_sbp: NdSbp, grid: Grid, shape: Shape) -> torch.Tensor | None:
    """Join pieces of the layout `nd_sbp` on a `grid` to the logical tensor of this `shape`.

    Returns None if the pieces are not such a layout (wrong shapes, unequal copies of B).
    """
    if not grid:
        (piece,) = pieces.values()
        return piece if tuple(piece.shape) == shape else None
    parts: list[torch.Tensor] = []
    for k in range(grid[0]):
        inner = {c[1:]: piece for c, piece in pieces.items() if c[0] == k}
        part = put_together(inner, nd_sbp[1:], grid[1:], piece_shape(shape, nd_sbp[0], grid[0], k))
        if part is None:
            return None
        parts.append(part)
    return _join(parts, nd_sbp[0])


def layouts_of(
    value: torch.Tensor | None,
    pieces: Sequence[torch.Tensor | None],
    parts: int,
    among: Sequence[Sbp] | None = None,
) -> list[Sbp]:
    """Return SBPs under which the pieces of `parts` ranks are the whole value; B alone for an
    output that is not made.

    among: those to be looked at; None: all there are.  P(max), P(min) and P(logsumexp) are tried
    where no other fits: a P(max) is boxed to B where it is made (Expands, ir/op_info.py).
    """
    if value is None:
        return [B]
    held: Pieces = {(k,): piece for k, piece in enumerate(pieces) if piece is not None}
    usual: list[Sbp] = [B, *([] if value.dtype == torch.bool else [P]), *splits_of(value, parts)]
    fits: list[Sbp] = []
    for sbp in (*usual, *OTHER_PARTIALS) if among is None else among:
        if sbp in OTHER_PARTIALS and (fits or not value.dtype.is_floating_point):
            continue
        whole = put_together(held, (sbp,), (parts,), tuple(value.shape))
        if whole is not None and alike(whole.to(value.dtype), value):
            fits.append(sbp)
    return fits


def splits_of(value: torch.Tensor, parts: int) -> list[Split]:
    """Return the splits of a tensor's dims of at least `parts` elements."""
    return [Split(d) for d, size in enumerate(value.shape) if size >= parts]


def piece_shape(shape: Shape, sbp: Sbp, parts: int, k: int) -> Shape:
    """Return the shape that rank `k` of `parts` has of a tensor with this shape and sbp."""
    if not isinstance(sbp, Split):
        return shape
    return (*shape[: sbp.dim], split_range(shape[sbp.dim], parts, k)[1], *shape[sbp.dim + 1 :])


def _join(parts: list[torch.Tensor], sbp: Sbp) -> torch.Tensor | None:
    if isinstance(sbp, Split):
        return torch.cat(parts, sbp.dim)
    stacked = torch.stack(parts)
    if isinstance(sbp, Partial):
        return _REDUCE[sbp.reduce](stacked, 0)
    return parts[0] if all(alike(parts[0], part) for part in parts[1:]) else None


_REDUCE: Mapping[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
    "logsumexp": torch.logsumexp,
}


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for rounding: 1e-9 of the largest number in float64, 1e-5 in float32, some units of
    the last place in narrower ones; exactly in integers.  What is not finite stands in the
    same places.
    """
    if a.shape != b.shape:
        return False
    if a.is_complex() and b.is_complex():
        return alike(torch.view_as_real(a), torch.view_as_real(b))
    if not a.dtype.is_floating_point or not a.numel():
        return bool(torch.equal(a, b))
    tolerance = 1e-9 if a.dtype == torch.float64 else max(1e-5, 8 * torch.finfo(a.dtype).eps)
    apart = float((a - b).abs().max())
    if math.isfinite(apart):
        return apart <= tolerance * (1 + float(b.abs().max()))
    finite = b.isfinite()
    same = torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num())
    return same and torch.equal(finite, a.isfinite()) and alike(a[finite], b[finite])


# ---- one row on a grid ---------------------------------------------------------------------------


def row_failure(given: OpSample, row: NdSignature, grid: Grid) -> str:
    """Say why the row does not hold for the sample `given` on this grid; empty if it does."""
    op = given.op
    signed = replace(op, in_sbp=row.inputs, out_sbp=row.outputs)
    tensors = given.tensors
    ops: tuple[Op, ...] = (signed,)
    if registry.needs_expansion(signed, tensors):
        ops, between = registry.expand(signed, tensors, grid)
        tensors.update({tensor.name: tensor for tensor in between})
    try:
        pieces = run_ops(ops, tensors, given.values, grid)
    except FAILURES as error:
        return f"{type(error).__name__}: {error}"
    for name, value, nd_sbp in zip(op.outputs, given.made, row.outputs, strict=True):
        if name is None or value is None:
            continue
        whole = put_together(pieces[name], nd_sbp, grid, tuple(value.shape))
        assert whole is not None  # run_ops looks at that
        if not alike(whole, value):
            apart = float((whole.to(torch.complex128) - value.to(torch.complex128)).abs().max())
            return f"Output {name}: shape {tuple(value.shape)}, differs by up to {apart:.3g}."
    return ""


def run_ops(
    ops: Sequence[Op],
    tensors: Mapping[str, LogicalTensor],
    values: Mapping[str, torch.Tensor],
    grid: Grid,
) -> dict[str, Pieces]:
    """Return pieces that the ops make on a grid, by tensor.

    Each op reads its inputs in the layout of its in_sbp, boxed by hand.
    ops: in order.  tensors: shapes by name.  values: of what no op makes.
    """
    wholes = dict(values)
    results: dict[str, Pieces] = {}
    for op in ops:
        if op.target in (TURN, SWAP_HALVES):
            made = op.makes[0]
            move = registry.whole_function(op.target)
            wholes[made] = move(wholes[op.inputs[0]], *op.args[1:])
            results[made] = lay_out(wholes[made], op.out_sbp[0], grid)
            continue
        laid = [lay_out(wholes[n], nd, grid) for n, nd in zip(op.inputs, op.in_sbp, strict=True)]
        for coordinate in coordinates(grid):
            call = registry.localize(local_view(op, tensors, grid, coordinate))
            here = {n: pieces[coordinate] for n, pieces in zip(op.inputs, laid, strict=True)}
            for name, piece in zip(op.outputs, run(call, here), strict=True):
                if name is not None and piece is not None:
                    results.setdefault(name, {})[coordinate] = piece
        for name, nd_sbp in zip(op.outputs, op.out_sbp, strict=True):
            if name is None:
                continue
            whole = put_together(results[name], nd_sbp, grid, tensors[name].shape)
            if whole is None:
                held = ", ".join(str(tuple(piece.shape)) for piece in results[name].values())
                raise ValueError(
                    f"output {name} is not {format_nd_sbp(nd_sbp)}: pieces {held} differ "
                    f"from each other, or do not make up {tensors[name].shape}"
                )
            wholes[name] = whole
    return results


def local_view(
    op: Op, tensors: Mapping[str, LogicalTensor], grid: Grid, coordinate: tuple[int, ...]
) -> LocalView:
    """Return what localize sees of an op at a coordinate of the grid; tensors: shapes by name."""

    def slices(name: str, nd_sbp: NdSbp) -> Slices:
        return local_slices(tensors[name].shape, nd_sbp, grid, coordinate)

    outputs = [*zip(op.outputs, op.out_sbp, strict=True)]
    return LocalView(
        op=op,
        in_shapes=tuple(tensors[n].shape for n in op.inputs),
        out_shapes=tuple(None if n is None else tensors[n].shape for n in op.outputs),
        in_slices=tuple(map(slices, op.inputs, op.in_sbp)),
        out_slices=tuple(None if n is None else slices(n, nd) for n, nd in outputs),
    )
