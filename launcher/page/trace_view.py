"""trace_view: trace.json of a run -> a drawing of its last traced step, measured and foreseen."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from flowrun.engine.ir.files import DAMAGED
from flowrun.launcher.page.page_data import ActorView, StepDrawing
from flowrun.launcher.page.step_view import MOST_ACTS, describe_cut
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.report.trace_file import FORESEEN, NAME

_MOST_LANES = 32
Kind = TypeVar("Kind", bound=Hashable)


class _TracedAct(NamedTuple):
    """An act of trace.json, in microseconds.  process: a rank, or FORESEEN + a stage."""

    start: float
    length: float
    process: int
    step: int
    micro_batch: int
    actor: ActorView
    waited_for: str


def trace_view(folder: Path) -> StepDrawing | None:
    """Return the drawing of the step at which the foreseen one stands; None without a trace.

    Raises RecipeError for a file that is damaged.
    """
    file = folder / NAME
    if not file.exists():
        return None
    try:
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        acts = [_read_act(**e) for e in events if e["ph"] == "X" and e["tid"]]
        return _draw(sorted(acts, key=lambda act: act.start), names)
    except DAMAGED:
        raise CommandLineError(str(file), "it is damaged.", "Trace again, or remove it.") from None


def _read_act(
    args: Mapping[str, str], ts: float, dur: float, pid: int, name: str, cat: str, **_: object
) -> _TracedAct:
    micro_batch, waited_for = int(args.get("micro_batch", 0)), args.get("waited_for", "")
    actor = ActorView(name, cat, args["phase"])
    return _TracedAct(ts, dur, pid, int(args["step"]), micro_batch, actor, waited_for)


def _draw(acts: Sequence[_TracedAct], names: Mapping[int, str]) -> StepDrawing:
    """Draw a step.  Raises ValueError where none is foreseen."""
    foreseen = [act for act in acts if act.process >= FORESEEN]
    step, zero = max(act.step for act in foreseen), min(act.start for act in foreseen)
    lanes, shown, left = _choose(acts, names, step)
    actors, actor = _number(act.actor for act in shown)
    reasons, places = _number(act.waited_for for act in shown)
    why = tuple(-1 if not act.waited_for else at for act, at in zip(shown, places, strict=True))
    none = (-1,) * len(shown)
    return StepDrawing(
        about=f"Step {step} as measured, and as foreseen.{left}",
        tick_s=1e-6,
        lanes=tuple((_name_lane(names[pid]), pid >= FORESEEN) for pid in lanes),
        actors=actors,
        lane=tuple(lanes.index(act.process) for act in shown),
        actor=actor,
        act=tuple(act.micro_batch for act in shown),
        start=tuple(round(act.start - zero) for act in shown),
        length=tuple(round(act.length) for act in shown),
        cause=none,
        why=why,
        register=none,
        reasons=reasons,
        slots={},
    )


def _choose(
    acts: Sequence[_TracedAct], names: Mapping[int, str], step: int
) -> tuple[Sequence[int], Sequence[_TracedAct], str]:
    """Return the processes and acts of a step that a page can hold, and what it leaves out."""
    every = sorted(names, key=lambda pid: (_stage_of(names[pid]), pid < FORESEEN, pid))
    lanes = every[:_MOST_LANES]
    found = [act for act in acts if act.step == step and act.process in lanes]
    shown = found[:MOST_ACTS]
    rows = describe_cut(len(lanes), len(every), "rows")
    return lanes, shown, rows + describe_cut(len(shown), len(found), "acts")


def _number(found: Iterable[Kind]) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
    """Return each value once, and the place of every one among them."""
    listed = list(found)
    places = {each: at for at, each in enumerate(dict.fromkeys(listed))}
    return tuple(places), tuple(places[each] for each in listed)


def _stage_of(process: str) -> int:
    return int(re.findall(r"stage (\d+)", process)[0])


def _name_lane(process: str) -> str:
    return re.sub(r"foreseen of (stage \d+).*", r"\1 foreseen", process)
