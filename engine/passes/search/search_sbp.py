"""search_sbp: trained -> laid_out, if `auto.enabled`.  Every op gets the signature, and every
weight the home, for which the whole step costs least: forward, backward and update, all axes.

Under ZeRO the update's signatures wait for shard_optimizer and infer_update, as without the search.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

from flowrun.engine.ir.graph import UPDATE, LogicalGraph
from flowrun.engine.passes.layout.infer_sbp import infer_all, infer_sbp
from flowrun.engine.passes.search.cost_network import Network
from flowrun.engine.passes.search.make_network import make_network
from flowrun.engine.passes.search.objective import Objective
from flowrun.engine.passes.search.options import Choice, Options, RowTables, inputs_of, outputs_of
from flowrun.engine.passes.search.search_network import SearchResult, search
from flowrun.engine.strategy import Strategy

# auto.memory -> how many times a step a held byte counts as read from memory.
WEIGHTS: Mapping[str, float] = {"off": 0.0, "slight": 1.0, "moderate": 10.0, "heavy": 100.0}
TRIED_WEIGHTS = tuple(0.5 * 2**k for k in range(14))  # tried by adaptive, if 0 does not fit
BYTES_ALONE = math.inf  # only bytes count


@dataclass(frozen=True)
class LayoutSearch:
    """A search and its result.

    inferred: the choice that it began with; None if a pass after inference changed its rows.
    byte_s: seconds that a held byte costs.  late: it was ended by auto.seconds, which
    is this many.
    """

    network: Network
    inferred: Choice | None
    found: SearchResult
    byte_s: float
    late: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the step: compute and visible boxings, of all stages together."""
        return self.network.cost(self.found.choice)[0]

    @property
    def bytes(self) -> float:
        """Bytes that a rank holds, as the search estimates them."""
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
    limit_s = strategy.auto.seconds or math.inf
    until = time.monotonic() + limit_s
    rows, objective = RowTables(graph, strategy), Objective(graph, strategy)
    objective.hide(
        {op.name: float(objective.row_seconds(op, rows.of(op)).min()) for op in graph.ops}
    )
    options = Options.of(graph, rows)
    layout = infer_all(graph, replace(strategy, auto=replace(strategy.auto, enabled=False)))
    inferred = options.choice_of(layout)
    starts: tuple[Choice, ...] = () if inferred is None else (inferred,)
    network = make_network(graph, options, objective, starts)
    starts = tuple(map(network.with_sets, starts))
    relaxed = cache(lambda: make_network(graph, options, objective, relaxed=True))

    def search_at(byte_s: float, *better: Choice) -> SearchResult:
        return search(network, relaxed, byte_s, (*starts, *better), until)

    found, byte_s = search_by_memory(search_at, network, strategy, until)
    late = limit_s if found.gap and time.monotonic() >= until else None
    return LayoutSearch(network, starts[0] if starts else None, found, byte_s, late)


class Search(Protocol):
    """A search for the cheapest choice at a price of a held byte, with further choices to begin
    with.
    """

    def __call__(self, byte_s: float, *better: Choice) -> SearchResult: ...


def search_by_memory(
    search: Search, network: Network, strategy: Strategy, until: float = math.inf
) -> tuple[SearchResult, float]:
    """Return (the result, the seconds that a held byte costs in it).

    strategy: has `auto.memory` and the memory of a rank.  With adaptive the price is the least of
    TRIED_WEIGHTS for which the memory suffices, as the search estimates them; if none does, only
    bytes count.  until: from then on no lower one is tried.
    """
    read_s, limit = 1 / strategy.hardware.memory_bytes_per_s, strategy.hardware.tensor_bytes
    if strategy.auto.memory != "adaptive":
        byte_s = WEIGHTS[strategy.auto.memory] * read_s
        return search(byte_s), byte_s

    def fits(result: SearchResult) -> bool:
        return not limit or network.cost(result.choice)[1] <= limit

    result = search(0.0)
    if fits(result):
        return result, 0.0
    last, last_s = search(BYTES_ALONE, result.choice), BYTES_ALONE  # the least known to fit
    low, high = 0, len(TRIED_WEIGHTS) if fits(last) else 0
    while low < high and time.monotonic() < until:
        middle = (low + high) // 2
        byte_s = TRIED_WEIGHTS[middle] * read_s
        result = search(byte_s, last.choice)
        if fits(result):
            last, last_s, high = result, byte_s, middle
        else:
            low = middle + 1
    return last, last_s


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
    tied = net.options.tied
    variables = tuple(
        replace(v, nd_sbp=homes[tied.get(v.tensor, v.tensor)]) for v in graph.variables
    )
    feeds = tuple(replace(feed, nd_sbp=homes[feed.tensor]) for feed in graph.feeds)
    notes = (*graph.notes, note(result))
    return replace(graph, ops=ops, variables=variables, feeds=feeds, notes=notes)


def note(result: LayoutSearch) -> str:
    """Return one line that says what was found, and how good it is."""
    proof = result.found.proof
    if result.late:
        proof = f"the best in {result.late:g} s, {proof}"
    text = f"auto: the layout takes {result.seconds * 1e3:.1f} ms by the search's own estimate, "
    text += f"summed over ops and boxings: {proof}"
    if result.byte_s:
        text += f"; memory is weighed too, and a rank holds {result.bytes / 1e6:.0f} MB"
    return text
