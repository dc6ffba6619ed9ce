"""Location: where a logical tensor lies: the ranks of one stage, in one nd-SBP of their grid."""

from __future__ import annotations

from typing import NamedTuple

from flowrun.engine.ir.sbp import NdSbp


class Location(NamedTuple):
    """A stage, and the nd-SBP of a tensor on the axes of that stage's placement.

    A tuple, as the searches hash and compare locations by the million.
    """

    stage: int
    nd_sbp: NdSbp

    def __str__(self) -> str:
        return f"stage {self.stage}: {', '.join(map(str, self.nd_sbp)) or 'whole'}"
