"""`placement` and `sbp` of a recipe -> grids of ranks and pins, or an error that names the key.

A stage's grid is nested lists of ranks, one level an axis, outermost first; left out, stages take
consecutive ranks in order.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.placement import BATCH_AXES, LENGTH_AXES, Placement
from flowrun.engine.ir.sbp import parse_sbp
from flowrun.engine.strategy import Pin
from flowrun.launcher.recipe.recipe import Stage
from flowrun.launcher.recipe.recipe_errors import did_you_mean, require
from flowrun.launcher.recipe.schema import PlacementSchema
from flowrun.launcher.recipe.value_ranges import MOST_RANKS

USUAL_AXES = ("data", "tensor")  # a layout may pin these whether or not the placement has them
SIDES = ("in", "out")
FROM_MODEL = "from_model"  # a key of `sbp` that is no pattern
StageGrid = tuple[tuple[int, ...], tuple[int, ...]]  # (sizes, ranks row-major) of a stage


def parse_stages(placement: PlacementSchema) -> tuple[tuple[str, ...], tuple[Stage, ...]]:
    """Names of the axes of more than one rank, and a Stage for each of `placement.stages`."""
    axes, stages = placement.axes, placement.stages
    names, sizes = tuple(axes), tuple(axes.values())
    _check_names(names)
    _check_stages(stages, math.prod(sizes))
    entries: list[Mapping[str, object]] = [{}] * stages if isinstance(stages, int) else stages
    grids: list[StageGrid] = []
    for index, entry in enumerate(entries):
        start = sum(len(ranks) for _, ranks in grids)
        consecutive = sizes, tuple(range(start, start + math.prod(sizes)))
        listed, where = entry.get("ranks"), f"placement.stages.{index}.ranks"
        grids.append(consecutive if listed is None else _grid(listed, names, where))
    if not isinstance(stages, int):
        _check_grids(axes, grids)
    kept = tuple(i for i in range(len(names)) if any(shape[i] > 1 for shape, _ in grids))
    made = tuple(
        Stage(_patterns(entry, i), Placement(tuple((names[k], shape[k]) for k in kept), ranks))
        for i, (entry, (shape, ranks)) in enumerate(zip(entries, grids, strict=True))
    )
    empty = [index for index, stage in enumerate(made) if not stage.modules]
    require(
        len(empty) in (0, len(made)),
        f"placement.stages.{min(empty, default=0)}",
        "this stage lists no modules, but another one does.",
        "List the modules of every stage, or of none: then flowrun cuts by foreseen time.",
    )
    require(
        placement.chunks == 1 or len(made) > 1,
        "placement.chunks",
        f"{placement.chunks} pieces of the model on each stage, but one stage owns it whole.",
        "Add stages, placement.stages=2 or more, or leave chunks out.",
    )
    return tuple(names[k] for k in kept), made


def check_axis_names(axes: Iterable[str], sbp: Mapping[str, object], others: Iterable[str]) -> None:
    """Refuse an axis that nothing else names and that is spelled almost like one that is known: the
    ranks along a misspelled axis would all do the same.

    sbp: of the recipe; the axes of its pins are known.  others: further names that are.
    """
    known = {path[-1] for path, _ in _leaves(sbp, ()) if path} - {*SIDES, FROM_MODEL}
    known |= {str(sbp[FROM_MODEL])} if FROM_MODEL in sbp else set()
    known |= {*USUAL_AXES, *BATCH_AXES, *LENGTH_AXES, *others}
    for name in axes:
        numbered = re.sub(r"_?\d+$", "", name)  # tensor2, data_1: names of their own
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.75)
        require(
            name in known or numbered in known or not near,
            f"placement.axes.{name}",
            f"no pin of sbp, no zero.axis and no batch uses an axis {name!r}.",
            f"Did you mean {''.join(near)!r}? To add an axis of this name, write"
            f" +placement.axes.{name}=… on the command line, or a pin of sbp that names it.",
        )


def check_axis(where: str, axis: object, axes: Iterable[str], others: Sequence[str] = ()) -> None:
    """Refuse an axis at the key `where` that is neither of the placement's nor of the others."""
    known = tuple(dict.fromkeys((*axes, *others)))
    require(
        axis in known,
        where,
        f"placement.axes has no axis {axis!r}.",
        did_you_mean(str(axis), known) or "Add it: placement: {axes: {data: 2}}.",
    )


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        require(
            str(name).isidentifier() and name not in SIDES,
            f"placement.axes.{name}",
            f"{name!r} cannot name an axis.",
            "Use a word, such as data or tensor; not in, not out.",
        )


def _check_stages(stages: object, ranks: int) -> None:
    """ranks: of each stage."""
    where, stage = "placement.stages", "{modules: [patterns], ranks: [...]}"
    count = stages if isinstance(stages, int) else len(stages) if isinstance(stages, list) else 0
    require(
        count >= 1 and not isinstance(stages, bool),
        where,
        f"stages are a number of at least 1 or a list of stages, not {stages!r}.",
        f"Write stages: 2, or a list of {stage}.",
    )
    require(
        count * ranks <= MOST_RANKS,
        where if count > ranks else "placement.axes",
        f"{count:,} stages of {ranks:,} ranks are more than {MOST_RANKS:,} ranks.",
        "Choose smaller sizes of the axes, or fewer stages.",
    )
    for index, entry in enumerate(stages if isinstance(stages, list) else ()):
        problem = f"a stage is {stage}, not {entry!r}."
        require(isinstance(entry, Mapping), f"{where}.{index}", problem)
        for key in entry:
            guess, known = did_you_mean(str(key), ("modules", "ranks")), ("modules", "ranks")
            require(key in known, f"{where}.{index}.{key}", "a stage has no such key.", guess)


