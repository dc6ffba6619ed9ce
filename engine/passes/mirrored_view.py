"""mirror: captured -> captured, for the mirrored view: each rank its own batch, as in data parallel
training written by hand.

The graph computes one rank's samples, and B on an op means here that each rank has its own value.
Three ops, which compute nothing, lead into and out of that:

    flow.own      S(0) -> B   what the reader supplies, one rank's part of it
    flow.share    B -> P      a gradient: its average over the ranks is the sum of these
    flow.by_rank  B -> S(0)   a result: one number becomes a list, an entry for each rank

So gradients, from P on, and ZeRO with them work as in the consistent view; a gradient becomes P as
soon as it is made.  Each rank has its own buffers: a checkpoint has all of them,
weights.safetensors has rank 0's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import (
    BACKWARD,
    FORWARD,
    UPDATE,
    LogicalGraph,
    LogicalTensor,
    Op,
    Ref,
    rename_inputs,
)
from flowrun.engine.ops.flow.structure import BY_RANK, OWN, SHARE
from flowrun.engine.ops.registry import info
from flowrun.engine.strategy import Strategy

DRAW, TANGENT = "@draw", "@tangent"
LIST_SUFFIX = "_by_rank"  # suffix of results that are lists


def rows_of_a_rank(
    batch: Mapping[str, torch.Tensor], strategy: Strategy
) -> Mapping[str, torch.Tensor]:
    """Return the part of a micro-batch that capture sees: the first of `rows_by_rank`."""
    return rows_by_rank(batch, strategy)[0]


def rows_by_rank(
    batch: Mapping[str, torch.Tensor], strategy: Strategy
) -> list[Mapping[str, torch.Tensor]]:
    """Divide a micro-batch into what is computed by itself: each rank's samples in the mirrored
    view; otherwise it is one piece.  Raises RecipeError if the samples do not divide over the
    ranks.
    """
    if not strategy.mirrored:
        return [batch]
    ranks = _num_ranks(strategy)
    rows = next(len(value) for value in batch.values() if value.dim())
    if rows % ranks:
        raise RecipeError(
            "train.batch_size",
            f"a micro-batch of {rows} samples cannot be divided over {ranks} ranks, "
            f"{_grid(strategy)}.",
            f"batch_size / micro_batches must be a multiple of {ranks}; or change placement.axes.",
        )
    own = rows // ranks
    return [
        {name: v[k * own : (k + 1) * own] if v.dim() else v for name, v in batch.items()}
        for k in range(ranks)
    ]


def mirror(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Insert the ops that lead every batch field in, and every gradient and result out."""
    return _Mirror(graph, _num_ranks(strategy)).graph() if strategy.mirrored else graph


def own_ops(graph: LogicalGraph, strategy: Strategy) -> frozenset[str]:
    """Return the names of the ops that each rank runs on its own values: B is their only row."""
    if not strategy.mirrored:
        return frozenset()
    joint: set[str] = set()
    own: set[str] = set()
    for op in graph.ops:
        is_joint = op.target in (SHARE, BY_RANK)
        if is_joint or joint.intersection(op.inputs):
            joint.update(op.makes)
        elif op.phase != UPDATE and info(op.target).relabels is None:
            own.add(op.name)
    return frozenset(own)


def _grid(strategy: Strategy) -> str:
    """Return the axes with their sizes as text: "data 3"."""
    sizes = zip(strategy.axes, strategy.placements[0].shape, strict=True)
    return " x ".join(f"{axis} {size}" for axis, size in sizes)


def _num_ranks(strategy: Strategy) -> int:
    return len(strategy.placements[0].ranks)


class _Mirror:
    """The tensors and ops so far.  entered: tensor of a feed -> the tensor of each rank's own
    values.
    """

    def __init__(self, graph: LogicalGraph, ranks: int) -> None:
        self.base = graph
        self.ranks = ranks
        self.tensors = dict(graph.tensors)
        self.entered: dict[str, str] = {}

    def graph(self) -> LogicalGraph:
        """Return the graph with all of these ops."""
        ops = [op for feed in self.base.feeds for op in self._enter(feed.field, feed.tensor)]
        results: list[tuple[str, str]] = []
        exits: dict[str, list[Op]] = {}  # op -> the ops that lead its outputs out
        last: list[Op] = []
        for name, tensor in self.base.results:
            maker = self.base.producer[tensor]
            if name.startswith("grad/"):
                shared = self._op(f"{name}/shared", SHARE, tensor, maker.module, BACKWARD)
                exits.setdefault(maker.name, []).append(shared)
                results.append((name, shared.name))
            else:
                listed = self._by_rank(name, tensor)
                last += listed
                results += [(name, listed[1].name), (f"{name}{LIST_SUFFIX}", listed[0].name)]
        for op in self.base.ops:
            ops += [rename_inputs(op, self.entered), *exits.get(op.name, ())]
        return replace(
            self.base,
            ops=(*ops, *last),
            tensors=self.tensors,
            variables=tuple(replace(v, own=v.kind == "buffer") for v in self.base.variables),
            results=tuple(results),
        )

    def _op(
        self,
        output: str,
        target: str,
        read: str,
        module: str,
        phase: str,
        *rest: float | tuple[int, ...],
        shape: tuple[int, ...] | None = None,
    ) -> Op:
        like = self.tensors[read]
        self.tensors[output] = LogicalTensor(
            output, like.shape if shape is None else shape, like.dtype
        )
        return Op(
            output, target, (Ref(read), *rest), (), outputs=(output,), module=module, phase=phase
        )

    def _enter(self, field: str, tensor: str) -> list[Op]:
        output = self.entered[tensor] = f"{tensor}/own"
        if field == DRAW:
            return self._own_draw(tensor, output)
        if field == TANGENT:
            share = 1.0 / self.ranks
            return [self._op(output, "aten.mul.Scalar", tensor, "loss", BACKWARD, share)]
        here = self.tensors[tensor]
        if not here.shape:
            del self.entered[tensor]
            return []
        op = self._op(output, OWN, tensor, "", FORWARD)
        rows, *rest = here.shape
        self.tensors[tensor] = replace(here, shape=(rows * self.ranks, *rest))
        return [op]

    def _own_draw(self, tensor: str, output: str) -> list[Op]:
        """Give each rank its own random draws: its samples are its own."""
        counted = f"{tensor}/ranks"
        self.tensors[counted] = LogicalTensor(counted, (self.ranks,), torch.int64)
        kind = (("dtype", torch.int64),)
        count = Op(counted, "aten.arange.default", (self.ranks,), kind, outputs=(counted,))
        index = self._op(f"{tensor}/rank", OWN, counted, "", FORWARD, shape=(1,))
        flat = self._op(
            f"{tensor}/index", "aten.view.default", index.name, "", FORWARD, (), shape=()
        )
        first = self._op(f"{tensor}/first", "aten.mul.Scalar", tensor, "", FORWARD, self.ranks)
        added = replace(
            self._op(output, "aten.add.Tensor", first.name, "", FORWARD),
            args=(Ref(first.name), Ref(flat.name)),
        )
        return [count, index, flat, first, added]

    def _by_rank(self, name: str, tensor: str) -> tuple[Op, Op]:
        shape = (self.ranks,)
        listed = self._op(f"{name}/by_rank", BY_RANK, tensor, "loss", FORWARD, shape=shape)
        mean = self._op(
            f"{name}/ranks", "aten.mean.default", listed.name, "loss", FORWARD, shape=()
        )
        return listed, mean
