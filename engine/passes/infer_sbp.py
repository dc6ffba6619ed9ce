"""infer_sbp: trained -> signed.  Gives every op one signature an axis: pins first, then the legal
rows of least boxing time.

Axis after axis, outermost first, on the shapes that the axes before left over.  For each axis
chunks are decided in order, each exactly (layout_search.py): forward; backward, given forward; what
is written into buffers, where they live; update, given the weights' homes. shard_optimizer runs
before the last: it is why the update chunk is a pass of its own.

Conventions that the recipe need not spell out: on an axis named `data` (or the ZeRO axis) every
batch field enters split along dim 0, on any other axis whole; a weight that no pin names is free,
and B unless its readers all want one split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from flowrun.engine.boxing import path_seconds
from flowrun.engine.cost.hardware import Link
from flowrun.engine.errors import RecipeError, SbpError
from flowrun.engine.graph import (
    BACKWARD,
    FORWARD,
    UPDATE,
    Feed,
    LogicalGraph,
    Op,
    Variable,
    gradient_of,
)
from flowrun.engine.ops import registry
from flowrun.engine.ops.mirror import RELABELS
from flowrun.engine.ops.signature import Signature
from flowrun.engine.passes.layout_search import Form, Forms, Problem, Solution, solve
from flowrun.engine.passes.mirror import own_ops
from flowrun.engine.passes.pin_activations import matches_variable
from flowrun.engine.placement import BATCH_AXES, Shape, split_range
from flowrun.engine.sbp import B, NdSbp, P, Partial, S, Sbp, Split, parse_sbp
from flowrun.engine.strategy import Strategy

ASSIGN = "flow.assign"
_ELEMENT_S = 1e-12  # of one element computed: splits win ties, boxing never loses to it


def infer_sbp(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Signatures of forward and backward ops, homes of variables and feeds."""
    layout = _Layout(graph)
    notes: list[str] = list(graph.notes)
    for axis in range(len(strategy.axes)):
        axis_view = _Axis(layout, strategy, axis)
        forward = [op for op in graph.ops if op.phase == FORWARD and op.target != ASSIGN]
        backward = [op for op in graph.ops if op.phase not in (FORWARD, UPDATE)]
        assigned = [op for op in graph.ops if op.target == ASSIGN and op.phase == FORWARD]
        for chunk in (forward, backward, assigned):
            solution = axis_view.decide(chunk)
            if not solution.exact:
                notes.append(
                    f"axis {strategy.axes[axis]}: layout of {len(chunk)} ops is not proved least"
                )
        axis_view.keep_homes()
        notes.extend(_without_table(graph, strategy, axis))
    return replace(layout.graph(graph), level="signed", notes=tuple(dict.fromkeys(notes)))


def _without_table(graph: LogicalGraph, strategy: Strategy, axis: int) -> Iterator[str]:
    """One note for each kind of op that has no signature table: all ranks of the axis do all of it,
    from inputs that are gathered.
    """
    modules: dict[str, dict[str, None]] = {}  # target -> where it is, in order
    known = ("flow.pin", *RELABELS)
    for op in graph.ops:
        split = strategy.parts(op.stage, axis) > 1
        if split and op.target not in known and not registry.has_table(op.target):
            modules.setdefault(op.target, {})[op.module or "(top level)"] = None
    for target, (first, *others) in modules.items():
        where = f"module {first}" + (f" and {len(others)} more" if others else "")
        yield (
            f"{target} in {where} has no signature table: "
            f"all ranks of {strategy.axes[axis]} do all of it"
        )


