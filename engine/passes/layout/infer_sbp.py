"""infer_sbp: trained -> laid_out.  Gives every op one signature on each axis: pins first, then the
legal rows with the least boxing time.

Axes are decided one after another, outermost first, on the shapes that the axes before left.  On
each axis portions are decided in order, each exactly (axis_search.py): counts; forward; backward,
given forward; values written into buffers, at the buffers' homes; update, given the weights' homes.
shard_optimizer runs before the last, so the update portion is a pass of its own.

homes.py says in which layout batch fields and weights start; costs.py has the seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from flowrun.engine.errors import SbpError
from flowrun.engine.ir.graph import (
    BACKWARD,
    COUNT,
    FORWARD,
    UPDATE,
    WEIGHT_GRAD,
    WEIGHTS,
    Feed,
    LogicalGraph,
    Op,
    Variable,
)
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ir.placement import LENGTH_AXES, Shape, left_over
from flowrun.engine.ir.sbp import B, NdSbp, S
from flowrun.engine.ir.signature import Signature
from flowrun.engine.ops import registry
from flowrun.engine.ops.flow.sparse import COLLECT
from flowrun.engine.ops.flow.structure import PIN
from flowrun.engine.ops.flow.update import ASSIGN
from flowrun.engine.ops.traits import has, is_engine_op
from flowrun.engine.passes.layout.axis_search import (
    ACTIVATION,
    FREE,
    WEIGHT,
    AxisLocation,
    AxisLocations,
    Intent,
    Problem,
    Solution,
    solve,
)
from flowrun.engine.passes.layout.costs import Costs
from flowrun.engine.passes.layout.homes import feed_home, rows_on_axis, variable_homes
from flowrun.engine.passes.layout.long_attention import keys_of_attention
from flowrun.engine.passes.mirrored_view import own_ops
from flowrun.engine.strategy import Strategy


def infer_sbp(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Choose signatures of forward and backward ops, and homes of variables and feeds."""
    layout = _Layout(graph)
    notes: list[str] = list(graph.notes)
    for axis in range(len(strategy.axes)):
        axis_view = _Axis(layout, strategy, axis)
        counts = [op for op in graph.ops if op.phase in (COUNT, WEIGHTS)]
        forward = [op for op in graph.ops if op.phase == FORWARD and op.target != ASSIGN]
        backward = [op for op in graph.ops if op.phase in (BACKWARD, WEIGHT_GRAD)]
        assigned = [op for op in graph.ops if op.target == ASSIGN and op.phase == FORWARD]
        for portion in (counts, forward, backward, assigned):
            if portion is assigned:
                axis_view.settle(portion)
            solution = axis_view.decide(portion)
            if not solution.exact:
                notes.append(
                    f"axis {strategy.axes[axis]}: layout of {len(portion)} ops is not proved least"
                )
        axis_view.keep_homes()
        notes.extend(_without_table(graph, strategy, axis))
    return replace(layout.graph(), notes=tuple(dict.fromkeys(notes)))


def _without_table(graph: LogicalGraph, strategy: Strategy, axis: int) -> Iterator[str]:
    """Yield a note for each kind of op that no family of the engine knows.

    It says where the op's rows come from, or that all ranks of the axis compute all of it.
    """
    modules: dict[tuple[str, str], dict[str, None]] = {}  # target, origin -> where, in order
    for op in graph.ops:
        split = strategy.parts(op.stage, axis) > 1
        known = op.target == PIN or registry.info(op.target).relabels
        if split and not known and (op.table or not registry.has_table(op.target)):
            origin = op.table.origin if op.table else ""
            modules.setdefault((op.target, origin), {})[op.module or "(top level)"] = None
    for (target, origin), (first, *others) in modules.items():
        where = f"module {first}" + (f" and {len(others)} more" if others else "")
        if origin:
            yield f"{target} in {where}: its rows are {origin}"
        else:
            yield (
                f"{target} in {where} has no signature table: "
                f"every rank of {strategy.axes[axis]} computes all of it"
            )


