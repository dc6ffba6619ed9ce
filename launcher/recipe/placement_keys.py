"""`placement` and `sbp` of a recipe -> grids of ranks and pins, or an error that names the key.

A stage's grid is nested lists of ranks, one level an axis, outermost first; left out, stages take
consecutive ranks in order.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.placement import BATCH_AXES, Placement
from flowrun.engine.ir.sbp import parse_sbp
from flowrun.engine.strategy import Pin
from flowrun.launcher.recipe.recipe import Stage
from flowrun.launcher.recipe.recipe_errors import did_you_mean, one_of
from flowrun.launcher.recipe.schema import SCHEDULES, PlacementSchema
from flowrun.launcher.recipe.value_ranges import MOST_RANKS

USUAL_AXES = ("data", "tensor")  # a layout may pin these whether or not the placement has them
SIDES = ("in", "out")
FROM_MODEL = "from_model"  # a key of `sbp` that is no pattern


def parse_stages(placement: PlacementSchema) -> tuple[tuple[str, ...], tuple[Stage, ...]]:
    """Names of the axes of more than one rank, and a Stage for each of `placement.stages`."""
    _check_axes(placement.axes)
    sizes = tuple(placement.axes.values())
    _check_number_of_ranks(placement.stages, math.prod(sizes))
    entries = _stage_entries(placement.stages)
    grids: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for index, entry in enumerate(entries):
        where = f"placement.stages.{index}"
        if entry.get("ranks") is None:
            start = sum(len(ranks) for _, ranks in grids)
            grids.append((sizes, tuple(range(start, start + math.prod(sizes)))))
        else:
            grids.append(_grid(entry["ranks"], tuple(placement.axes), f"{where}.ranks"))
    _check_sizes_used(placement.axes, [shape for shape, _ in grids])
    _check_ranks([ranks for _, ranks in grids], explicit=any("ranks" in entry for entry in entries))
    names = tuple(placement.axes)
    kept = tuple(i for i in range(len(names)) if any(shape[i] > 1 for shape, _ in grids))
    stages = tuple(
        Stage(_patterns(entry, i), Placement(tuple((names[k], shape[k]) for k in kept), ranks))
        for i, (entry, (shape, ranks)) in enumerate(zip(entries, grids, strict=True))
    )
    _check_modules(stages)
    _check_chunks(placement.chunks, len(stages))
    return tuple(names[k] for k in kept), stages


def check_axis_names(axes: Iterable[str], sbp: Any, others: Iterable[str]) -> None:
    """Refuse an axis that nothing else names and that is spelled almost like one that is known: the
    ranks along a misspelled axis would all do the same.

    sbp: of the recipe; the axes of its pins are known.  others: further names that are.
    """
    known = {path[-1] for path, _ in _leaves(sbp, ()) if path} - {*SIDES, FROM_MODEL}
    known |= {str(sbp[FROM_MODEL])} if FROM_MODEL in sbp else set()
    known |= {*USUAL_AXES, *BATCH_AXES, *others}
    for name in axes:
        numbered = re.sub(r"_?\d+$", "", name)  # tensor2, data_1: names of their own
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.75)
        if name not in known and numbered not in known and near:
            raise RecipeError(
                f"placement.axes.{name}",
                f"no pin of sbp, no zero.axis and no batch uses an axis {name!r}.",
                f"Did you mean {near[0]!r}? To add an axis of this name, write"
                f" +placement.axes.{name}=… on the command line, or a pin of sbp that names it.",
            )


def _check_axes(axes: Mapping[str, int]) -> None:
    for name in axes:
        where = f"placement.axes.{name}"
        if not str(name).isidentifier() or name in SIDES:
            raise RecipeError(
                where,
                f"{name!r} cannot name an axis.",
                "Use a word, such as data or tensor; not in, not out.",
            )


def _check_number_of_ranks(stages: object, ranks: int) -> None:
    """ranks: of each stage."""
    count = stages if isinstance(stages, int) else len(stages) if isinstance(stages, list) else 1
    if count * ranks > MOST_RANKS:
        raise RecipeError(
            "placement.stages" if count > ranks else "placement.axes",
            f"{count:,} stages of {ranks:,} ranks are more than {MOST_RANKS:,} ranks.",
            "Choose smaller sizes of the axes, or fewer stages.",
        )


def _stage_entries(stages: object) -> list[Mapping[str, object]]:
    where = "placement.stages"
    if isinstance(stages, int) and not isinstance(stages, bool):
        if stages < 1:
            raise RecipeError(
                where, f"stages must be at least 1, not {stages}.", "1 means no pipeline."
            )
        return [{}] * stages
    if not isinstance(stages, Sequence) or isinstance(stages, str) or not stages:
        raise RecipeError(
            where,
            f"{stages!r} is neither a number nor a list of stages.",
            "Write stages: 2, or a list of {modules: [patterns], ranks: [...]}.",
        )
    for index, entry in enumerate(stages):
        if not isinstance(entry, Mapping):
            raise RecipeError(
                f"{where}.{index}",
                f"a stage is {{modules: [patterns], ranks: [...]}}, not {entry!r}.",
            )
        for key in entry:
            if key not in ("modules", "ranks"):
                raise RecipeError(
                    f"{where}.{index}.{key}",
                    "a stage has no such key.",
                    did_you_mean(str(key), ("modules", "ranks")),
                )
    return list(stages)


def _patterns(entry: Mapping[str, object], index: int) -> tuple[str, ...]:
    modules = entry.get("modules") or []
    if isinstance(modules, str):
        return (modules,)
    if not isinstance(modules, list) or not all(isinstance(pattern, str) for pattern in modules):
        raise RecipeError(
            f"placement.stages.{index}.modules",
            f"{modules!r} is not a list of module patterns.",
            'Write modules: ["embed", "blocks.[0-1]"].',
        )
    return tuple(modules)


def _grid(
    ranks: object, names: tuple[str, ...], where: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(sizes, ranks row-major) of nested lists; without axes, one rank alone or in a list."""
    shape, flat = _flatten(ranks, where)
    if not names and len(flat) == 1:
        return (), flat
    if len(shape) != len(names):
        raise RecipeError(
            where,
            f"{ranks} is {len(shape)} lists deep, but placement.axes has {len(names)} axes"
            f" ({', '.join(names) or 'none'}).",
            "Nest one list for each axis, outermost first: 1 x 2 ranks are [[0, 1]].",
        )
    return shape, flat


