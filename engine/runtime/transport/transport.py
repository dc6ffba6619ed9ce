"""Bytes of a boxing: messages are cut, joined and summed; with a transport in one process.

The tensor functions are pure and serve all transports: the virtual one (`run_group`, `run_route`),
torch.distributed (collectives.py) and shared memory (shared_memory.py).  Sums run in order of the
members: a result does not depend on timing, all members get the same bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrun.engine.actors.plan import BoxWork
from flowrun.engine.boxing.boxing import ALL_REDUCE, JOINED_KINDS, SLICE, BoxingStep, replace_axis
from flowrun.engine.boxing.crossing import Send
from flowrun.engine.ir.placement import Shape, Slices, local_shape, split_range
from flowrun.engine.ir.sbp import B, NdSbp, Owned, Sbp, Split

DimSlice = tuple[int, int, int]  # dim, start, length
_ROWS = 512  # of a piece by columns, turned at a time
REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "logsumexp": torch.logaddexp,
}


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Layout of one tensor of a bucket on a group, before and after a step.

    shape: of the tensor that the group shares: this axis' split undone, those of the others not.
    parts: members of the group.  Uneven splits are balanced (placement.split_range).
    swapped: as of the step.
    """

    shape: Shape
    parts: int
    source: Sbp
    target: Sbp
    swapped: bool = False

    def before(self, index: int) -> Shape:
        """Shape of what member `index` holds before the step."""
        return self._piece(self.source, index, self.shape)

    def after(self, index: int) -> Shape:
        """Shape of what member `index` holds after the step."""
        return self._piece(self.target, index, self.shape)

    def message(self, sender: int, receiver: int) -> Shape:
        """Shape of what goes from one member to another."""
        shape = self.before(sender)
        if (place := self.place(sender, receiver)) is None:
            return shape
        dim, _, length = place
        length = min(length, shape[dim])  # of a tensor that another owns: 0
        return (*shape[:dim], length, *shape[dim + 1 :])

    def place(self, sender: int, receiver: int) -> DimSlice | None:
        """Slice (dim, start, length) of the sender's piece that the receiver needs; None: all of
        it.
        """
        if isinstance(self.target, Owned) and self.target.owner != receiver:
            return 0, 0, 0
        if not isinstance(self.target, Split):
            return None
        dim = self.target.dim
        if self.swapped:
            half, at = self.shape[dim] // self.parts // 2, sender + receiver + 1 - self.parts
            if sender == receiver:
                return (dim, 0, half) if at else None  # the middle one's halves stay
            return dim, half, 0 if at else half
        if self.source == self.target:  # a turn
            is_next = receiver == (sender + 1) % self.parts
            return None if is_next else (dim, 0, 0)
        return dim, *split_range(self.shape[dim], self.parts, receiver)

    def _piece(self, sbp: Sbp, index: int, shape: Shape) -> Shape:
        if isinstance(sbp, Owned) and sbp.owner != index:
            return (0, *shape[1:])
        if not isinstance(sbp, Split):
            return shape
        _, length = split_range(self.shape[sbp.dim], self.parts, index)
        return (*shape[: sbp.dim], length, *shape[sbp.dim + 1 :])


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Layouts of all tensors of a bucket.

    Shapes and slices are computed once and kept: a step runs again and again, and Python is slow
    right after an act that has filled the caches.
    """

    each: tuple[GroupLayout, ...]
    _shapes: dict[tuple[int, int], list[Shape]] = field(default_factory=dict, repr=False)
    _places: dict[tuple[int, int], list[DimSlice | None]] = field(default_factory=dict, repr=False)

    @property
    def parts(self) -> int:
        return self.each[0].parts

    @property
    def empty(self) -> bool:
        """True if no tensor has an element."""
        return not any(math.prod(layout.shape) for layout in self.each)

    def after(self, index: int) -> list[Shape]:
        return [layout.after(index) for layout in self.each]

    def message(self, sender: int, receiver: int) -> list[Shape]:
        """Shapes of the pieces in the message from one member to another."""
        shapes = self._shapes.get((sender, receiver))
        if shapes is None:
            shapes = [layout.message(sender, receiver) for layout in self.each]
            self._shapes[sender, receiver] = shapes
        return shapes

    def size(self, sender: int, receiver: int) -> int:
        """Elements in that message."""
        return sum(map(math.prod, self.message(sender, receiver)))

    def pieces_for(self, bucket: Sequence[Tensor], sender: int, receiver: int) -> list[Tensor]:
        """Views of what the receiver needs of each tensor of the sender's bucket."""
        places = self._places.get((sender, receiver))
        if places is None:
            places = [layout.place(sender, receiver) for layout in self.each]
            self._places[sender, receiver] = places
        pairs = zip(bucket, places, strict=True)  # who owns no row has none to cut
        return [
            tensor if place is None or not tensor.shape[place[0]] else tensor.narrow(*place)
            for tensor, place in pairs
        ]