def infer_update(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Choose signatures of the update ops, once the homes of weights and optimizer states are
    known.
    """
    owned = any(op.owner is not None for op in graph.ops)  # the search takes equal ops for one
    if strategy.auto.enabled and strategy.axes and not strategy.zero.stage and not owned:
        return graph  # search_sbp has decided them with all others
    ops = (replace(o, in_sbp=(), out_sbp=()) if o.phase == UPDATE else o for o in graph.ops)
    layout = _Layout(replace(graph, ops=tuple(ops)))  # it may be one that was searched without ZeRO
    for axis in range(len(strategy.axes)):
        axis_view = _Axis(layout, strategy, axis)
        axis_view.decide([op for op in graph.ops if op.phase == UPDATE])
        axis_view.keep_homes()
    return layout.graph()


def infer_all(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Choose signatures of all ops and homes of all sources."""
    return infer_update(infer_sbp(graph, strategy), strategy)


class _Layout:
    """The nd-SBPs of every op's inputs and outputs and the homes of sources, on the axes decided
    so far.
    """

    def __init__(self, graph: LogicalGraph) -> None:
        self.base = graph
        self.in_sbp: dict[str, list[NdSbp]] = {
            op.name: list(op.in_sbp) or [() for _ in op.inputs] for op in graph.ops
        }
        self.out_sbp: dict[str, list[NdSbp]] = {
            op.name: list(op.out_sbp) or [() for _ in op.outputs] for op in graph.ops
        }
        self.homes: dict[str, NdSbp] = {v.tensor: v.nd_sbp for v in graph.variables}
        self.homes.update({f.tensor: f.nd_sbp for f in graph.feeds})

    def graph(self) -> LogicalGraph:
        """Return the graph with all decisions written into it."""
        graph, ins, outs = self.base, self.in_sbp, self.out_sbp
        return replace(
            graph,
            ops=tuple(
                replace(op, in_sbp=tuple(ins[op.name]), out_sbp=tuple(outs[op.name]))
                for op in graph.ops
            ),
            variables=tuple(replace(v, nd_sbp=self.homes[v.tensor]) for v in graph.variables),
            feeds=tuple(replace(f, nd_sbp=self.homes[f.tensor]) for f in graph.feeds),
        )

    def append(self, op: Op, row: Signature) -> None:
        """Write down the row of an op on the next axis."""
        for known, added in ((self.in_sbp, row.inputs), (self.out_sbp, row.outputs)):
            known[op.name] = [(*nd, sbp) for nd, sbp in zip(known[op.name], added, strict=True)]

    def nd_sbp_of(self, name: str) -> NdSbp:
        """Return the nd-SBP of a tensor at its maker, or at its home, on the axes so far."""
        if name in self.homes:
            return self.homes[name]
        op = self.base.producer[name]
        return self.out_sbp[op.name][op.outputs.index(name)]


class _Axis:
    """The decisions on one axis."""

    def __init__(self, layout: _Layout, strategy: Strategy, axis: int) -> None:
        self.layout = layout
        self.strategy = strategy
        self.axis = axis
        self.name = strategy.axes[axis]
        graph = layout.base
        self.variables: dict[str, Variable] = dict(graph.variable_of)
        self.weights = graph.of_weights  # moving a tensor made of weights moves the weights
        self.own = own_ops(graph, strategy)
        self.feeds: dict[str, Feed] = {f.tensor: f for f in graph.feeds}
        self.samples = max((graph.tensors[f].shape[:1] for f in self.feeds), default=())
        self.homes: dict[str, AxisLocation] = {}
        self.forms: dict[str, AxisLocations] = {}
        self.costs = Costs(graph, strategy, axis, self.forms, layout.nd_sbp_of)
        self.keys = keys_of_attention(graph) if self.name in LENGTH_AXES else frozenset[str]()
        self.whole: set[str] = set()  # made of nothing but constants and what is B: see _rows
        for variable in graph.variables:
            if len(variable.nd_sbp) > axis:
                self.forms[variable.tensor] = frozenset(((variable.stage, variable.nd_sbp[axis]),))
        for op in graph.ops:  # tensors decided in an earlier pass, which later portions may read
            if len(layout.out_sbp[op.name]) and len(layout.out_sbp[op.name][0]) > axis:
                for name, nd_sbp in zip(op.outputs, layout.out_sbp[op.name], strict=True):
                    if name is not None:
                        self.forms[name] = frozenset(((op.stage, nd_sbp[axis]),))

    # ------------------------------------------------------------------ one portion

    def decide(self, ops: list[Op]) -> Solution:
        """Solve one portion and write the rows into the layout."""
        read = {n for op in ops for n in op.inputs} - {n for op in ops for n in op.makes}
        known = {name: self.forms[name] for name in read & self.forms.keys()}
        homes = {name: self._possible_homes(name) for name in read - known.keys()}
        self.whole |= {n for n, options in homes.items() if all(sbp == B for _, sbp in options)}
        rows = [self._rows(op) for op in ops]
        solution = solve(
            Problem(
                ops=ops,
                rows=rows,
                known=known,
                homes=homes,
                box=self.costs.box,
                like=self.costs.like,
                intent=self._intent,
                alike=self.costs.alike,
            )
        )
        self.homes.update(solution.homes)
        self.forms.update(solution.forms)
        for op, row in zip(ops, solution.rows, strict=True):
            self.layout.append(op, row)
            for name, sbp in zip(op.outputs, row.outputs, strict=True):
                if name is not None:
                    self.forms.setdefault(name, frozenset(((op.stage, sbp),)))
        return solution

    def settle(self, ops: list[Op]) -> None:
        """Fix the homes of variables that the ops write and that nothing has read.

        A row that reads such a variable elsewhere would write a copy.
        """
        for name in dict.fromkeys(name for op in ops for name in op.inputs):
            if name in self.variables and name not in self.homes | self.forms:
                home = self._possible_homes(name)[0]
                self.homes[name], self.forms[name] = home, frozenset((home,))

    def keep_homes(self) -> None:
        """Write the homes of this axis: a state lives with its parameter; a source that nobody
        reads is B.
        """
        graph = self.layout.base
        tensors = {v.name: v.tensor for v in graph.variables}
        for tensor, nd_sbp in self.layout.homes.items():
            if len(nd_sbp) > self.axis:
                continue
            variable = self.variables.get(tensor)
            of = tensors[graph.lives_with[variable.name]] if variable else tensor
            home = self.homes.get(of)
            self.layout.homes[tensor] = (*nd_sbp, home[1] if home else B)

    def _intent(self, name: str) -> Intent:
        if name in self.weights:
            return WEIGHT
        maker = self.layout.base.producer.get(name)
        rows = maker is not None and maker.target == COLLECT
        return FREE if rows or name in self.keys else ACTIVATION

    def _possible_homes(self, name: str) -> list[AxisLocation]:
        source = self.feeds.get(name) or self.variables[name]
        shape = self._left_over(name, self.layout.homes[name], source.stage)
        if isinstance(source, Feed):
            options = [feed_home(self.strategy, self.axis, source, shape)]
        else:
            options = variable_homes(self.strategy, self.axis, source, shape)
        return [(source.stage, sbp) for sbp in options]

    def _left_over(self, name: str, nd_sbp: NdSbp, stage: int) -> Shape:
        """Return the shape that the axes before this one leave of a tensor."""
        grid, shape = self.strategy.placements[stage].shape, self.layout.base.tensors[name].shape
        return left_over(shape, nd_sbp[: self.axis], grid)

    # ------------------------------------------------------------------ rows

    def _rows(self, op: Op) -> list[tuple[Signature, float]]:
        """Return legal rows with their costs.

        Tensors that need no communication to be whole everywhere (positions, masks, views of whole
        weights) are made whole: from B every other SBP is a local step.  This costs no boxing, and
        otherwise each such tensor would multiply the states of the search.
        """
        in_shapes = [
            self._left_over(n, nd, op.stage)
            for n, nd in zip(op.inputs, self.layout.in_sbp[op.name], strict=True)
        ]
        out_shapes = [
            None if n is None else self._left_over(n, nd, op.stage)
            for n, nd in zip(op.outputs, self.layout.out_sbp[op.name], strict=True)
        ]
        legal = self._legal(op, in_shapes, out_shapes)
        if op.name in self.own and op.target != PIN:
            legal = legal[:1]
        if (op.phase == UPDATE and op.owner is None) or op.target == ASSIGN:
            legal = self._rows_at_home(op, legal)
        elif _is_plain(op) and self.whole.issuperset(op.inputs):
            legal = [row for row in legal if {*row.inputs, *row.outputs} <= {B}]
            self.whole.update(op.makes)
        rows = self.costs.rows(op, legal, in_shapes, out_shapes)
        if not rows:
            raise SbpError(
                f"{op.name} ({op.target}, module {op.module or '-'})",
                f"no signature is legal on axis {self.name!r}.",
                "Change the pins of this module's weights, or pin its input or output.",
            )
        return rows

    def _legal(
        self, op: Op, ins: Sequence[Shape], outs: Sequence[Shape | None]
    ) -> Sequence[Signature]:
        """Return legal rows, without those that would make of an axis of lengths one of samples."""
        legal = rows_on_axis(self.strategy, op, self.axis, ins, outs)
        if self.name not in LENGTH_AXES or op.phase == UPDATE or op.target == PIN:
            return legal
        tensors, names = self.layout.base.tensors, (*op.inputs, *op.outputs)
        first = [n is not None and tensors[n].shape[:1] == self.samples for n in names]
        return [
            row
            for row in legal
            if S(0) not in itertools.compress((*row.inputs, *row.outputs), first)
        ]

    def _rows_at_home(self, op: Op, legal: Iterable[Signature]) -> list[Signature]:
        """Return the rows that read every variable at its home and leave it there."""
        homes = {
            n: {self.homes[n]} if n in self.homes else self.forms[n]
            for n in op.inputs
            if n in self.variables and (n in self.homes or n in self.forms)
        }
        return [
            row
            for row in legal
            if all(
                (op.stage, sbp) in homes[n]
                for n, sbp in zip(op.inputs, row.inputs, strict=True)
                if n in homes
            )
        ]


def _is_plain(op: Op) -> bool:
    """Return True for torch's ops and constants: a pin asks for its own SBP, and a draw is
    divided.
    """
    return not is_engine_op(op.target) or has(op.target, Trait.CONSTANT)