def _patterns(entry: Mapping[str, object], index: int) -> tuple[str, ...]:
    modules = entry.get("modules") or []
    given = modules if isinstance(modules, list) else [modules]
    patterns = tuple(each for each in given if isinstance(each, str))
    require(
        len(patterns) == len(given),
        f"placement.stages.{index}.modules",
        f"{modules!r} is not a list of module patterns.",
        'Write modules: ["embed", "blocks.[0-1]"].',
    )
    return patterns


def _grid(ranks: object, names: tuple[str, ...], where: str) -> StageGrid:
    """(sizes, ranks row-major) of nested lists; without axes, one rank alone or in a list."""
    try:
        shape, flat = _flatten(ranks)
    except ValueError as error:
        raise RecipeError(where, f"{ranks} is not a grid: {error}.", "Write [[0, 1]].") from None
    if not names and len(flat) == 1:
        return (), flat
    require(
        len(shape) == len(names),
        where,
        f"{ranks} is {len(shape)} lists deep, but placement.axes has {len(names)} axes"
        f" ({', '.join(names) or 'none'}).",
        "Nest one list for each axis, outermost first: 1 x 2 ranks are [[0, 1]].",
    )
    return shape, flat


def _flatten(ranks: object) -> StageGrid:
    """Raises ValueError for what is not a grid."""
    if isinstance(ranks, int) and not isinstance(ranks, bool) and ranks >= 0:
        return (), (ranks,)
    if not isinstance(ranks, list) or not ranks:
        raise ValueError(f"{ranks!r} is neither a rank, from 0, nor a list of ranks")
    rows = [_flatten(row) for row in ranks]
    if len({shape for shape, _ in rows}) > 1:
        raise ValueError("its rows differ in length")
    return (len(rows), *rows[0][0]), tuple(rank for _, row in rows for rank in row)


def _check_grids(axes: Mapping[str, int], grids: Sequence[StageGrid]) -> None:
    """Each size is that of a stage; each rank is in one stage, next to the others of it."""
    for i, (name, size) in enumerate(axes.items()):
        found = sorted({shape[i] for shape, _ in grids})
        require(
            size in found,
            f"placement.axes.{name}",
            f"no stage has {size} ranks along {name!r}: the grids in placement.stages have"
            f" {' and '.join(map(str, found))}.",
            "Change the size or the grids: a listed grid decides for its stage.",
        )
    owner = set[int]()
    for index, (_, ranks) in enumerate(grids):
        where = f"placement.stages.{index}.ranks"
        twice = [rank for rank, times in Counter(ranks).items() if times > 1 or rank in owner]
        require(
            not twice,
            where,
            f"rank {min(twice, default=0)} is listed twice.",
            "List each rank once, in one stage.",
        )
        owner.update(ranks)
        first = min(ranks)
        require(
            max(ranks) - first + 1 == len(ranks),
            where,
            f"ranks {sorted(ranks)} of stage {index} are not contiguous.",
            f"{len(ranks)} ranks are, say, {first} to {first + len(ranks) - 1}.",
        )
    missing = min({*range(len(owner))} - owner, default=-1)
    require(
        missing < 0,
        "placement.stages",
        f"no stage has rank {missing}, but one has rank {max(owner)}.",
        f"{len(owner)} ranks are 0 to {len(owner) - 1}.",
    )


def parse_pins(sbp: Mapping[str, object], axes: Sequence[str]) -> tuple[Pin, ...]:
    """The lines of `sbp`, in order; a later line for the same tensor and axis replaces the earlier
    one.

    axes: as the recipe names them, those of size 1 too.  Nested keys and dotted ones mean the same.
    """
    if FROM_MODEL in sbp:
        check_axis(f"sbp.{FROM_MODEL}", sbp[FROM_MODEL], axes, USUAL_AXES)
    pins: dict[tuple[str, str, str], Pin] = {}
    for path, text in _leaves({k: v for k, v in sbp.items() if k != FROM_MODEL}, ()):
        pin = _pin(path, text, axes)
        pins.pop((pin.pattern, pin.where, pin.axis), None)
        pins[pin.pattern, pin.where, pin.axis] = pin
    return tuple(pins.values())


def _leaves(value: object, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], object]]:
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, str(key)))]
    return [(path, value)]


def _pin(path: tuple[str, ...], text: object, axes: Sequence[str]) -> Pin:
    key = ".".join(("sbp", *path))
    require(
        len(path) >= 2,
        key,
        f"{text!r} does not name an axis.",
        f"Write {path[0] if path else 'pattern'}: {{tensor: {text}}}.",
    )
    *names, axis = path
    around = names[-1] if len(names) > 1 and names[0] != "batch" else ""
    require(
        around not in (*axes, *USUAL_AXES),
        key,
        f"the axis {axis!r} is nested in the axis {around!r}.",
        f"Write axes side by side: {{{around}: {text}, {axis}: {text}}}.",
    )
    side = names.pop() if len(names) > 1 and names[-1] in SIDES else "variable"
    check_axis(key, axis, axes, USUAL_AXES)
    try:
        return Pin(".".join(names), side, axis, parse_sbp(text))  # type: ignore[arg-type]
    except ValueError as error:
        problem, _, instead = str(error).partition("; w")
        raise RecipeError(key, f"{problem}.", f"W{instead}.") from None
