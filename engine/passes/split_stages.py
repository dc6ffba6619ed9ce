"""split_stages: captured -> staged.  Gives every op of forward and backward the stage (group of
ranks) that runs it.

A forward op follows its module; an op between modules follows the latest of its inputs.  A backward
op follows its forward module; a sum of gradients follows the earliest stage that it hears from (the
gradient travels towards stage 0 once, summed). A parameter lives where it is first used; a batch
field enters at every stage that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from flowrun.engine.cost.op_cost import op_seconds
from flowrun.engine.errors import RecipeError
from flowrun.engine.graph import FORWARD, Feed, LogicalGraph, Op, rename_inputs
from flowrun.engine.strategy import Strategy


def split_stages(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Stage of every op, variable and feed.  Raises RecipeError where `placement.stages` does not
    fit the model.
    """
    last = strategy.num_stages - 1
    if last == 0:
        ops = graph.ops
    else:
        home = dict(strategy.module_stages) or (
            _listed(graph, strategy) if strategy.stage_modules else _balanced(graph, strategy)
        )
        ops = _staged_ops(graph, home, last)
    return _feeds_per_stage(replace(graph, ops=ops, level="staged"), last)


def _staged_ops(graph: LogicalGraph, home: dict[str, int], last: int) -> tuple[Op, ...]:
    stage_of: dict[str, int] = {}  # tensor -> stage of the op that makes it
    ops: list[Op] = []
    for op in graph.ops:
        known = [stage_of[name] for name in op.inputs if name in stage_of]
        if op.module == "loss":
            stage = last
        elif op.module in home and op.module:
            stage = home[op.module]
        elif op.phase == FORWARD:
            stage = max(known, default=0)
        else:
            stage = min(known, default=last)
        ops.append(replace(op, stage=stage))
        stage_of.update(dict.fromkeys(op.makes, stage))
    return tuple(ops)


def _listed(graph: LogicalGraph, strategy: Strategy) -> dict[str, int]:
    """module path -> stage, from the recipe's patterns; a pattern covers what is inside a module
    that it names.
    """
    home: dict[str, int] = {}
    used: set[tuple[int, str]] = set()
    paths = list(dict.fromkeys(op.module for op in graph.ops if op.module not in ("", "loss")))
    for path in paths:
        for stage, patterns in enumerate(strategy.stage_modules):
            for pattern in patterns:
                if any(fnmatchcase(part, pattern) for part in _ancestors(path)):
                    home.setdefault(path, stage)
                    used.add((stage, pattern))
    for stage, patterns in enumerate(strategy.stage_modules):
        for pattern in patterns:
            if (stage, pattern) not in used:
                raise RecipeError(
                    f"placement.stages.{stage}.modules",
                    f"{pattern!r} matches no module that computes anything.",
                    "Modules: " + ", ".join(dict.fromkeys(map(unit_of, paths))),
                )
    if lost := [path for path in paths if path not in home]:
        raise RecipeError(
            "placement.stages",
            f"no stage lists the module {unit_of(lost[0])!r}.",
            "Every module that computes must belong to one stage.",
        )
    return home


def _ancestors(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: k + 1]) for k in range(len(parts))]


def unit_of(path: str) -> str:
    """The block that a module belongs to: the path up to its first number, else its first name."""
    parts = path.split(".")
    for k, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: k + 1])
    return parts[0]


def _balanced(graph: LogicalGraph, strategy: Strategy) -> dict[str, int]:
    """module path -> stage: consecutive blocks, so that the slowest stage is as fast as possible
    (exact, by recursion).
    """
    paths: list[list[str]] = []
    units: list[str] = []
    seconds: dict[str, float] = {}
    for op in graph.ops:
        if op.module == "":
            continue
        unit = unit_of(op.module)
        shapes = [graph.tensors[name].shape for name in op.inputs]
        outs = [None if name is None else graph.tensors[name].shape for name in op.outputs]
        seconds[unit] = seconds.get(unit, 0.0) + op_seconds(op, shapes, outs, strategy.hardware)
        if op.phase == FORWARD and op.module != "loss":
            if unit not in units:
                units.append(unit)
                paths.append([])
            paths[units.index(unit)].append(op.module)
    wanted = strategy.num_stages
    if len(units) < wanted:
        raise RecipeError(
            "placement.stages",
            f"{wanted} stages, but the model has {len(units)} blocks: {', '.join(units)}.",
            f"At most {len(units)} stages are possible.",
        )
    costs = [seconds[unit] for unit in units]
    costs[-1] += seconds.get("loss", 0.0)
    cuts = balanced_cuts(costs, wanted)
    return {
        path: stage
        for stage, (start, end) in enumerate(zip((0, *cuts), (*cuts, len(units)), strict=True))
        for k in range(start, end)
        for path in paths[k]
    }


def balanced_cuts(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Where to cut `costs` into `stages` consecutive, non-empty groups so that the largest sum is
    smallest.
    """
    n = len(costs)
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {
        (1, end): (sum(costs[:end]), ()) for end in range(1, n + 1)
    }
    for k in range(2, stages + 1):
        for end in range(k, n + 1):
            best[k, end] = min(
                (max(best[k - 1, cut][0], sum(costs[cut:end])), (*best[k - 1, cut][1], cut))
                for cut in range(k - 1, end)
            )
    return best[stages, n][1]


def _feeds_per_stage(graph: LogicalGraph, last: int) -> LogicalGraph:
    """One feed for each stage that reads a field, and the home stage of every variable."""
    readers: dict[str, list[int]] = {}
    for op in graph.ops:
        for name in op.inputs:
            readers.setdefault(name, []).append(op.stage)
    feeds: list[Feed] = []
    tensors = dict(graph.tensors)
    names: dict[tuple[str, int], str] = {}
    for feed in graph.feeds:
        for stage in sorted(set(readers.get(feed.tensor, ()))):
            name = feed.tensor if last == 0 else f"{feed.tensor}@{stage}"
            names[feed.tensor, stage] = name
            tensors[name] = replace(tensors[feed.tensor], name=name)
            feeds.append(replace(feed, tensor=name, stage=stage))
    ops = tuple(
        rename_inputs(op, {n: names[n, op.stage] for n in op.inputs if (n, op.stage) in names})
        for op in graph.ops
    )
    variables = tuple(
        replace(v, stage=readers[v.tensor][0]) for v in graph.variables if v.tensor in readers
    )
    return replace(graph, ops=ops, tensors=tensors, feeds=tuple(feeds), variables=variables)
