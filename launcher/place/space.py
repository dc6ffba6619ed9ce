"""Space: which candidates there are for a recipe and a number of ranks.

A candidate says sizes of the axes, stages and micro-batches (together a Branch: its layout is
decided once), and ZeRO, recomputation and in_flight (a leaf of it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import reduce
from operator import getitem
from typing import Any

from flowrun.engine.ir.placement import BATCH_AXES
from flowrun.launcher.recipe.key_schema import flatten_keys, spell_value
from flowrun.launcher.recipe.schema import KEEPABLE, MIRRORED

Axes = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """axes: (name, size), outermost first, all of the recipe's, those of size 1 too."""

    axes: Axes
    stages: int
    micro_batches: int

    @property
    def grid(self) -> tuple[Axes, int]:
        """The sizes that decide the shape of a rank's work."""
        return self.axes, self.stages

    @property
    def num_ranks(self) -> int:
        return self.stage_ranks * self.stages

    @property
    def stage_ranks(self) -> int:
        return math.prod(size for _, size in self.axes)

    def __str__(self) -> str:
        sizes = [f"{name} {size}" for name, size in self.axes if size > 1]
        sizes += [f"stages {self.stages}"] * (self.stages > 1)
        return " x ".join(sizes) or "one rank"


@dataclass(frozen=True, slots=True)
class Candidate:
    """in_flight: as Strategy's.  recompute: patterns of modules, empty = off; keep: what of them
    is stored all the same.
    """

    branch: Branch
    in_flight: int | str = "auto"
    zero: int = 0
    recompute: tuple[str, ...] = ()
    _: KW_ONLY
    keep: tuple[str, ...] = ()

    @property
    def keys(self) -> dict[str, Any]:
        """The recipe's keys that say so, nested; null stands for "auto"."""
        branch = self.branch
        in_flight = None if self.in_flight == "auto" else self.in_flight
        return {
            "placement": {
                "axes": dict(branch.axes),
                "stages": branch.stages,
                "chunks": 1,
                "in_flight": in_flight,
            },
            "train": {"micro_batches": branch.micro_batches},
            "zero": {"stage": self.zero},
            "recompute": {"modules": list(self.recompute), "keep": list(self.keep)},
        }

    @property
    def overrides(self) -> tuple[str, ...]:
        """The same for a command line."""
        return tuple(f"{key}={spell_value(value)}" for key, value in flatten_keys(self.keys))

    def __str__(self) -> str:
        count = self.branch.micro_batches
        words = [str(self.branch), f"{count} micro-batch{'es' * (count > 1)}"]
        held = f"{self.in_flight} in flight" if isinstance(self.in_flight, int) else self.in_flight
        words += [held] * (held != "auto")
        words += [f"ZeRO {self.zero}"] * (self.zero > 0)
        kept = f" but {', '.join(self.keep)}" if self.keep else ""
        words += [f"recompute {' '.join(self.recompute)}{kept}"] * bool(self.recompute)
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The space of candidates: what may be chosen.

    axes: names, outermost first.  batch_axes: those whose ranks divide the batch.  zero_axis: that
    ZeRO shards over, "" for none.  blocks: patterns of the model's repeated modules.
    fixed: dotted key of KEEPABLE -> the recipe's value, which stays.
    """

    ranks: int
    batch_size: int
    axes: tuple[str, ...]
    batch_axes: frozenset[str]
    zero_axis: str
    most_stages: int
    blocks: tuple[str, ...]
    fixed: Mapping[str, Any]

    @staticmethod
    def of(tree: Mapping[str, Any], ranks: int, blocks: Sequence[str] = ()) -> Space:
        """Make the space of a recipe.

        tree: the recipe's keys, resolved.  ranks: the number to place.  blocks: patterns of the
        model's repeated modules.
        """
        auto, sizes = tree["auto"], tree["placement"]["axes"]
        mirrored = tree["view"] == MIRRORED
        names = list(sizes)
        if not any(name in BATCH_AXES for name in names):
            names.insert(0, BATCH_AXES[0])
        if all(name in BATCH_AXES for name in names) and not mirrored:
            names.append("tensor")
        batch = [name for name in names if name in BATCH_AXES]
        kept = tuple(f"{key}." for key in auto["keep"])
        stay = (key for key in KEEPABLE if kept and f"{key}.".startswith(kept))
        fixed = {key: reduce(getitem, key.split("."), tree) for key in stay}
        return Space(
            ranks=ranks,
            batch_size=tree["train"]["batch_size"],
            axes=tuple(names),
            batch_axes=frozenset(batch),
            zero_axis=tree["zero"]["axis"] or batch[0],
            most_stages=1 if mirrored else 1 << 30,
            blocks=tuple(blocks),
            fixed=fixed,
        )

    def branches(self) -> Iterator[Branch]:
        """Every grid of the ranks, with every number of micro-batches whose rows it divides."""
        for *sizes, stages in factors(self.ranks, len(self.axes) + 1):
            axes = tuple(zip(self.axes, sizes, strict=True))
            if stages > self.most_stages or not self._is_allowed(dict(axes), stages):
                continue
            shards = math.prod(size for name, size in axes if name in self.batch_axes)
            for count in self._micro_batches():
                if self.batch_size // count % shards == 0:
                    yield Branch(axes, stages, count)

    def _is_allowed(self, axes: Mapping[str, int], stages: int) -> bool:
        wanted = self.fixed.get("placement.axes")
        if wanted is not None and any(wanted.get(name, 1) != n for name, n in axes.items()):
            return False
        if stages == 1 and self.fixed.get("placement.chunks", 1) > 1:
            return False
        listed = self.fixed.get("placement.stages", stages)
        return stages == (len(listed) if isinstance(listed, list) else listed)

    def _micro_batches(self) -> list[int]:
        if "train.micro_batches" in self.fixed:
            return [self.fixed["train.micro_batches"]]
        return [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]

    def leaves(self, branch: Branch) -> Iterator[Candidate]:
        """Yield candidates without recomputation, unless the recipe's must stay."""
        shards = dict(branch.axes).get(self.zero_axis, 1)
        zeros = (0, 1, 2, 3) if shards > 1 else (0,)
        recompute = tuple(self.fixed.get("recompute.modules", ()))
        for zero in (self.fixed["zero.stage"],) if "zero.stage" in self.fixed else zeros:
            for in_flight in self._in_flight(branch):
                yield Candidate(branch, in_flight, zero, recompute)

    def _in_flight(self, branch: Branch) -> tuple[int | str, ...]:
        """auto is zero_bubble where memory allows; it may choose less."""
        if "placement.in_flight" in self.fixed:
            return (self.fixed["placement.in_flight"] or "auto",)
        if branch.stages == 1:
            return ("auto",)
        return ("auto", "1f1b", "gpipe") if branch.micro_batches > 1 else ("auto", "1f1b")

    def smaller(self, candidate: Candidate) -> Iterator[Candidate]:
        """The same with recomputation: less memory, more work; tried where memory lacks."""
        if self.blocks and not candidate.recompute and "recompute.modules" not in self.fixed:
            for keep in (("matmul",), ()):
                yield replace(candidate, recompute=self.blocks, keep=keep)


def factors(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as an ordered product."""
    if parts == 1:
        yield (number,)
        return
    for first in (n for n in range(1, number + 1) if number % n == 0):
        for rest in factors(number // first, parts - 1):
            yield (first, *rest)