def _flatten(ranks: object, where: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if isinstance(ranks, int) and not isinstance(ranks, bool) and ranks >= 0:
        return (), (ranks,)
    if not isinstance(ranks, list) or not ranks:
        raise RecipeError(
            where,
            f"{ranks!r} is neither a rank nor a list of ranks.",
            "Ranks count from 0: [[0, 1]].",
        )
    rows = [_flatten(row, where) for row in ranks]
    if len({shape for shape, _ in rows}) > 1:
        raise RecipeError(
            where,
            f"{ranks} is not a grid: its rows differ in length.",
            "Give every row equally many ranks.",
        )
    return (len(rows), *rows[0][0]), tuple(rank for _, row in rows for rank in row)


def _check_sizes_used(axes: Mapping[str, int], shapes: list[tuple[int, ...]]) -> None:
    for i, (name, size) in enumerate(axes.items()):
        found = sorted({shape[i] for shape in shapes})
        if size not in found:
            raise RecipeError(
                f"placement.axes.{name}",
                f"no stage has {size} ranks along {name!r}: the grids in placement.stages have"
                f" {' and '.join(map(str, found))}.",
                "Change the size or the grids: a listed grid decides for its stage.",
            )


def _check_ranks(grids: list[tuple[int, ...]], explicit: bool) -> None:
    if not explicit:
        return
    owner: dict[int, int] = {}
    for index, ranks in enumerate(grids):
        where = f"placement.stages.{index}.ranks"
        for rank in ranks:
            if rank in owner:
                raise RecipeError(
                    where,
                    f"rank {rank} is listed twice: in stage {owner[rank]} and in stage {index}.",
                    "List each rank once, in one stage.",
                )
            owner[rank] = index
        if max(ranks) - min(ranks) + 1 != len(ranks):
            raise RecipeError(
                where,
                f"ranks {sorted(ranks)} of stage {index} are not contiguous.",
                f"{len(ranks)} ranks are, say, {min(ranks)} to {min(ranks) + len(ranks) - 1}.",
            )
    if set(owner) != set(range(len(owner))):
        missing = min(set(range(len(owner))) - set(owner))
        raise RecipeError(
            "placement.stages",
            f"no stage has rank {missing}, but one has rank {max(owner)}.",
            f"{len(owner)} ranks are 0 to {len(owner) - 1}.",
        )


def _check_modules(stages: tuple[Stage, ...]) -> None:
    empty = [index for index, stage in enumerate(stages) if not stage.modules]
    if empty and len(empty) < len(stages):
        raise RecipeError(
            f"placement.stages.{empty[0]}",
            "this stage lists no modules, but another one does.",
            "List the modules of every stage, or of none: then flowrun cuts by foreseen time.",
        )


def _check_chunks(chunks: int, stages: int) -> None:
    where = "placement.chunks"
    if chunks > 1 and stages == 1:
        raise RecipeError(
            where,
            f"{chunks} pieces of the model on each stage, but one stage owns it whole.",
            "Add stages, placement.stages=2 or more, or leave chunks out.",
        )


def parse_in_flight(value: int | str | None) -> int | str:
    """`placement.in_flight`, a number of at least 1 or the name of a schedule."""
    if value is None:
        return "auto"
    if isinstance(value, int):
        return value
    if value not in SCHEDULES:
        raise RecipeError(
            "placement.in_flight",
            f"{value!r} is not a schedule.",
            f"Write a number of micro-batches, or {one_of(SCHEDULES)}."
            f"\n{did_you_mean(value, SCHEDULES)}",
        )
    return value


def parse_pins(sbp: Mapping[str, Any], axes: Sequence[str]) -> tuple[Pin, ...]:
    """The lines of `sbp`, in order; a later line for the same tensor and axis replaces the earlier
    one.

    axes: as the recipe names them, those of size 1 too.  Nested keys and dotted ones mean the same.
    """
    pins: dict[tuple[str, str, str], Pin] = {}
    for path, text in _leaves({k: v for k, v in sbp.items() if k != FROM_MODEL}, ()):
        pin = _pin(path, text, axes)
        pins.pop((pin.pattern, pin.where, pin.axis), None)
        pins[pin.pattern, pin.where, pin.axis] = pin
    return tuple(pins.values())


def parse_plan_axis(sbp: Mapping[str, Any], axes: Sequence[str]) -> str:
    """Return the axis of `sbp.from_model`; "" where the model's own plan is not asked for.

    axes: as the recipe names them, those of size 1 too.  Raises RecipeError for another.
    """
    axis = sbp.get(FROM_MODEL)
    if axis is None:
        return ""
    known = tuple(dict.fromkeys((*axes, *USUAL_AXES)))
    if axis not in known:
        raise RecipeError(
            f"sbp.{FROM_MODEL}",
            f"{axis!r} is not an axis: placement.axes has {', '.join(axes) or 'none'}.",
            f"Write the axis of the model's own plan, sbp: {{{FROM_MODEL}: tensor}}."
            f"\n{did_you_mean(str(axis), known)}",
        )
    return str(axis)


def _leaves(value: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], object]]:
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, str(key)))]
    return [(path, value)]