def layout_of(
    step: BoxingStep,
    shape: Shape,
    nd_sbp: NdSbp,
    grid: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> GroupLayout:
    """Return the layout of a tensor of logical `shape` on the group of the rank at `coordinate`.

    nd_sbp: before the step.  grid: sizes of the placement's axes.
    """
    shared = local_shape(shape, replace_axis(nd_sbp, step.axis, B), grid, coordinate)
    return GroupLayout(shared, grid[step.axis], step.source, step.target, step.swapped)


def bucket_layout(
    work: BoxWork, grid: tuple[int, ...], coordinate: tuple[int, ...]
) -> BucketLayout:
    """Return the layouts of a collective's tensors on the group of the rank at `coordinate`."""
    moves = zip(work.steps, work.moves, strict=True)
    each = (layout_of(step, m.shape, m.source.nd_sbp, grid, coordinate) for step, m in moves)
    return BucketLayout(tuple(each))


# ---- local steps --------------------------------------------------------------------------------


def local_step(
    step: BoxingStep,
    tensor: Tensor,
    shape: Shape,
    nd_sbp: NdSbp,
    grid: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> Tensor:
    """Slice, pad or keep a rank's piece `tensor`; the result is new memory.

    shape: logical.  nd_sbp: before the step.
    """
    layout = layout_of(step, shape, nd_sbp, grid, coordinate)
    index = coordinate[step.axis]
    if step.kind == SLICE:
        piece = _cut(tensor, layout.target, layout.parts, index)
        return piece.clone(memory_format=torch.contiguous_format)
    padded = tensor.new_full(layout.shape, identity(step.reduce, tensor.dtype))
    if isinstance(step.source, Split):
        _cut(padded, step.source, layout.parts, index).copy_(tensor)
    elif index == 0:
        padded.copy_(tensor)
    return padded


def identity(reduce: str, dtype: torch.dtype) -> float | int | bool:
    """The value that does not count: 0 in a sum, the greatest in a min, else the least."""
    if reduce == "sum" or dtype == torch.bool:
        return reduce == "min" if dtype == torch.bool else 0
    if dtype.is_floating_point:
        return math.inf if reduce == "min" else -math.inf
    info = torch.iinfo(dtype)
    return info.max if reduce == "min" else info.min


# ---- messages -----------------------------------------------------------------------------------


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors of one dtype into one new flat message."""
    return put(tensors, tensors[0].new_empty(sum(tensor.numel() for tensor in tensors)))


def put(tensors: Sequence[Tensor], message: Tensor) -> Tensor:
    """Fill a flat message with them, row by row; the message.  Raises ValueError if they have not
    as many elements as it has.
    """
    if (count := sum([tensor.numel() for tensor in tensors])) != message.numel():
        raise ValueError(
            f"tensors of {count:,} elements do not fill a message of {message.numel():,}:"
            " one has another shape than the plan says"
        )
    if all(tensor.is_contiguous() for tensor in tensors):
        return torch.cat([tensor.view(-1) for tensor in tensors], out=message)
    for view, tensor in zip(unpack(message, [x.shape for x in tensors]), tensors, strict=True):
        _copy(view, tensor)
    return message


def _copy(rows: Tensor, tensor: Tensor) -> None:
    """Fill contiguous memory.  torch turns a whole transposed matrix block by block, but a piece of
    one element by element: so a piece is made whole, some rows at a time, which a cache holds.
    """
    if tensor.dim() != 2 or tensor.stride(0) != 1 or tensor.stride(1) in (1, tensor.shape[0]):
        rows.copy_(tensor)
        return
    for to, some in zip(rows.split(_ROWS), tensor.split(_ROWS), strict=True):
        to.copy_(some.t().contiguous().t())


def unpack(
    message: Tensor, shapes: Sequence[Shape], turned: Iterable[int] = itertools.repeat(False)
) -> list[Tensor]:
    """Return the tensors of a flat message, of these shapes, as views of it.

    turned: for each tensor, whether it lies column by column.
    """
    parts = message.split([math.prod(shape) for shape in shapes])
    return [
        part.view(shape[::-1]).t() if by_columns else part.view(shape)
        for part, shape, by_columns in zip(parts, shapes, turned, strict=False)
    ]


def join_pieces(
    columns: Sequence[Sequence[Tensor]], layouts: BucketLayout, index: int
) -> list[Tensor]:
    """Join the pieces that each member has sent to the tensors of member `index` after the step."""
    out = []
    for layout, pieces in zip(layouts.each, zip(*columns, strict=True), strict=True):
        if isinstance(layout.source, Owned):
            out.append(pieces[layout.source.owner].clone(memory_format=torch.contiguous_format))
        else:
            assert isinstance(layout.source, Split)
            first = index if layout.swapped else 0  # its own half, then what came
            out.append(torch.cat([*pieces[first:], *pieces[:first]], layout.source.dim))
    return out


def reduce_messages(messages: Sequence[Tensor], reduce: str) -> Tensor:
    """Reduce the messages of all members (two or more), in order of the members; the result is
    new, contiguous memory.
    """
    if all(map(lies_by_columns, messages)):  # turned once, after the sum
        rows = messages[0].new_empty(messages[0].shape)
        for to, *some in zip(rows.split(_ROWS), *(m.split(_ROWS) for m in messages), strict=True):
            to.copy_(_reduce([each.t() for each in some], reduce).t())
        return rows
    return _reduce([_by_rows(message) for message in messages], reduce)


def _reduce(messages: Sequence[Tensor], reduce: str) -> Tensor:
    first, second, *others = messages
    total = REDUCTIONS[reduce](first, second).contiguous()
    for message in others:
        REDUCTIONS[reduce](total, message, out=total)
    return total


def lies_by_columns(piece: Tensor) -> bool:
    """True of a matrix whose columns lie one after the other, as gradients of weights may."""
    return piece.dim() == 2 and piece.stride(0) == 1 and not piece.is_contiguous()


def _by_rows(piece: Tensor) -> Tensor:
    """The piece, or a copy where its columns lie one after the other: to add such a one to rows
    takes longer.
    """
    if piece.is_contiguous() or piece.stride(-1) == 1:
        return piece
    rows = piece.new_empty(piece.shape)
    _copy(rows, piece)
    return rows


def sent_elements(step: BoxingStep, layouts: BucketLayout, index: int) -> int:
    """Count the elements that member `index` sends in a step, for a bucket with these layouts; the
    sum over members is boxing's table.
    """
    parts = layouts.parts
    if step.kind == ALL_REDUCE:
        total = layouts.size(index, index)
        _, own = split_range(total, parts, index)
        return total - own + (parts - 1) * own
    return sum(layouts.size(index, other) for other in range(parts) if other != index)


def _cut(tensor: Tensor, sbp: Sbp, parts: int, index: int) -> Tensor:
    if isinstance(sbp, Owned) and sbp.owner != index:
        return tensor.narrow(0, 0, 0)
    if not isinstance(sbp, Split):
        return tensor
    return tensor.narrow(sbp.dim, *split_range(tensor.shape[sbp.dim], parts, index))


# ---- the virtual transport ----------------------------------------------------------------------


def run_group(
    step: BoxingStep, pieces: Sequence[Sequence[Tensor]], layouts: BucketLayout
) -> tuple[list[list[Tensor]], list[int]]:
    """Do a collective for a whole group, for a bucket with these layouts.

    pieces[member]: a bucket of tensors of one dtype, one for each layout.  Returns the buckets
    after the step, new memory, and the bytes that each member sends to others.
    """
    members, out = range(len(pieces)), []
    for receiver in members:
        columns = [layouts.pieces_for(pieces[k], k, receiver) for k in members]
        if step.kind in JOINED_KINDS:
            out.append(join_pieces(columns, layouts, receiver))
        else:
            parts = zip(*columns, strict=True)
            out.append([reduce_messages(each, step.reduce) for each in parts])
    size = pieces[0][0].element_size()
    return out, [sent_elements(step, layouts, k) * size for k in members]


# ---- between grids ------------------------------------------------------------------------------


def cut(tensor: Tensor, slices: Slices) -> Tensor:
    """Return these slices of a tensor, as a view."""
    for dim, (start, length) in enumerate(slices):
        if (start, length) != (0, tensor.shape[dim]):
            tensor = tensor.narrow(dim, start, length)
    return tensor


def within(region: Slices, outer: Slices) -> Slices:
    """Return a region with offsets from the beginning of another."""
    return tuple(
        (start - first, length) for (start, length), (first, _) in zip(region, outer, strict=True)
    )


def join(parts: Sequence[tuple[Slices, Tensor]], held: Slices) -> Tensor:
    """The piece that holds the slices `held`, from regions that tile it."""
    if len(parts) == 1:
        return parts[0][1]
    piece = parts[0][1].new_empty([length for _, length in held])
    for region, values in parts:
        cut(piece, within(region, held)).copy_(values)
    return piece


def run_route(
    sends: Sequence[Send],
    pieces: Mapping[int, Tensor],
    held: Mapping[int, Slices],
    wanted: Mapping[int, Slices],
) -> tuple[dict[int, Tensor], dict[int, int]]:
    """Do a route: pieces by source rank -> (pieces by target rank, bytes sent by source rank).

    sends: the messages of the route.  held, wanted: slices of each source and each target rank
    (crossing.slices_of_ranks).
    """
    sent = dict.fromkeys(held, 0)
    inbox: dict[int, list[tuple[Slices, Tensor]]] = {rank: [] for rank in wanted}
    for send in sends:
        values = cut(pieces[send.source], within(send.region, held[send.source]))
        inbox[send.target].append((send.region, values))
        sent[send.source] += values.nbytes if send.source != send.target else 0
    return {rank: join(parts, wanted[rank]) for rank, parts in inbox.items()}, sent
