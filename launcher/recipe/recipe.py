"""Recipe: what all of the launcher reads, once the keys (schema.py) are composed and checked."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowrun.engine.ir.placement import Placement
from flowrun.engine.strategy import Pin
from flowrun.launcher.platforms.platform import Seat
from flowrun.launcher.recipe.schema import RecipeSchema, Target


@dataclass(frozen=True)
class Stage:
    """A stage is one group of ranks and the modules that it owns.

    modules: patterns of module paths; empty: cut by foreseen time.  placement: the recipe's axes,
    with the sizes of this stage.
    """

    modules: tuple[str, ...]
    placement: Placement


@dataclass(frozen=True, kw_only=True)
class Recipe(RecipeSchema):
    """A recipe, composed, checked and resolved: its keys, and what they are parsed to.

    Picklable; equal by value.

    weights: of `model`, order, collate, buckets: of `data`, which are without them here.  bucket:
    the one of which batches are; 0: the longest.
    axes: names whose size is over 1 in some stage, outermost first; every stage's placement has
    exactly these.  in_flight: auto where the key is null.
    pins: the lines of `sbp`; those of other axes are left out.  plan_axis: of `sbp.from_model`, if
    it has ranks.  trained: patterns of the parameters that it trains; none: all.
    loss_key: where the loss is written.  seat: of this process among those of its platform.
    text: the resolved recipe as YAML; empty of a candidate that is only planned.
    """

    weights: str
    order: Target
    collate: Target
    buckets: tuple[int, ...]
    bucket: int = 0
    axes: tuple[str, ...]
    stages: tuple[Stage, ...]
    chunks: int
    in_flight: int | str
    pins: tuple[Pin, ...]
    plan_axis: str
    trained: tuple[str, ...] = ()
    loss_key: str = "task.loss"
    seat: Seat = field(default=Seat(), compare=False)
    text: str = field(repr=False, compare=False)

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
