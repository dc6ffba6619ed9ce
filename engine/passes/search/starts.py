"""Starts: layouts made in simpler ways, as first choices of a search."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flowrun.engine.ir.graph import LogicalGraph, Op
from flowrun.engine.ir.location import Location
from flowrun.engine.ir.sbp import NdSbp
from flowrun.engine.passes.search.cost_network import Network
from flowrun.engine.passes.search.locations import Locations
from flowrun.engine.passes.search.objective import Objective
from flowrun.engine.passes.search.options import Choice, Options
from flowrun.engine.passes.search.rows import AxisSignatures, inputs_of, outputs_of


def choice_of(options: Options, signed: LogicalGraph) -> Choice | None:
    """Return the choice of a graph that has signatures; None if it has rows that are not in
    `options`.
    """
    signatures = {op.name: (op.in_sbp, op.out_sbp) for op in signed.ops}
    places: dict[int, dict[object, int]] = {}  # of rows, which equal ops share
    for rows in options.rows:
        if id(rows) not in places:
            ends = [(inputs_of(row), outputs_of(row)) for row in rows]
            places[id(rows)] = {end: k for k, end in reversed(list(enumerate(ends)))}
    lives = {source.tensor: source.nd_sbp for source in signed.sources}
    choice = [
        places[id(rows)].get(signatures[op.name])
        for op, rows in zip(options.ops, options.rows, strict=True)
    ]
    choice += [
        homes.index(lives[name]) if lives[name] in homes else None
        for name, homes in zip(options.sources, options.homes, strict=True)
    ]
    chosen = tuple(k for k in choice if k is not None)
    return chosen if len(chosen) == len(choice) else None


def with_sets(network: Network, chosen: Choice) -> Choice:
    """Return rows and homes with the smallest sets of forms that hold all that readers ask for.

    chosen: one of the starts of the network, if the network does not have all sets.
    """
    choice = list(chosen)
    for form_set, readers in network.sets:
        asked = frozenset().union(
            *(r.forms[choice[r.variable]] for r in readers if r.variable is not None)
        )
        enough = ((len(forms), k) for k, forms in enumerate(form_set.forms) if asked <= forms)
        choice.append(min(enough)[1])
    return tuple(choice)


def greedy(graph: LogicalGraph, options: Options, objective: Objective) -> Choice:
    """Choose, op after op, the row that is cheapest with the boxings of its inputs.

    The first reader of a weight decides its home.
    """
    walk = _Walk(graph, options, objective)
    rows = tuple(map(walk.pass_by, options.ops, options.rows))
    return (*rows, *(walk.homes.get(name, 0) for name in options.sources))


class _Walk:
    """A walk along the ops.

    forms: tensor -> the forms in which it exists so far.  homes: source -> the index of its home.
    """

    def __init__(self, graph: LogicalGraph, options: Options, objective: Objective) -> None:
        self.graph = graph
        self.options = options
        self.objective = objective
        self.forms: dict[str, Locations] = {}
        self.homes: dict[str, int] = {}
        self.stages = {source.tensor: source.stage for source in graph.sources}
        self.homes_of = dict(zip(options.sources, options.homes, strict=True))

    def pass_by(self, op: Op, rows: Sequence[AxisSignatures]) -> int:
        """Return the cheapest row of an op, and record the forms of its inputs and outputs."""
        costs = self.objective.row_seconds(op, rows).copy()
        written = {name for name in op.inputs if self.graph.writes(op, name)}
        for k, row in enumerate(rows):
            for name, nd_sbp in zip(op.inputs, inputs_of(row), strict=True):
                costs[k] += self._price(name, Location(op.stage, nd_sbp), stays=name in written)
        chosen = int(costs.argmin())
        for name, nd_sbp in zip(op.inputs, inputs_of(rows[chosen]), strict=True):
            if name not in self.forms:
                self._settle(name, nd_sbp)
            self.forms[name] |= {Location(op.stage, nd_sbp)}
        for output, made_as in zip(op.outputs, outputs_of(rows[chosen]), strict=True):
            if output is not None:
                self.forms[output] = frozenset((Location(op.stage, made_as),))
        return chosen

    def _price(self, name: str, form: Location, stays: bool) -> float:
        """Return the seconds of bringing a tensor into a form.

        stays: the op writes it in place, so it must exist in that form.
        """
        source = self.options.tied.get(name, name)
        if name not in self.forms and source not in self.homes:
            return 0.0 if form.nd_sbp in self.homes_of[source] else math.inf
        if name not in self.forms:
            self._settle(name, None)
        if stays:
            return 0.0 if form in self.forms[name] else math.inf
        ways = (self.objective.box_seconds(name, have, form) for have in self.forms[name])
        return self.objective.box_times(name) * min(ways)

    def _settle(self, name: str, wanted: NdSbp | None) -> None:
        """Give a source that is read for the first time the wanted home, if it has no home and
        may have this.
        """
        source = self.options.tied.get(name, name)
        homes = self.homes_of[source]
        self.homes.setdefault(source, homes.index(wanted) if wanted in homes else 0)
        self.forms[name] = frozenset((Location(self.stages[name], homes[self.homes[source]]),))
