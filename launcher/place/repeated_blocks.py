"""repeated_blocks: the same model with fewer of its equal blocks, and where to cut it into stages.

What a model of many equal blocks takes is linear in their number, so that few of them suffice
(reduced_depth.py).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from flowrun.engine.compile import Compilation
from flowrun.engine.ir.graph import FORWARD, LogicalGraph, Op
from flowrun.engine.ir.module_path import block_of
from flowrun.engine.passes.stages.balance_stages import ForwardSequence, balance_cuts
from flowrun.engine.passes.stages.chosen_stages import read_stages
from flowrun.engine.strategy import Decided, Strategy
from flowrun.engine.torch_internals import set_submodules, submodules_of
from flowrun.launcher.job.job import Job
from flowrun.launcher.place.resize import resize


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """The equal blocks of a model.  path: of the list that holds them, "" = the model itself."""

    path: str
    count: int

    def of(self, module: str) -> int | None:
        """The number of the block that a module path lies in."""
        return block_of(module, self.path)


def find_repeated_blocks(model: nn.Module) -> RepeatedBlocks:
    """The longest list of modules that are alike; of none, if there is no such list."""
    found = [
        RepeatedBlocks(path, len(part))
        for path, part in model.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential)
        and len({_describe(block) for block in part}) == 1
    ]
    return max(found, key=lambda blocks: blocks.count, default=RepeatedBlocks("", 0))


def _describe(block: nn.Module) -> Hashable:
    """Describe a block, equally for blocks that compute alike: its print, and what it holds."""
    held = (*block.named_parameters(), *block.named_buffers())
    return str(block), tuple((name, tensor.shape, tensor.dtype) for name, tensor in held)


def keep_blocks(model: nn.Module, blocks: RepeatedBlocks, count: int) -> nn.Module:
    """The model with the first `count` of its blocks; it shares all that it keeps."""
    shorter = part = _twin(model)
    for name in blocks.path.split(".") if blocks.path else ():
        twin = _twin(part.get_submodule(name))
        submodules_of(part)[name] = part = twin
    set_submodules(part, dict(list(submodules_of(part).items())[:count]))
    return shorter


def _twin(module: nn.Module) -> nn.Module:
    """A module of its own with the same parameters and parts."""
    twin = copy.copy(module)
    set_submodules(twin, submodules_of(module))
    return twin


def cut_after_blocks(graph: LogicalGraph, blocks: RepeatedBlocks, each: int) -> Decided:
    """Stages of `each` blocks: the first with all before the blocks, the last with all behind.

    graph: captured; a whole number of stages.
    """
    stage, ops = 0, []
    last = (1 + max(blocks.of(op.module) or 0 for op in graph.ops)) // each - 1
    for op in graph.ops:
        block = blocks.of(op.module)
        if op.phase == FORWARD:
            stage = max(stage, min(last, (block or 0) // each))
        ops.append(replace(op, stage=stage))
    return Decided(read_stages(replace(graph, ops=tuple(ops))).ops, ())


def cut_evenly(
    pieces: Sequence[Op], line: ForwardSequence, blocks: RepeatedBlocks, ranks: Sequence[int]
) -> tuple[float, ...]:
    """Return the number of blocks on each stage of the whole model, cut as the compiler cuts it.

    Parts of a block count by their work.  What lies before the blocks does not count on the first
    stage, nor what lies after them on the last; the number is negative if a stage does not even
    have all of that, which others then have.

    pieces, line: of the model with two blocks (split_stages.line_to_cut); the second stands for all
    behind the first.  ranks: of each stage.
    """
    second = [k for k, op in enumerate(pieces) if blocks.of(op.module) == 1]
    start, end = second[0], second[-1] + 1
    again = (*range(end), *list(range(start, end)) * (blocks.count - 2), *range(end, len(pieces)))
    whole = ForwardSequence(
        *(
            tuple(each[k] for k in again)
            for each in (line.work_s, line.entering_s, line.returning_s)
        )
    )
    cuts = (0, *balance_cuts(whole, ranks), len(again))
    work = [sum(whole.work_s[one:other]) for one, other in itertools.pairwise(cuts)]
    block = sum(line.work_s[start:end])
    first = next(k for k, op in enumerate(pieces) if blocks.of(op.module) == 0)
    work[0] -= sum(line.work_s[:first])
    work[-1] -= sum(line.work_s[end:])
    return tuple(each / block for each in work)


class Captures:
    """The graphs of a model that a search asks for, each captured once.  What is captured does not
    depend on the ranks, so that searches for several numbers of them share it.

    job: of the recipe as it is; its model, data and task serve all.  blocks: that the model
    repeats.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.blocks = find_repeated_blocks(job.materials.model)
        self._known: dict[int, dict[int, LogicalGraph]] = {}  # blocks -> samples -> graph

    def of(self, rows: int, strategy: Strategy, count: int = 0) -> LogicalGraph:
        """Capture the whole model, or one with `count` of its equal blocks: of two numbers of
        samples, from which the others follow.

        rows: samples of a micro-batch.  strategy: the mirrored view captures what one rank reads.
        """
        shards = len(strategy.placements[0].ranks) if strategy.mirrored else 1
        known, samples = self._known.setdefault(count, {}), rows // shards
        if samples not in known:
            resized = resize(samples, known) if count else None
            known[samples] = resized or self._capture(rows, strategy, count)
        return known[samples]

    def _capture(self, rows: int, strategy: Strategy, count: int) -> LogicalGraph:
        batch, task = self.job.materials.sampler(0, 0, slice(0, rows)), self.job.materials.task
        if count:
            task = replace(task, model=keep_blocks(task.model, self.blocks, count))
        return Compilation(task, batch, strategy).captured
