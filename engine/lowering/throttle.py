"""throttle: what would run far ahead is held back.  Part of add_registers.py's work.

Weights are always there to be gathered (ZeRO 3), and nothing waits for the reduction of a gradient
(ZeRO 2, 3) but a sum.  The registers between neighbours hold neither: a rank that is early would
gather every weight, or hold every gradient until the other ranks come.  So an empty register goes
from one to the other, with a distance of `ahead` regions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flowrun.engine.actors.plan import BOX, REGION, Actor


@dataclass(frozen=True, slots=True)
class Throttle:
    """maker, readers: tensor -> the actors that make and read it.  weights: tensors that last."""

    actors: Sequence[Actor]
    maker: Mapping[str, int]
    readers: Mapping[str, Sequence[int]]
    weights: Collection[str]

    def pairs(self, ahead: int) -> Iterator[tuple[int, int]]:
        """(what goes first, what waits for it), with every micro-batch."""
        for gathers in self._by_phase(self.gathers, self._first_reader):
            order = sorted(gathers)
            for before, region in zip(order, order[ahead:], strict=False):
                yield from ((before, gather) for gather in gathers[region])
        for reductions in self._by_phase(self.reduces, self._source):
            order = sorted(reductions)
            for before, region in zip(order, order[ahead:], strict=False):
                yield from ((reduction, region) for reduction in reductions[before])

    def gathers(self, k: int) -> bool:
        """A boxing of weights, with every micro-batch."""
        actor = self.actors[k]
        return actor.kind == BOX and not actor.per_step and all(map(self._lasts, actor.reads))

    def _lasts(self, name: str) -> bool:
        """A weight, or the copy of one that another stage gets once a step."""
        return name in self.weights or self.actors[self.maker[name]].per_step

    def reduces(self, k: int) -> bool:
        """A boxing of gradients, with every micro-batch, that sums alone read."""
        actor = self.actors[k]
        readers = [self.actors[r] for name in actor.makes for r in self.readers.get(name, ())]
        sums = all(r.sums and set(r.sums).issuperset(r.makes) for r in readers)
        boxed = actor.kind == BOX and not actor.per_step
        return boxed and sums and self._source(k) is not None

    def _first_reader(self, k: int) -> int:
        """The first region that reads what is boxed, maybe in several steps."""
        readers = [r for name in self.actors[k].makes for r in self.readers.get(name, ())]
        return min(self._first_reader(r) if self.actors[r].kind == BOX else r for r in readers)

    def _source(self, k: int) -> int | None:
        """The last region of those that made what is boxed, maybe in several steps.  None: no
        region did.  It is a weight, such as a convolution's weight gradient reads, or made of
        weights once a step, or comes from another stage, whose send may wait for what this stage
        does later: to hold that back would stop both.
        """
        actor = self.actors[k]
        if actor.kind != BOX:
            return k if actor.kind == REGION and not actor.per_step else None
        makers = {self.maker[name] for name in actor.reads if name in self.maker}
        return max((s for s in map(self._source, makers) if s is not None), default=None)

    def _by_phase(
        self, chosen: Callable[[int], bool], region_of: Callable[[int], int | None]
    ) -> Iterable[dict[int, list[int]]]:
        """Yield, for each stage and phase: region -> the chosen boxings that belong to it."""
        phases: dict[tuple[int, str], dict[int, list[int]]] = {}
        for k, actor in enumerate(self.actors):
            region = region_of(k) if chosen(k) else None
            if region is not None:
                of_phase = phases.setdefault((actor.stage, actor.phase), {})
                of_phase.setdefault(region, []).append(k)
        return phases.values()
