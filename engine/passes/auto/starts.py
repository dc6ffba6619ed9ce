"""Starts: layouts made in simpler ways, for a search to begin with and never to be above."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flowrun.engine.graph import Feed, LogicalGraph, Variable
from flowrun.engine.passes.auto.network import Forms, Network
from flowrun.engine.passes.auto.objective import Form, Objective
from flowrun.engine.passes.auto.rows import inputs_of, outputs_of
from flowrun.engine.passes.auto.search import Choice


def choice_of(network: Network, signed: LogicalGraph) -> Choice | None:
    """The choice that a graph with signatures stands for; None where it has rows of its own."""
    rows, homes = [], []
    signatures = {op.name: (op.in_sbp, op.out_sbp) for op in signed.ops}
    for op, options in zip(network.ops, network.rows, strict=True):
        found = [k for k, r in enumerate(options) if _same(r, *signatures[op.name])]
        if not found:
            return None
        rows.append(found[0])
    sources: tuple[Variable | Feed, ...] = (*signed.variables, *signed.feeds)
    lives = {source.tensor: source.nd_sbp for source in sources}
    for name, nd_sbps in zip(network.sources, network.homes, strict=True):
        if lives[name] not in nd_sbps:
            return None
        homes.append(nd_sbps.index(lives[name]))
    return with_sets(network, (*rows, *homes))


def _same(row: object, ins: Sequence[object], outs: Sequence[object]) -> bool:
    return inputs_of(row) == tuple(ins) and outputs_of(row) == tuple(outs)  # type: ignore[arg-type]


def with_sets(network: Network, chosen: Choice) -> Choice | None:
    """Rows and homes, with the smallest sets of forms that hold all that is asked for."""
    choice = list(chosen)
    for there, readers in network.sets:
        asked = frozenset().union(
            *(r.forms[choice[r.variable]] for r in readers if r.variable is not None)
        )
        enough = [(len(forms), k) for k, forms in enumerate(there.forms) if asked <= forms]
        if not enough:
            return None
        choice.append(min(enough)[1])
    return tuple(choice)


def greedy(graph: LogicalGraph, network: Network, objective: Objective) -> Choice | None:
    """Op after op, the row that is cheapest with the boxings of its inputs; the first reader of a
    weight decides where it lives.
    """
    there: dict[str, Forms] = {}
    homes: dict[str, int] = {}
    sources: tuple[Variable | Feed, ...] = (*graph.variables, *graph.feeds)
    stages = {s.tensor: s.stage for s in sources}
    options = dict(zip(network.sources, network.homes, strict=True))
    by_name = {v.name: v.tensor for v in graph.variables}
    of = {v.tensor: by_name.get(v.of, v.tensor) for v in graph.variables if v.kind == "state"}

    def settle(name: str, nd_sbp: object) -> None:
        """A source that is read for the first time."""
        source = of.get(name, name)
        if source not in homes:
            homes[source] = next((k for k, home in enumerate(options[source]) if home == nd_sbp), 0)
        there[name] = frozenset(((stages[name], options[source][homes[source]]),))

    def price(name: str, form: Form, stay: bool) -> float:
        source = of.get(name, name)
        if name not in there and source not in homes:
            return 0.0 if form[1] in options[source] else math.inf
        if name not in there:
            settle(name, None)
        if stay:
            return 0.0 if form in there[name] else math.inf
        times = objective.box_times(name)
        return times * min(objective.box_seconds(name, have, form) for have in there[name])

    chosen = []
    for op, rows in zip(network.ops, network.rows, strict=True):
        costs = objective.row_seconds(op, rows).copy()
        changed = {n: v.new for n in op.inputs if (v := graph.variable_of.get(n)) and v.new}
        for k, row in enumerate(rows):
            for name, nd_sbp in zip(op.inputs, inputs_of(row), strict=True):
                costs[k] += price(name, (op.stage, nd_sbp), changed.get(name) in op.makes)
        chosen.append(int(costs.argmin()))
        row = rows[chosen[-1]]
        for name, nd_sbp in zip(op.inputs, inputs_of(row), strict=True):
            if name not in there:
                settle(name, nd_sbp)
            there[name] |= {(op.stage, nd_sbp)}
        for made, nd_sbp in zip(op.outputs, outputs_of(row), strict=True):
            if made is not None:
                there[made] = frozenset(((op.stage, nd_sbp),))
    return with_sets(network, (*chosen, *(homes.get(name, 0) for name in network.sources)))
