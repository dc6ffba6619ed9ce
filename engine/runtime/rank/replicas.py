"""Replicas: what several ranks hold of a variable alike, by its nd-SBP, must have the same bytes.

Each rank makes a digest of every piece that it holds; `compare` finds the ranks whose piece is not
that of the others: hardware that computes or stores wrong, which no rank can see by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from flowrun.engine.actors.plan import Plan
from flowrun.engine.boxing.crossing import slices_of_ranks
from flowrun.engine.ir.graph import Variable
from flowrun.engine.ir.placement import Slices

Digests = Mapping[str, int]  # tensor of a variable -> digest of the piece that a rank holds
_CHUNK = 1 << 16  # words of 8 bytes whose products are held at once


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """A variable of which ranks should hold the same bytes and do not.

    guilty: ranks whose piece is not that of most; all of them where no piece is.  others: the ranks
    that hold what they should.
    """

    variable: str
    guilty: tuple[int, ...]
    others: tuple[int, ...] = ()


def digest(value: torch.Tensor) -> int:
    """Return a number of 64 bits that any change of up to 8 bytes in a row of words changes: a sum
    of words, each times an odd number of its place, modulo 2^64.
    """
    raw_bytes = value.detach().reshape(-1).contiguous().view(torch.uint8)
    words = torch.zeros(-(-len(raw_bytes) // 8), dtype=torch.int64, device=raw_bytes.device)
    words.view(torch.uint8)[: len(raw_bytes)] = raw_bytes
    total = torch.zeros((), dtype=torch.int64, device=raw_bytes.device)
    for start in range(0, len(words), _CHUNK):
        piece = words[start : start + _CHUNK]
        places = torch.arange(start, start + len(piece), device=raw_bytes.device)
        total += (piece * (2 * places + 1)).sum()
    return int(total)


def digests_of(plan: Plan, variables: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the digests of a rank's pieces, by tensor of the plan."""
    return {
        tensor: digest(value)
        for tensor, value in variables.items()
        if not plan.variables[tensor].own
    }


def compare(plan: Plan, digests: Mapping[int, Digests]) -> list[ReplicaDifference]:
    """Return the variables whose copies differ, in the order of the plan.  digests: by rank."""
    return [
        difference
        for v in plan.variables.values()
        if not v.own
        for ranks in _replicas(plan, v)
        if (difference := _differ(v.name, {rank: digests[rank][v.tensor] for rank in ranks}))
    ]


def _replicas(plan: Plan, variable: Variable) -> Iterator[Sequence[int]]:
    """Yield groups of ranks that hold the same piece of a variable."""
    groups = dict[Slices, list[int]]()
    placement, shape = plan.placements[variable.stage], plan.tensors[variable.tensor].shape
    for rank, held in slices_of_ranks(placement, variable.nd_sbp, shape).items():
        groups.setdefault(held, []).append(rank)
    yield from groups.values()


def _differ(name: str, digests: Mapping[int, int]) -> ReplicaDifference | None:
    """Return how the copies of one piece differ.  digests: by rank."""
    (most, count), *others = Counter(digests.values()).most_common()
    if not others:
        return None
    known = 2 * count > len(digests)
    guilty = tuple(r for r, held in digests.items() if not known or held != most)
    return ReplicaDifference(name, guilty, tuple(r for r in digests if r not in guilty))
