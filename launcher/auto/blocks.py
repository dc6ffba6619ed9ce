"""blocks: the same model with fewer of its equal blocks, and where to cut it into stages.

What a model of many equal blocks takes is linear in their number, so that few of them tell all
(short.py).
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from flowrun.engine.graph import FORWARD, LogicalGraph, Op
from flowrun.engine.passes.split_stages import decided
from flowrun.engine.strategy import Decided


@dataclass(frozen=True, slots=True)
class Blocks:
    """The equal blocks of a model.  path: of the list that holds them, "" = the model itself."""

    path: str
    count: int

    def of(self, module: str) -> int | None:
        """The number of the block that a module path lies in."""
        inside = module.removeprefix(f"{self.path}.") if self.path else module
        if self.path and inside == module:
            return None
        number = inside.partition(".")[0]
        return int(number) if number.isdigit() else None


def equal_blocks(model: nn.Module) -> Blocks:
    """The longest list of modules that are alike; of none, if there is no such list."""
    found = [
        Blocks(path, len(part))
        for path, part in model.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential)
        and len({_described(block) for block in part}) == 1
    ]
    return max(found, key=lambda blocks: blocks.count, default=Blocks("", 0))


def _described(block: nn.Module) -> Hashable:
    """Equal for blocks that compute alike: what they print, and what they hold."""
    held = (*block.named_parameters(), *block.named_buffers())
    return str(block), tuple((name, tensor.shape, tensor.dtype) for name, tensor in held)


def with_blocks(model: nn.Module, blocks: Blocks, count: int) -> nn.Module:
    """The model with the first `count` of its blocks; it shares all that it keeps."""
    shorter = part = _twin(model)
    for name in blocks.path.split(".") if blocks.path else ():
        part._modules[name] = part = _twin(part._modules[name])  # type: ignore[arg-type]
    part._modules = dict(list(part._modules.items())[:count])
    return shorter


def _twin(module: nn.Module) -> nn.Module:
    """A module of its own with the same parameters and parts."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def cut(graph: LogicalGraph, blocks: Blocks, each: int) -> Decided:
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
    return Decided(decided(replace(graph, ops=tuple(ops))).ops, ())


def unevenness(line: Sequence[tuple[Op, float]], blocks: Blocks, stages: int) -> float:
    """Work of the slowest of so many stages over the mean, at best, where a model can be cut
    between any two ops.

    line: of the model with two blocks; the second stands for all behind the first.
    """
    parts: tuple[list[float], ...] = ([], [], [])  # up to the first block, the second, behind it
    part = 0
    for op, seconds in line:
        part = max(part, 1) if blocks.of(op.module) == 1 else 2 if part else 0
        parts[part].append(seconds)
    work = parts[0] + parts[1] * (blocks.count - 1) + parts[2]
    mean = sum(work) / stages
    low, high = max(mean, *work), mean + max(work)
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if _cuts(work, middle) < stages else (middle, high)
    return high / mean


def _cuts(work: Sequence[float], most: float) -> int:
    """Between stages that each have at most so much."""
    cuts, here = 0, 0.0
    for each in work:
        if here + each > most:
            cuts, here = cuts + 1, 0.0
        here += each
    return cuts
