"""trace_view: trace.json of a run -> a drawing of its last traced step, measured and foreseen."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from flowrun.engine.ir.files import DAMAGED
from flowrun.launcher.page.page_data import ActorView, StepDrawing
from flowrun.launcher.page.step_view import MOST_ACTS, ActRow, describe_cut, number, to_columns
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.report.trace_file import FORESEEN, NAME

_MOST_LANES = 32


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
        acts = [e for e in events if e["ph"] == "X" and e["tid"]]
        order = sorted(names, key=lambda pid: (_stage_of(names[pid]), pid < FORESEEN, pid))
        return _draw(sorted(acts, key=itemgetter("ts")), {pid: names[pid] for pid in order})
    except DAMAGED:
        raise CommandLineError(str(file), "it is damaged.", "Trace again, or remove it.") from None


def _draw(acts: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> StepDrawing:
    """Draw a step, in as many rows and acts as a page can hold.

    acts: of all steps, as trace_file.py writes them, in the order of their beginnings.  names: of
    processes, in their order: ranks, and FORESEEN + a stage.  Raises ValueError where no step is
    foreseen.
    """
    foreseen = [act for act in acts if act["pid"] >= FORESEEN]
    step, zero = max(act["args"]["step"] for act in foreseen), min(act["ts"] for act in foreseen)
    lanes = number([*names][:_MOST_LANES])
    found = [act for act in acts if act["args"]["step"] == step and act["pid"] in lanes]
    shown = found[:MOST_ACTS]
    left = describe_cut(len(lanes), len(names), "rows")
    left += describe_cut(len(shown), len(found), "acts")
    views = [ActorView(act["name"], act["cat"], act["args"]["phase"]) for act in shown]
    waits = [act["args"].get("waited_for") for act in shown]
    actors, reasons = number(views), number(filter(None, waits))
    rows = [
        ActRow(
            lane=lanes[act["pid"]],
            actor=actors[view],
            act=int(act["args"].get("micro_batch", 0)),
            start=round(act["ts"] - zero),
            length=round(act["dur"]),
            why=reasons.get(wait, -1),
        )
        for act, view, wait in zip(shown, views, waits, strict=True)
    ]
    return StepDrawing(
        about=f"Step {step} as measured, and as foreseen.{left}",
        tick_s=1e-6,
        lanes=tuple((_name_lane(names[pid]), pid >= FORESEEN) for pid in lanes),
        actors=tuple(actors),
        reasons=tuple(reasons),
        slots={},
        **to_columns(rows),
    )


def _stage_of(process: str) -> int:
    return int(re.findall(r"stage (\d+)", process)[0])


def _name_lane(process: str) -> str:
    return re.sub(r"foreseen of (stage \d+).*", r"\1 foreseen", process)
