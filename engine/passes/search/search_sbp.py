"""search_sbp: trained -> laid_out, if `auto.enabled`.  Every op gets the signature, and every
weight the home, for which the whole step costs least: forward, backward and update, all axes.

Under ZeRO the update's signatures wait for shard_optimizer and infer_update, as without the search.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from flowrun.engine.ir.graph import UPDATE, LogicalGraph
from flowrun.engine.passes.layout.infer_sbp import infer_all, infer_sbp
from flowrun.engine.passes.search.cost_network import Network
from flowrun.engine.passes.search.make_network import make_network
from flowrun.engine.passes.search.objective import Objective
from flowrun.engine.passes.search.options import Choice, Options
from flowrun.engine.passes.search.rows import RowTables, inputs_of, outputs_of
from flowrun.engine.passes.search.search_network import SearchResult, search
from flowrun.engine.passes.search.starts import choice_of, greedy, with_sets
from flowrun.engine.passes.search.weigh import search_by_memory
from flowrun.engine.strategy import Strategy


@dataclass(frozen=True)
class LayoutSearch:
    """A search and its result.  starts: name -> a choice that it began with."""

    network: Network
    starts: dict[str, Choice]
    found: SearchResult
    byte_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the step: compute and visible boxings, of all stages together."""
        return self.network.cost(self.found.choice)[0]

    @property
    def bytes(self) -> float:
        """Bytes that a rank holds, by the search's own account."""
        return self.network.cost(self.found.choice)[1]


def assign_sbp(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Choose signatures of forward and backward ops, and homes of variables and feeds.

    By search if `auto.enabled`, else by inference.
    """
    if strategy.auto.enabled and strategy.axes:
        return write_layout(graph, strategy, search_layout(graph, strategy))
    return infer_sbp(graph, strategy)


def search_layout(graph: LogicalGraph, strategy: Strategy) -> LayoutSearch:
    """Search the layout of a graph.  The inferred layout is one of the starts: the result is not
    above it.
    """
    rows, objective = RowTables(graph, strategy), Objective(graph, strategy)
    objective.hide(
        {op.name: float(objective.row_seconds(op, rows.of(op)).min()) for op in graph.ops}
    )
    options = Options.of(graph, rows)
    layout = infer_all(graph, replace(strategy, auto=replace(strategy.auto, enabled=False)))
    simple = {"greedy": greedy(graph, options, objective), "inferred": choice_of(options, layout)}
    chosen = {name: choice for name, choice in simple.items() if choice is not None}
    net = make_network(graph, options, objective, chosen.values())
    starts = {name: with_sets(net, choice) for name, choice in chosen.items()}
    relaxed = cache(lambda: make_network(graph, options, objective, relaxed=True))

    def found(byte_s: float, *better: Choice) -> SearchResult:
        return search(net, relaxed, byte_s, (*starts.values(), *better))

    return LayoutSearch(net, starts, *search_by_memory(found, net, strategy))


def write_layout(graph: LogicalGraph, strategy: Strategy, result: LayoutSearch) -> LogicalGraph:
    """Return the graph with the layout of a search, and a note of how good it is."""
    net, choice = result.network, result.found.choice
    late = strategy.zero.stage > 0
    ops = tuple(
        op
        if late and op.phase == UPDATE
        else replace(op, in_sbp=inputs_of(rows[k]), out_sbp=outputs_of(rows[k]))
        for op, rows, k in zip(graph.ops, net.options.rows, choice, strict=False)
    )
    homes = net.options.homes_at(choice)
    by_name = {v.name: v.tensor for v in graph.variables}
    variables = tuple(
        replace(v, nd_sbp=homes[v.tensor if v.tensor in homes else by_name[v.of]])
        for v in graph.variables
    )
    feeds = tuple(replace(feed, nd_sbp=homes[feed.tensor]) for feed in graph.feeds)
    notes = (*graph.notes, note(result))
    return replace(graph, ops=ops, variables=variables, feeds=feeds, notes=notes)


def note(result: LayoutSearch) -> str:
    """Return one line that says what was found, and how good it is."""
    search = result.found
    proof = "proved least" if search.gap == 0.0 else f"at most {search.gap:.1%} above the least"
    if search.bound <= 0.0:
        proof = "not proved least"
    text = f"auto: the layout takes {result.seconds * 1e3:.1f} ms by the search's own estimate, "
    text += f"summed over ops and boxings: {proof}"
    if result.byte_s:
        text += f"; memory is weighed too, and a rank holds {result.bytes / 1e6:.0f} MB"
    return text
