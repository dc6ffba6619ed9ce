"""Draft: an actor while its registers are not known yet.  Between lower.py and registers.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowrun.engine.actors.plan import Work
from flowrun.engine.ir.sbp import NdSbp

Layouts = Mapping[str, tuple[int, NdSbp]]  # tensor -> (stage, nd-SBP)


@dataclass(frozen=True, slots=True)
class Draft:
    """Tensors read and made, by name; step_makes: those of them that it makes once a step."""

    name: str
    kind: str
    stage: int
    phase: str
    per_step: bool
    work: Work
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    step_makes: frozenset[str] = field(default_factory=frozenset)
