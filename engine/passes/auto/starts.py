"""Starts: layouts made in simpler ways, for a search to begin with and never to be above."""

from __future__ import annotations

import math

from flowrun.engine.graph import LogicalGraph
from flowrun.engine.passes.auto.forms import Forms
from flowrun.engine.passes.auto.network import Network
from flowrun.engine.passes.auto.objective import Form, Objective
from flowrun.engine.passes.auto.options import Choice, Options
from flowrun.engine.passes.auto.rows import inputs_of, outputs_of


def choice_of(options: Options, signed: LogicalGraph) -> Choice | None:
    """The choice that a graph with signatures stands for; None where it has rows of its own."""
    signatures = {op.name: (op.in_sbp, op.out_sbp) for op in signed.ops}
    places: dict[int, dict[object, int]] = {}  # of rows, which equal ops share
    for rows in options.rows:
        if id(rows) not in places:
            ends = [(inputs_of(row), outputs_of(row)) for row in rows]
            places[id(rows)] = {end: k for k, end in reversed(list(enumerate(ends)))}
    lives = {source.tensor: source.nd_sbp for source in signed.sources}
    found = [
        places[id(rows)].get(signatures[op.name])
        for op, rows in zip(options.ops, options.rows, strict=True)
    ]
    found += [
        homes.index(lives[name]) if lives[name] in homes else None
        for name, homes in zip(options.sources, options.homes, strict=True)
    ]
    chosen = tuple(k for k in found if k is not None)
    return chosen if len(chosen) == len(found) else None


def with_sets(network: Network, chosen: Choice) -> Choice:
    """Rows and homes, with the smallest sets of forms that hold all that is asked for.

    chosen: one of those that the network was made with, where it has not all sets.
    """
    choice = list(chosen)
    for there, readers in network.sets:
        asked = frozenset().union(
            *(r.forms[choice[r.variable]] for r in readers if r.variable is not None)
        )
        enough = ((len(forms), k) for k, forms in enumerate(there.forms) if asked <= forms)
        choice.append(min(enough)[1])
    return tuple(choice)


def greedy(graph: LogicalGraph, options: Options, objective: Objective) -> Choice:
    """Op after op, the row that is cheapest with the boxings of its inputs; the first reader of a
    weight decides where it lives.
    """
    there: dict[str, Forms] = {}
    homes: dict[str, int] = {}
    stages = {source.tensor: source.stage for source in graph.sources}
    homes_of = dict(zip(options.sources, options.homes, strict=True))

    def settle(name: str, nd_sbp: object) -> None:
        """A source that is read for the first time."""
        source = options.tied.get(name, name)
        if source not in homes:
            homes[source] = next(
                (k for k, home in enumerate(homes_of[source]) if home == nd_sbp), 0
            )
        there[name] = frozenset(((stages[name], homes_of[source][homes[source]]),))

    def price(name: str, form: Form, stay: bool) -> float:
        source = options.tied.get(name, name)
        if name not in there and source not in homes:
            return 0.0 if form[1] in homes_of[source] else math.inf
        if name not in there:
            settle(name, None)
        if stay:
            return 0.0 if form in there[name] else math.inf
        times = objective.box_times(name)
        return times * min(objective.box_seconds(name, have, form) for have in there[name])

    chosen = []
    for op, rows in zip(options.ops, options.rows, strict=True):
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
    return (*chosen, *(homes.get(name, 0) for name in options.sources))
