"""weigh: the price of a held byte, by `auto.memory`, and the layout found with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from flowrun.engine.passes.search.cost_network import Network
from flowrun.engine.passes.search.options import Choice
from flowrun.engine.passes.search.search_network import SearchResult
from flowrun.engine.strategy import Strategy

# auto.memory -> how many times a step a held byte counts as read from memory.
WEIGHTS: Mapping[str, float] = {"off": 0.0, "slight": 1.0, "moderate": 10.0, "heavy": 100.0}
TRIED_WEIGHTS = tuple(0.5 * 2**k for k in range(14))  # tried by adaptive, if 0 does not fit
BYTES_ALONE = math.inf  # only bytes count


class Search(Protocol):
    """A search for the cheapest choice at a price of a held byte, with further choices to begin
    with.
    """

    def __call__(self, byte_s: float, *better: Choice) -> SearchResult: ...


def search_by_memory(
    search: Search, network: Network, strategy: Strategy
) -> tuple[SearchResult, float]:
    """Return (the result, the seconds that a held byte costs in it).

    strategy: has `auto.memory` and the memory of a rank.  With adaptive the price is the least of
    TRIED_WEIGHTS for which the memory suffices, by the search's own account; if none does, only
    bytes count.
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
    while low < high:
        middle = (low + high) // 2
        byte_s = TRIED_WEIGHTS[middle] * read_s
        result = search(byte_s, last.choice)
        if fits(result):
            last, last_s, high = result, byte_s, middle
        else:
            low = middle + 1
    return last, last_s
