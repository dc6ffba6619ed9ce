"""chosen_stages: stages of forward's line that are given, by the recipe's list of modules or by
another graph of the same model (evaluation follows training).

An op that the choice does not name goes to the latest stage of its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from flowrun.engine.actors.schedules import Schedule
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import FORWARD, LogicalGraph, Op
from flowrun.engine.ir.module_path import unit_of, within
from flowrun.engine.strategy import Decided


def stages_from_list(
    graph: LogicalGraph, line: Sequence[Op], lists: Sequence[Sequence[str]], last: int
) -> list[int]:
    """Return the stage of each op of the line, by a list of module patterns for each stage.

    lists: patterns by stage; a pattern covers the modules inside of those that it names, and of
    several stages that name a module the first has it.  last: the stage of the loss.  Raises
    RecipeError at `placement.stages` if a module is on no stage, and at a list of it with a pattern
    that puts nothing there.
    """
    modules = dict.fromkeys(op.module for op in graph.ops if op.phase == FORWARD)
    paths = [path for path in modules if path not in ("", "loss")]
    home = _homes(paths, lists)
    if lost := [path for path in paths if path not in home]:
        raise RecipeError(
            "placement.stages",
            f"no stage lists the module {unit_of(lost[0])!r}.",
            "Every module that computes must belong to one stage.",
        )
    home["loss"] = last
    return _fill_unknown(line, [home.get(op.module) for op in line])


def _homes(paths: list[str], lists: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return module -> the first stage that lists it."""
    home: dict[str, int] = {}
    for stage, patterns in enumerate(lists):
        for pattern in patterns:
            covered = [path for path in paths if _covers(pattern, path)]
            for path in covered:
                home.setdefault(path, stage)
            if all(home[path] < stage for path in covered):
                raise _idle(pattern, stage, covered, home, paths)
    return home


def _covers(pattern: str, path: str) -> bool:
    return any(fnmatchcase(module, pattern) for module in within(path))


def _idle(
    pattern: str, stage: int, covered: list[str], home: dict[str, int], paths: list[str]
) -> RecipeError:
    """Return the error for a pattern that puts nothing on its stage."""
    where = f"placement.stages.{stage}.modules"
    if covered:
        unit, before = unit_of(covered[0]), home[covered[0]]
        return RecipeError(
            where,
            f"every module that {pattern!r} matches is on an earlier stage: {unit!r} is on stage"
            f" {before}.",
            "List each module on one stage only.",
        )
    return RecipeError(
        where,
        f"{pattern!r} matches no module that computes anything.",
        "Modules: " + ", ".join(dict.fromkeys(map(unit_of, paths))),
    )


def read_stages(graph: LogicalGraph) -> Decided:
    """Return the stages of a graph, for another graph of the same model to follow."""
    forward = [op for op in graph.ops if op.phase == FORWARD and op.target.startswith("aten.")]
    stages = {key: op.stage for key, op in zip(_keys(forward), forward, strict=True)}
    variables = tuple((v.name, v.stage) for v in graph.variables if v.kind != "state")
    return Decided(tuple(stages.items()), variables)


def stages_from_graph(line: Sequence[Op], stages: Decided, last: int) -> list[int]:
    """Return the stage of each op of the line, as in another graph of the same model.

    stages: of the other graph.  last: the stage of a loss that the other graph has not.  An op that
    it has not goes to the stage of its module's last op there.
    """
    known = dict(stages.ops)
    of_module: dict[str, int] = {"loss": last}
    of_module.update({module: stage for (module, _, _), stage in known.items()})
    line_stages = [known.get(key, of_module.get(key[0])) for key in _keys(line)]
    return _fill_unknown(line, line_stages)


def _keys(ops: Sequence[Op]) -> list[tuple[str, str, int]]:
    """Return (module, target, number of equal ones before); copies on several stages count once."""
    seen: dict[tuple[str, str], dict[str, int]] = {}
    out: list[tuple[str, str, int]] = []
    for op in ops:
        names = seen.setdefault((op.module, op.target), {})
        name = op.name.partition("@")[0]
        out.append((op.module, op.target, names.setdefault(name, len(names))))
    return out


def pieces_from_stages(stages: Sequence[int], schedule: Schedule) -> list[int]:
    """Return the piece of each op of a line that goes through the stages several times.

    Raises RecipeError at `placement.chunks` if it does not as often as the schedule has chunks.
    """
    out: list[int] = []
    piece = 0
    for stage in stages:
        while schedule.stage_of(piece) != stage:
            piece += 1
        out.append(piece)
    num_stages, chunks = schedule.stages, schedule.chunks
    around = piece // num_stages + 1
    if around != chunks:
        raise RecipeError(
            "placement.chunks",
            f"the recipe asks for {chunks} chunks, but the modules listed in placement.stages go"
            f" around the {num_stages} stages {around} time{'s' * (around > 1)}, in order of"
            " computation.",
            f"Write chunks: {around}, or list the modules in another order.",
        )
    return out


def _fill_unknown(line: Sequence[Op], stages: Sequence[int | None]) -> list[int]:
    """Return the stages, with an op of unknown stage on the latest stage of its inputs."""
    stage_of: dict[str, int] = {}
    out: list[int] = []
    for op, known in zip(line, stages, strict=True):
        stage = max((stage_of.get(n, 0) for n in op.inputs), default=0) if known is None else known
        stage_of.update(dict.fromkeys(op.makes, stage))
        out.append(stage)
    return out
