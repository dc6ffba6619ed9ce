"""Split, Broadcast, Partial, Owned: how a logical tensor lies on the ranks of one axis; nd-SBP for
several axes.

The vocabulary of the whole engine (OneFlow, arXiv 2110.15032, section 3).  Knows no graph, no
placement, no tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """S(dim): the ranks of the axis hold consecutive pieces along tensor dimension `dim`."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """B: every rank of the axis holds the same values."""

    def __str__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True)
class Partial:
    """P: the tensor is the elementwise sum of what the ranks of the axis hold; or the max, the min,
    or the logarithm of the sum of the exponentials ("logsumexp": statistics of a softmax).
    """

    reduce: str = "sum"

    def __str__(self) -> str:
        return "P" if self.reduce == "sum" else f"P({self.reduce})"


@dataclass(frozen=True, slots=True)
class Owned:
    """O(k): the rank at coordinate `owner` of the axis holds all of the tensor, the others nothing.

    Only ops of the update have it, where they need a whole matrix (passes/update/choose_owners.py):
    no home, no pin and no tensor of forward or backward.  To communicate it is an uneven split.
    """

    owner: int

    def __str__(self) -> str:
        return f"O({self.owner})"


Sbp = Split | Broadcast | Partial | Owned
NdSbp = tuple[Sbp, ...]
Pinned = tuple[tuple[str, Sbp], ...]  # name of an axis -> the SBP that the recipe fixes

B = Broadcast()
P = Partial()
P_MAX = Partial("max")
P_MIN = Partial("min")
P_LOGSUMEXP = Partial("logsumexp")


def S(dim: int) -> Split:
    """Shorthand for Split(dim)."""
    return Split(dim)


_SPLIT = re.compile(r"S\s*(?:\(\s*(\d+)\s*\)|(\d+))")
_PARTIAL = re.compile(r"P(?:\((sum|max|min|logsumexp)\))?")


def parse_sbp(text: str) -> Sbp:
    """Read "S(0)", "S0", "B", "P", "P(max)".  Raises ValueError with the possible forms."""
    word = str(text).strip()
    if word == "B":
        return B
    if match := _SPLIT.fullmatch(word):
        return Split(int(match[1] or match[2]))
    if match := _PARTIAL.fullmatch(word):
        return Partial(match[1] or "sum")
    raise ValueError(
        f"{word!r} is not an SBP; write S(0) or S0 (split dim 0), B (broadcast) or P (partial sum)"
    )


def is_elsewhere(nd_sbp: NdSbp, coordinate: tuple[int, ...]) -> bool:
    """Return whether the rank at a coordinate of the grid holds nothing, as others own it all."""
    pairs = zip(nd_sbp, coordinate, strict=True)
    return any(isinstance(sbp, Owned) and sbp.owner != index for sbp, index in pairs)


def format_nd_sbp(nd_sbp: NdSbp) -> str:
    """Print "(S(0), B)"; a single axis prints without parentheses."""
    return str(nd_sbp[0]) if len(nd_sbp) == 1 else f"({', '.join(map(str, nd_sbp))})"
