"""Captures: the graphs of a model that a search asks for, each captured once.

What is captured does not depend on the ranks, so that searches for several numbers of them share
it.
"""

from __future__ import annotations

from dataclasses import replace

from flowrun.engine.compile import Compilation
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.strategy import Strategy
from flowrun.launcher.job.job import Job
from flowrun.launcher.place.repeated_blocks import find_repeated_blocks, keep_blocks


class Captures:
    """job: of the recipe as it is; its model, data and task serve all.  blocks: that the model
    repeats.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.blocks = find_repeated_blocks(job.materials.model)
        self._known: dict[tuple[int, int], LogicalGraph] = {}

    def of(self, rows: int, strategy: Strategy, count: int = 0) -> LogicalGraph:
        """Capture the whole model, or one with `count` of its equal blocks.

        rows: samples of a micro-batch.  strategy: the mirrored view captures what one rank reads.
        """
        shards = len(strategy.placements[0].ranks) if strategy.mirrored else 1
        key = rows // shards, count
        if key not in self._known:
            batch, task = self.job.materials.sampler(0, 0, slice(0, rows)), self.job.materials.task
            if count:
                task = replace(task, model=keep_blocks(task.model, self.blocks, count))
            self._known[key] = Compilation(task, batch, strategy).captured
        return self._known[key]
