"""Recipe: what all of the launcher reads, once the keys (schema.py) are composed and checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.ir.placement import Placement
from flowrun.engine.strategy import Auto, Pin, Recompute, Zero
from flowrun.launcher.recipe.schema import (
    Adapters,
    Engine,
    Eval,
    Launch,
    Optim,
    Precision,
    SweepKeys,
    Target,
    TaskKeys,
    Train,
)


@dataclass(frozen=True)
class Stage:
    """A stage is one group of ranks and the modules that it owns.

    modules: patterns of module paths; empty: cut by foreseen time.  placement: the recipe's axes,
    with the sizes of this stage.
    """

    modules: tuple[str, ...]
    placement: Placement


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe, composed, checked and resolved.  Picklable; equal by value.

    axes: names whose size is over 1 in some stage, outermost first; every stage's placement has
    exactly these.
    signatures: as in RecipeSchema.
    pins: the lines of `sbp`; those of other axes are left out.  plan_axis: of `sbp.from_model`, if
    it has ranks.  text: the resolved recipe as YAML;
    empty of a candidate that is only planned.
    """

    name: str
    model: Target
    weights: str
    adapters: Adapters
    task: TaskKeys
    data: Target
    eval: Eval
    optim: Optim
    axes: tuple[str, ...]
    stages: tuple[Stage, ...]
    chunks: int
    in_flight: int | str
    pins: tuple[Pin, ...]
    plan_axis: str
    signatures: dict[str, Any]
    view: str
    zero: Zero
    recompute: Recompute
    auto: Auto
    precision: Precision
    train: Train
    launch: Launch
    engine: Engine
    hardware: Hardware
    callbacks: tuple[object, ...] = ()
    log: tuple[object, ...] = ()
    sweep: SweepKeys = field(default_factory=SweepKeys)
    text: str = field(default="", repr=False, compare=False)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The grids of ranks, one for each stage."""
        return tuple(stage.placement for stage in self.stages)

    @property
    def stage_modules(self) -> tuple[tuple[str, ...], ...]:
        """Patterns of each stage; empty where the compiler is to cut."""
        listed = tuple(stage.modules for stage in self.stages)
        return listed if any(listed) else ()

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages together."""
        return sum(len(placement.ranks) for placement in self.placements)

    @property
    def placed_ranks(self) -> int:
        """The number of ranks that auto.placement places."""
        return self.auto.ranks or self.num_ranks

    @property
    def micro_batch_size(self) -> int:
        """Samples of one micro-batch, over all ranks."""
        return self.train.batch_size // self.train.micro_batches

    def to_yaml(self) -> str:
        """The resolved recipe; `recipe=that_file.yaml` composes to the same recipe."""
        return self.text
