"""weigh: what a held byte costs, by `auto.memory`, and what is found with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from flowrun.engine.passes.search.cost_network import Network
from flowrun.engine.passes.search.options import Choice
from flowrun.engine.passes.search.search_network import SearchResult
from flowrun.engine.strategy import Strategy

# How often a held byte counts as read from memory, in a step.
WEIGHTS: Mapping[str, float] = {"off": 0.0, "slight": 1.0, "moderate": 10.0, "heavy": 100.0}
TRIED = tuple(0.5 * 2**k for k in range(14))  # by adaptive, if 0 does not fit
ALONE = math.inf  # bytes alone count


class Search(Protocol):
    """The search for the least, with what a held byte costs; beginning with better, too."""

    def __call__(self, byte_s: float, *better: Choice) -> SearchResult: ...


def weighed(search: Search, network: Network, strategy: Strategy) -> tuple[SearchResult, float]:
    """What is found, and with which seconds for a held byte.

    adaptive: the least weight of TRIED for which the memory suffices, by the search's own account;
    where none does, the fewest bytes.
    """
    read_s, limit = 1 / strategy.hardware.memory_bytes_per_s, strategy.hardware.tensor_bytes
    if strategy.auto.memory != "adaptive":
        byte_s = WEIGHTS[strategy.auto.memory] * read_s
        return search(byte_s), byte_s

    def fits(found: SearchResult) -> bool:
        return not limit or network.cost(found.choice)[1] <= limit

    found = search(0.0)
    if fits(found):
        return found, 0.0
    last, last_s = search(ALONE, found.choice), ALONE  # the lightest weight that is known to fit
    low, high = 0, len(TRIED) if fits(last) else 0
    while low < high:
        middle = (low + high) // 2
        byte_s = TRIED[middle] * read_s
        found = search(byte_s, last.choice)
        if fits(found):
            last, last_s, high = found, byte_s, middle
        else:
            low = middle + 1
    return last, last_s
