"""search_sbp: trained -> signed, where `auto.enabled`.  Every op gets the signature, and every
weight the home, with which the whole step costs least: forward, backward and update, all axes.

Under ZeRO the update's signatures wait for shard_optimizer and infer_update, as without the search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flowrun.engine.graph import UPDATE, LogicalGraph
from flowrun.engine.passes.auto.network import Network, network
from flowrun.engine.passes.auto.objective import HEAVIEST, WEIGHTS, Objective
from flowrun.engine.passes.auto.rows import Rows, inputs_of, outputs_of
from flowrun.engine.passes.auto.search import Choice, Found, search
from flowrun.engine.passes.auto.starts import choice_of, greedy
from flowrun.engine.strategy import Strategy

Infer = Callable[[LogicalGraph, Strategy], LogicalGraph]


@dataclass(frozen=True)
class Searched:
    """What a search was about, and what it found.  starts: by name, what it began with."""

    network: Network
    starts: dict[str, Choice]
    found: Found
    byte_s: float

    @property
    def seconds(self) -> float:
        """Of the step: compute and boxings that nothing hides, of all stages together."""
        return self.network.cost(self.found.choice)[0]

    @property
    def bytes(self) -> float:
        """That a rank holds, by the search's own account."""
        return self.network.cost(self.found.choice)[1]


def search_sbp(graph: LogicalGraph, strategy: Strategy, infer: Infer) -> LogicalGraph:
    """Signatures and homes by search.  infer: the inference that it is not to be above."""
    return signed(graph, strategy, searched(graph, strategy, infer))


def searched(graph: LogicalGraph, strategy: Strategy, infer: Infer) -> Searched:
    """The search alone."""
    rows, objective = Rows(graph, strategy), Objective(graph, strategy)
    objective.hide(
        {op.name: float(objective.row_seconds(op, rows.of(op)).min()) for op in graph.ops}
    )
    net = network(graph, rows, objective)
    inferred = infer(graph, replace(strategy, auto=replace(strategy.auto, enabled=False)))
    starts = {"greedy": greedy(graph, net, objective), "inferred": choice_of(net, inferred)}
    known = {name: choice for name, choice in starts.items() if choice is not None}
    relaxed = network(graph, rows, objective, relaxed=True)
    found, byte_s = _weighed(net, relaxed, strategy, known)
    return Searched(net, known, found, byte_s)


def _weighed(
    net: Network, relaxed: Network, strategy: Strategy, starts: dict[str, Choice]
) -> tuple[Found, float]:
    """With what a held byte costs; adaptive: the least weight that fits the memory, to a factor of
    2.
    """
    read_s = 1 / strategy.hardware.memory_bytes_per_s
    if strategy.auto.memory != "adaptive":
        byte_s = WEIGHTS[strategy.auto.memory] * read_s
        return search(net, relaxed, byte_s, starts.values()), byte_s
    found, weight, limit = (
        search(net, relaxed, 0.0, starts.values()),
        0.0,
        strategy.hardware.memory_bytes,
    )
    while limit and net.cost(found.choice)[1] > limit and weight < HEAVIEST:
        weight = max(0.5, 2 * weight)
        found = search(net, relaxed, weight * read_s, (*starts.values(), found.choice))
    return found, weight * read_s


def signed(graph: LogicalGraph, strategy: Strategy, result: Searched) -> LogicalGraph:
    """The graph with what was found written into it, and a note of how good it is."""
    net, choice = result.network, result.found.choice
    late = strategy.zero.stage > 0
    ops = tuple(
        op
        if late and op.phase == UPDATE
        else replace(op, in_sbp=inputs_of(rows[k]), out_sbp=outputs_of(rows[k]))
        for op, rows, k in zip(graph.ops, net.rows, choice, strict=False)
    )
    chosen = choice[len(ops) :]
    homes = {n: h[k] for n, h, k in zip(net.sources, net.homes, chosen, strict=False)}
    by_name = {v.name: v.tensor for v in graph.variables}
    variables = tuple(
        replace(v, nd_sbp=homes[v.tensor if v.tensor in homes else by_name[v.of]])
        for v in graph.variables
    )
    feeds = tuple(replace(feed, nd_sbp=homes[feed.tensor]) for feed in graph.feeds)
    notes = (*graph.notes, note(result))
    return replace(graph, ops=ops, variables=variables, feeds=feeds, level="signed", notes=notes)


def note(result: Searched) -> str:
    """One line for a person: what was found, and how good it is."""
    found = result.found
    proof = "proved least" if found.gap == 0.0 else f"at most {found.gap:.1%} above the least"
    if found.bound <= 0.0:
        proof = "not proved least"
    text = f"auto: the layout takes {result.seconds * 1e3:.1f} ms of compute and boxings, {proof}"
    if result.byte_s:
        text += f"; held bytes weighed in, {result.bytes / 1e6:.0f} MB"
    return text
