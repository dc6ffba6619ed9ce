"""Strategy: what the recipe asks of the compiler.  The passes read it; they know nothing of files,
Hydra or processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from flowrun.engine.cost.hardware import Hardware
from flowrun.engine.placement import Placement
from flowrun.engine.sbp import Sbp


@dataclass(frozen=True, slots=True)
class Pin:
    """One line of `sbp:`.  pattern over parameter or module names; where: "variable", "in" or
    "out"; axis by name.
    """

    pattern: str
    where: str
    axis: str
    sbp: Sbp

    def matches(self, name: str) -> bool:
        """fnmatch, case kept; `*` crosses dots."""
        return fnmatchcase(name, self.pattern)

    @property
    def key(self) -> str:
        """Dotted recipe key, for errors."""
        middle = "" if self.where == "variable" else f".{self.where}"
        return f"sbp.{self.pattern}{middle}.{self.axis}"


@dataclass(frozen=True, slots=True)
class Optimizer:
    """name: adamw or sgd.  clip_norm: largest global gradient norm, 0 = off.  arguments: keyword
    arguments of the update op.
    """

    name: str = "adamw"
    arguments: tuple[tuple[str, float | bool], ...] = ()
    clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class Zero:
    """axis: name, or "" for off.  stage: 0 to 3.  min_elements: smaller ones are not sharded."""

    axis: str = ""
    stage: int = 0
    min_elements: int = 1024


@dataclass(frozen=True, slots=True)
class Recompute:
    """Activation checkpointing.  modules: patterns of module paths; keep: classes of ops whose
    outputs are stored (passes/recompute.py).
    """

    modules: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Strategy:
    """Everything that decides the layout.

    axes: names, outermost first; every stage's placement has all of them (size 1 where a stage does
        not use one).
    placements: one a stage.
    stage_modules: module patterns of each stage; empty: cut by foreseen time.
    module_stages: (module path, stage) already decided, by the training graph for the evaluation
        graph; wins over both.
    in_flight: micro-batches that a stage may hold for backward: a number, "gpipe", "1f1b",
        "zero_bubble", or "auto", the most that memory allows up to zero bubble.
    """

    axes: tuple[str, ...]
    placements: tuple[Placement, ...]
    stage_modules: tuple[tuple[str, ...], ...] = ()
    module_stages: tuple[tuple[str, int], ...] = ()
    pins: tuple[Pin, ...] = ()
    zero: Zero = Zero()
    recompute: Recompute = Recompute()
    optimizer: Optimizer = Optimizer()
    micro_batches: int = 1
    in_flight: int | str = "auto"
    register_slots: int = 2
    hardware: Hardware = field(default_factory=Hardware)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.placements)

    def parts(self, stage: int, axis: int) -> int:
        """Ranks along an axis in a stage."""
        return self.placements[stage].shape[axis]