def _pin(path: tuple[str, ...], text: Any, axes: Sequence[str]) -> Pin:
    key = ".".join(("sbp", *path))
    if len(path) < 2:
        raise RecipeError(
            key,
            f"{text!r} does not name an axis.",
            f"Write {path[0] if path else 'pattern'}: {{tensor: {text}}}.",
        )
    *names, axis = path
    around = names[-1] if len(names) > 1 and names[0] != "batch" else ""
    if around in (*axes, *USUAL_AXES):
        raise RecipeError(
            key,
            f"the axis {axis!r} is nested in the axis {around!r}.",
            f"Write axes side by side: {{{around}: {text}, {axis}: {text}}}.",
        )
    side = names.pop() if len(names) > 1 and names[-1] in SIDES else "variable"
    if axis not in axes and axis not in USUAL_AXES:
        known = tuple(dict.fromkeys((*axes, *USUAL_AXES)))
        raise RecipeError(
            key,
            f"unknown axis {axis!r}: placement.axes has {', '.join(axes) or 'none'}.",
            did_you_mean(axis, known),
        )
    try:
        return Pin(".".join(names), side, axis, parse_sbp(text))
    except ValueError as error:
        problem, _, instead = str(error).partition("; w")
        raise RecipeError(key, f"{problem}.", f"W{instead}.") from None