def infer_update(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Signatures of the update ops, once the homes of weights and optimizer states are known."""
    layout = _Layout(graph)
    for axis in range(len(strategy.axes)):
        axis_view = _Axis(layout, strategy, axis)
        axis_view.decide([op for op in graph.ops if op.phase == UPDATE])
        axis_view.keep_homes()
    return layout.graph(graph)


class _Layout:
    """Decisions so far: nd-SBPs of every op's inputs and outputs, homes, and forms of every tensor
    by axis.
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

    def graph(self, graph: LogicalGraph) -> LogicalGraph:
        """The graph with all decisions written into it."""
        return replace(
            graph,
            ops=tuple(
                replace(
                    op, in_sbp=tuple(self.in_sbp[op.name]), out_sbp=tuple(self.out_sbp[op.name])
                )
                for op in graph.ops
            ),
            variables=tuple(replace(v, nd_sbp=self.homes[v.tensor]) for v in graph.variables),
            feeds=tuple(replace(f, nd_sbp=self.homes[f.tensor]) for f in graph.feeds),
        )


def left_over(shape: Shape, nd_sbp: NdSbp, grid: Sequence[int]) -> Shape:
    """Largest shard of a shape after the axes decided so far."""
    out = list(shape)
    for sbp, parts in zip(nd_sbp, grid, strict=False):
        if isinstance(sbp, Split):
            out[sbp.dim] = split_range(out[sbp.dim], parts, 0)[1]
    return tuple(out)


class _Axis:
    """Decides one axis."""

    def __init__(self, layout: _Layout, strategy: Strategy, axis: int) -> None:
        self.layout = layout
        self.strategy = strategy
        self.axis = axis
        self.name = strategy.axes[axis]
        graph = layout.base
        self.variables: dict[str, Variable] = dict(graph.variable_of)
        self.weights = graph.of_weights  # to move what is made of a weight is to move the weight
        self.own = own_ops(graph, strategy)
        self.feeds: dict[str, Feed] = {f.tensor: f for f in graph.feeds}
        self.homes: dict[str, Form] = {}
        self.forms: dict[str, Forms] = {}
        self.whole: set[str] = set()  # made of nothing but constants and what is B: see _rows
        for variable in graph.variables:
            if len(variable.nd_sbp) > axis:
                self.forms[variable.tensor] = frozenset(((variable.stage, variable.nd_sbp[axis]),))
        for op in graph.ops:  # decided in an earlier pass: what later chunks may read
            if len(layout.out_sbp[op.name]) and len(layout.out_sbp[op.name][0]) > axis:
                for name, nd_sbp in zip(op.outputs, layout.out_sbp[op.name], strict=True):
                    if name is not None:
                        self.forms[name] = frozenset(((op.stage, nd_sbp[axis]),))

    # ------------------------------------------------------------------ one chunk

    def decide(self, ops: list[Op]) -> Solution:
        """Solve one chunk and write the rows into the layout."""
        made = {name for op in ops for name in op.makes}
        read = {name for op in ops for name in op.inputs}
        known = {name: self.forms[name] for name in read if name in self.forms and name not in made}
        homes = {n: self._homes(n) for n in read if n not in made and n not in known}
        self.whole |= {n for n, options in homes.items() if all(f[1] == B for f, _ in options)}
        rows = [self._rows(op) for op in ops]
        solution = solve(Problem(ops, rows, known, homes, self._box, self._movable))
        for op, row in zip(ops, solution.rows, strict=True):
            ins, outs = self.layout.in_sbp[op.name], self.layout.out_sbp[op.name]
            for i, sbp in enumerate(row.inputs):
                ins[i] = (*ins[i], sbp)
            for j, sbp in enumerate(row.outputs):
                outs[j] = (*outs[j], sbp)
        self.homes.update(solution.homes)
        self.forms.update(solution.forms)
        for op, row in zip(ops, solution.rows, strict=True):
            for name, sbp in zip(op.outputs, row.outputs, strict=True):
                if name is not None and name not in self.forms:
                    self.forms[name] = frozenset(((op.stage, sbp),))
        return solution

    def keep_homes(self) -> None:
        """Write the homes of this axis: a state lives with its parameter, and what nobody read is
        B.
        """
        parameters = {v.name: v.tensor for v in self.variables.values()}
        for tensor, nd_sbp in self.layout.homes.items():
            if len(nd_sbp) > self.axis:
                continue
            variable = self.variables.get(tensor)
            of = parameters.get(variable.of, "") if variable and variable.kind == "state" else ""
            home = self.homes.get(of or tensor)
            self.layout.homes[tensor] = (*nd_sbp, home[1] if home else B)

    def _movable(self, name: str) -> bool:
        return name not in self.weights

    def _shape(self, name: str, nd_sbp: NdSbp, stage: int) -> Shape:
        return left_over(
            self.layout.base.tensors[name].shape,
            nd_sbp[: self.axis],
            self.strategy.placements[stage].shape,
        )

    # ------------------------------------------------------------------ homes of sources

    def _homes(self, name: str) -> list[tuple[Form, float]]:
        if name in self.feeds:
            feed = self.feeds[name]
            return [((feed.stage, self._feed_home(feed)), 0.0)]
        variable = self.variables[name]
        return [((variable.stage, sbp), 0.0) for sbp in self._variable_homes(variable)]

    def _feed_home(self, feed: Feed) -> Sbp:
        parts = self.strategy.parts(feed.stage, self.axis)
        for pin in reversed(self.strategy.pins):
            if (
                pin.axis == self.name
                and pin.where == "variable"
                and pin.matches(f"batch.{feed.field}")
            ):
                return pin.sbp
        tensor = self.layout.base.tensors[feed.tensor]
        batched = self.name in BATCH_AXES or self.name == self.strategy.zero.axis
        if not batched or parts == 1 or not tensor.shape:
            return B
        rows = self._shape(feed.tensor, feed.nd_sbp, feed.stage)[0]
        if rows % parts:
            raise RecipeError(
                f"placement.axes.{self.name}",
                f"a micro-batch of {rows} samples cannot be divided over {parts} ranks.",
                "Choose train.batch_size and train.micro_batches so that "
                f"batch_size / micro_batches is a multiple of {parts}.",
            )
        return S(0)

    def _variable_homes(self, variable: Variable) -> list[Sbp]:
        shape = self._shape(variable.tensor, variable.nd_sbp, variable.stage)
        parts = self.strategy.parts(variable.stage, self.axis)
        if parts == 1:
            return [B]
        for pin in reversed(self.strategy.pins):
            if pin.axis == self.name and matches_variable(pin, variable):
                return [pin.sbp]
        constant = variable.kind == "buffer" and variable.new is None
        if self.name in BATCH_AXES or constant:
            return [B]
        return [B, *(S(i) for i, size in enumerate(shape) if size >= parts)]

    # ------------------------------------------------------------------ rows

    def _rows(self, op: Op) -> list[tuple[Signature, float]]:
        """Legal rows with their costs.

        What needs no communication to be whole everywhere (positions, masks, views of whole
        weights) is made whole: from B every other SBP is a local step.  It costs no boxing, and
        without it each such tensor would multiply the states of the search.
        """
        parts = self.strategy.parts(op.stage, self.axis)
        tensors = self.layout.base.tensors
        grid = self.strategy.placements[op.stage].shape
        in_shapes = [
            left_over(tensors[n].shape, nd[: self.axis], grid)
            for n, nd in zip(op.inputs, self.layout.in_sbp[op.name], strict=True)
        ]
        out_shapes = [
            None if n is None else left_over(tensors[n].shape, nd[: self.axis], grid)
            for n, nd in zip(op.outputs, self.layout.out_sbp[op.name], strict=True)
        ]
        legal: Iterable[Signature]
        if op.target == "flow.pin":
            legal = self._pin_rows(op, in_shapes[0], parts)
        elif op.target in RELABELS:
            legal = (RELABELS[op.target],)
        else:
            legal = registry.signatures(op, in_shapes, out_shapes, parts)
            legal = legal[:1] if op.name in self.own else legal
        if op.phase == UPDATE or op.target == ASSIGN:
            legal = self._at_home(op, legal)
        elif _is_plain(op) and self.whole.issuperset(op.inputs):
            legal = [row for row in legal if {*row.inputs, *row.outputs} <= {B}]
            self.whole.update(op.makes)
        rows = [(row, self._row_cost(op, row, in_shapes, out_shapes, parts)) for row in legal]
        if not rows:
            raise SbpError(
                f"{op.name} ({op.target}, module {op.module or '-'})",
                f"no signature is legal on axis {self.name!r}.",
                "Change the pins of this module's weights, or pin its input or output.",
            )
        return rows

    def _pin_rows(self, op: Op, shape: Shape, parts: int) -> list[Signature]:
        wanted = dict(op.args[1]).get(self.name)
        if parts == 1:
            return [Signature((B,), (B,))]
        options: list[Sbp] = (
            [parse_sbp(wanted)]
            if wanted
            else [B, P, *(S(i) for i, n in enumerate(shape) if n >= parts)]
        )
        return [Signature((sbp,), (sbp,)) for sbp in options]

    def _at_home(self, op: Op, legal: Iterable[Signature]) -> list[Signature]:
        """Rows that read every variable where it lives and leave it there."""
        forms = {**self.forms, **{name: {home} for name, home in self.homes.items()}}
        homes = {n: forms[n] for n in op.inputs if n in self.variables and n in forms}
        return [
            row
            for row in legal
            if all(
                (op.stage, sbp) in homes[n]
                for n, sbp in zip(op.inputs, row.inputs, strict=True)
                if n in homes
            )
        ]

    def _row_cost(
        self,
        op: Op,
        row: Signature,
        in_shapes: list[Shape],
        out_shapes: list[Shape | None],
        parts: int,
    ) -> float:
        cost = 0.0
        for sbps, shapes in ((row.inputs, in_shapes), (row.outputs, out_shapes)):
            for sbp, shape in zip(sbps, shapes, strict=True):
                count = 1
                for n in shape or ():
                    count *= n
                cost += _ELEMENT_S * (count / parts if isinstance(sbp, Split) else count)
        if row.reduced:
            cost += _seconds(
                P, B, parts, (row.reduced,), row.reduced * 4, self.strategy.hardware.link
            )
        if op.target == "flow.accumulate" and op.phase == BACKWARD:
            cost += self._to_home(op, row, in_shapes[0], parts)
        return cost

    def _to_home(self, op: Op, row: Signature, shape: Shape, parts: int) -> float:
        """A gradient ends at its weight's home: the boxing that it will need is part of the row's
        cost.
        """
        name = op.outputs[0] or ""
        of = gradient_of(name)
        variable = next((v for v in self.layout.base.variables if v.name == of), None)
        if variable is None or variable.tensor not in self.forms:
            return 0.0
        home = next(iter(self.forms[variable.tensor]))[1]
        num_bytes = self.layout.base.tensors[name].dtype.itemsize
        for n in shape:
            num_bytes *= n
        once_a_step = 0.99 / self.strategy.micro_batches  # and late rather than early, where m = 1
        return once_a_step * _seconds(
            row.outputs[0], home, parts, shape, num_bytes, self.strategy.hardware.link
        )

    # ------------------------------------------------------------------ boxing

    def _box(self, name: str, have: Form, wanted: Form) -> float:
        tensor = self.layout.base.tensors[name]
        link = self.strategy.hardware.link
        if have == wanted:
            return 0.0
        shape = self._shape(name, self._decided(name), have[0])
        num_bytes = tensor.dtype.itemsize
        for n in shape:
            num_bytes *= n
        parts = self.strategy.parts(have[0], self.axis)
        if have[0] == wanted[0]:
            return _seconds(have[1], wanted[1], parts, shape, num_bytes, link)
        crossing: Sbp = have[1]
        cost = link.latency_s + num_bytes / link.bytes_per_s
        if isinstance(crossing, Partial) and parts > 1:
            cost += _seconds(crossing, B, parts, shape, num_bytes, link)
        if isinstance(crossing, Split) and not isinstance(wanted[1], Split):
            cost += num_bytes / link.bytes_per_s
        return cost

    def _decided(self, name: str) -> NdSbp:
        if name in self.layout.homes:
            return self.layout.homes[name]
        op = self.layout.base.producer[name]
        return self.layout.out_sbp[op.name][op.outputs.index(name)]


def _is_plain(op: Op) -> bool:
    """True for torch's ops and constants: a pin asks for its own SBP, a draw is shared out."""
    return not op.target.startswith("flow.") or op.target == "flow.constant"


@lru_cache(maxsize=100_000)
def _seconds(have: Sbp, wanted: Sbp, parts: int, shape: Shape, num_bytes: int, link: Link) -> float:
    if have == wanted or parts == 1:
        return 0.0
    try:
        return path_seconds((have,), (wanted,), (parts,), shape, num_bytes, link)
    except SbpError:
        return 1e6
