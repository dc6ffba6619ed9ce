"""`flowrun plan`: what a recipe will do, as text for a person.  Starts nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flowrun.engine.actors.plan import BOX, SEND, Actor, BoxWork, Plan, RegionWork, TransferWork
from flowrun.engine.compile import Rehearsed
from flowrun.engine.cost.footprint import Footprint, memory_of
from flowrun.engine.ir.graph import BACKWARD, COUNT, FORWARD, PHASES, UPDATE, WEIGHT_GRAD, WEIGHTS
from flowrun.engine.ir.module_path import unit_of
from flowrun.engine.ir.placement import largest_shape
from flowrun.engine.ir.sbp import Owned, Sbp
from flowrun.engine.ops.traits import is_engine_op
from flowrun.launcher.job.compiling import built_regions, summary
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.schema import INDUCTOR
from flowrun.launcher.report.group_equal import FEW, alike, extent, one_of_each, some, spans
from flowrun.launcher.report.notes import notes
from flowrun.launcher.report.progress import layout, stage_table
from flowrun.launcher.terminal.console import plain_table
from flowrun.launcher.terminal.units import seconds, size

_MARKS = {
    COUNT: ("C", "yellow"),
    WEIGHTS: ("P", "yellow"),
    FORWARD: ("F", "green"),
    BACKWARD: ("B", "blue"),
    WEIGHT_GRAD: ("W", "cyan"),
    UPDATE: ("U", "magenta"),
}

_LEGEND = (
    "          C targets counted  P weights prepared  F forward  B backward"
    "  W weight gradient  U update  · waits"
)
_WIDE = 100  # columns in which the tables of a plan have all that they say
_FOLLOWS = ("a rank holds", "bytes each")  # from shape and SBP; from times and a step
_KINDS = (
    *("weights", "optimizer", "gradients", "stash", "other registers"),
    *("peak foreseen", "at most"),
)
_WHOLE = ("phase", "stage", "times", "bytes each", "a step")
_HIGHEST = "highest while it runs"
_NUMBERS = (*_WHOLE[1:], *_KINDS, _HIGHEST)
_SBP = (
    "S(d): split along dim d; B: whole on every rank; P: parts of a sum; a boxing turns one into"
    " another"
)
_MEMORY = (
    "stash, other registers: all their slots, which are not full at one moment, so that the columns"
    " may come to more than a rank ever holds"
)


def plan_report(job: Job, width: int = 100) -> RenderableType:
    """Stages, layers, boxings, memory, time and the rehearsed timeline of a recipe."""
    training, narrow = job.training, width < _WIDE
    plan = training.plan
    distinct = one_of_each((*plan.notes, *notes(job)), len(plan.placements))
    parts: list[RenderableType] = [
        stage_table(job, training),
        "",
        layers(plan, narrow),
        "",
        boxings(plan, narrow),
        *([Text(_SBP, style="dim")] if plan.num_ranks > 1 else []),
        "",
        memory(training),
        Text(_MEMORY, style="dim"),
        "",
        blocks(training),
        "",
        times(job, training),
        *compiler(job, training),
        timeline(training, width),
        *(Text(f"note: {note}", style="yellow") for note in distinct),
    ]
    return Group(*parts)


def _table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], narrow: bool = False
) -> Table:
    """narrow: leave out what follows from the other columns."""
    kept = [k for k, heading in enumerate(headings) if not narrow or heading not in _FOLLOWS]
    shown = ([row[k] for k in kept] for row in rows)
    return plain_table(title, [headings[k] for k in kept], shown, right=_NUMBERS, whole=_WHOLE)


# ------------------------------------------------------------------------------------------ layers


def layers(plan: Plan, narrow: bool = False) -> Table:
    """Every parameter with shape and SBP, and what leaves its module; equal blocks share a line."""
    headings = ("parameter", "stage", "shape", "SBP", "a rank holds", "output", "SBP ")
    rows = _merge(_layer_rows(plan), many=len(plan.placements) > FEW)
    return _table("layers", headings, rows, narrow)


def _layer_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    tensors = plan.graph.tensors
    outputs = {
        op.module: op
        for op in plan.graph.ops
        if op.phase == FORWARD and not is_engine_op(op.target)
    }
    for v in (v for v in plan.graph.variables if v.kind != "state"):
        shape = tensors[v.tensor].shape
        held = largest_shape(shape, v.nd_sbp, plan.placements[v.stage].shape)
        row = v.name, str(v.stage), show_shape(shape), layout(v.nd_sbp), show_shape(held)
        op = outputs.get(v.name.rpartition(".")[0])
        if op and op.makes:
            yield *row, show_shape(tensors[op.makes[0]].shape), layout(op.out_sbp[0])
        else:
            yield *row, "scalar", ""


def show_shape(shape: Iterable[int]) -> str:
    """Write a shape as a person does: 64 x 128."""
    return " x ".join(map(str, shape)) or "scalar"


def _merge(rows: Iterable[tuple[str, ...]], *, many: bool) -> list[tuple[str, ...]]:
    """Rows that differ only by the number of a block become one: blocks.0-3.attn.qkv.weight; of
    many stages, also those that differ by the stage.
    """
    groups: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for name, stage, *rest in rows:
        number = re.search(r"\.(\d+)(?=\.|$)", name)
        pattern = name if number is None else f"{name[: number.start(1)]}*{name[number.end(1) :]}"
        key = (pattern, "" if many else stage, *rest)
        groups.setdefault(key, []).append((number[1] if number else "", stage))
    merged = []
    for (pattern, _, *rest), found in groups.items():
        numbers = spans(int(number) for number, _ in found if number)
        stages = spans(int(stage) for _, stage in found)
        merged.append((pattern.replace("*", numbers, 1), stages, *rest))
    return merged


# ------------------------------------------------------------------------------------------ boxings


def boxings(plan: Plan, narrow: bool = False) -> RenderableType:
    """Every collective and transfer with its bytes; those that are alike share a line.

    narrow: phases are letters, as in the timeline, and the bytes of one are left out.
    """
    groups: dict[tuple[tuple[str, ...], float], list[Actor]] = {}
    for actor in plan.actors:
        if actor.kind in (BOX, SEND):
            groups.setdefault((_boxing_row(plan, actor), actor.sent_bytes), []).append(actor)
    if not groups:
        return Text.assemble(("boxings", "bold"), ": none, no bytes travel between ranks")
    rows = []
    for (row, each), actors in sorted(groups.items(), key=lambda item: PHASES.index(item[0][0][0])):
        times = sum(plan.acts_per_step(actor) for actor in actors)
        phase, where, *what = row
        if where == "stages":
            where = spans(map(_shown_at, actors))
            where = f"stage {where}" if where.isdigit() else f"stages {where}"
        phase = _MARKS[phase][0] if narrow else phase
        rows.append((phase, where, *what, str(times), size(each), size(each * times)))
    total = sum(actor.sent_bytes * plan.acts_per_step(actor) for actor in plan.actors)
    rows.append(("", "", "all", "", "", "", size(total)))
    headings = ("phase", "where", "what", "SBP", "times", "bytes each", "a step")
    return _table("boxings", headings, rows, narrow)


def _shown_at(actor: Actor) -> int:
    """The stage where a boxing is shown among those of many stages: of a far one, the later."""
    work = actor.work
    far = isinstance(work, TransferWork) and work.target_stage > work.source_stage + 1
    return work.target_stage if far and isinstance(work, TransferWork) else actor.stage


def _boxing_row(plan: Plan, actor: Actor) -> tuple[str, ...]:
    """Phase, where, what, change; where is "stages" if there are many."""
    work, many = actor.work, len(plan.placements) > FEW
    if isinstance(work, TransferWork):
        move, one, other = work.moves[0], work.source_stage, work.target_stage
        change = f"{layout(move.source.nd_sbp)} -> {layout(move.target.nd_sbp)}"
        if not many:
            return actor.phase, f"stage {one} to {other}", "send", change
        far = f"from stage {one}" if other > one else f"to stage {other}"
        near = {1: "to the next", -1: "to the one before"}
        return actor.phase, "stages", f"send {near.get(other - one, far)}", change
    assert isinstance(work, BoxWork)
    what = f"{work.step.kind.replace('_', '-')} over {plan.axes[work.step.axis]}"
    what += ", one copy" if work.one_copy else ""
    changes = " ".join(
        dict.fromkeys(f"{_shown(s.source)} -> {_shown(s.target)}" for s in work.steps)
    )
    return actor.phase, "stages" if many else f"stage {actor.stage}", what, changes


def _shown(sbp: Sbp) -> str:
    """An SBP as a boxing of many tensors shows it: each has an owner of its own."""
    return "O" if isinstance(sbp, Owned) else str(sbp)


# ------------------------------------------------------------------------------------------ memory
# and time


def memory(training: Rehearsed) -> Table:
    """Bytes of one rank of each stage by what they are: what stays, what registers may hold, and
    the most at once, with what acts hold for themselves: as foreseen, and with every stash full.
    """
    plan, rehearsal = training.plan, training.rehearsal
    peaks = zip(rehearsal.peak_bytes, rehearsal.bound_bytes, strict=True)
    numbers = []
    for stage, ends in enumerate(peaks):
        held = memory_of(plan, stage)
        weights = held["parameter"] + held["buffer"]
        rest = (held[kind] for kind in ("state", "gradient", "stash", "other"))
        numbers.append((weights, *rest, *ends))
    rows = []
    for stages in alike(range(len(numbers)), lambda stage: numbers[stage][:3]):
        columns = zip(*(numbers[stage] for stage in stages), strict=True)
        rows.append((spans(stages), *(extent(column, size) for column in columns)))
    return _table("memory of a rank", ("stage", *_KINDS), rows)


def blocks(training: Rehearsed) -> Table:
    """Bytes that wait for backward, by block, and a rank's most while it runs; of many, some."""
    plan = training.plan
    most: dict[tuple[str, int], tuple[int, str]] = {}
    for actor in plan.actors:
        ops = actor.work.ops if isinstance(actor.work, RegionWork) else ()
        for unit in dict.fromkeys(unit_of(op.module) for op in ops if op.module):
            here = training.rehearsal.act_bytes[actor.id], actor.phase
            most[unit, actor.stage] = max(here, most.get((unit, actor.stage), (0, "")))
    held = _stash_by_block(plan)
    keys = sorted(most, key=lambda key: key[1])
    rows = (
        (*map(str, keys[k]), size(held[keys[k]]), size(most[keys[k]][0]), most[keys[k]][1])
        for k in some(len(keys))
    )
    return _table("memory by block", ("block", "stage", "stash", _HIGHEST, "in"), rows)


def _stash_by_block(plan: Plan) -> Counter[tuple[str, int]]:
    """(block, stage) -> the bytes of what it makes that wait for backward, in all their slots."""
    held: Counter[tuple[str, int]] = Counter()
    footprints = [Footprint(plan, stage) for stage in range(len(plan.placements))]
    makers = plan.graph.producer
    for r in (r for r in plan.registers if r.stash):
        for storage in footprints[r.stage].slot(r):
            unit = unit_of(makers[storage].module) if storage in makers else "batch"
            held[unit, r.stage] += r.slots * footprints[r.stage].storage_bytes(storage)
    return held


def times(job: Job, training: Rehearsed) -> Text:
    """Step time and bubble foreseen, on the recipe's hardware profile."""
    rehearsal = training.rehearsal
    few = len(rehearsal.bubble) <= FEW
    shares = [(share,) for share in rehearsal.bubble] if few else [rehearsal.bubble]
    bubble = ", ".join(extent(share, "{:.0%}".format) for share in shares)
    return Text(
        f"foreseen on {job.strategy.hardware.name}: {seconds(rehearsal.step_s)} a step, "
        f"{job.work.speed(rehearsal.step_s):,.0f} {job.work.unit}/s, bubble by stage {bubble}"
    )


def compiler(job: Job, training: Rehearsed) -> list[RenderableType]:
    """Say how many programs Inductor gets, if the recipe asks for it."""
    if job.recipe.engine.compiler != INDUCTOR:
        return []
    return [Text(f"inductor builds {summary(built_regions(job, training))}")]


def timeline(training: Rehearsed, width: int = 100) -> Group:
    """The rehearsed first step: a line a stage, what its ranks compute in each slice of time."""
    rehearsal = training.rehearsal
    columns = max(20, width - 12)
    slice_s = rehearsal.first_step_s / columns or 1.0
    shown = some(len(training.plan.placements))
    shares: dict[int, list[dict[str, float]]] = {k: [{} for _ in range(columns)] for k in shown}
    for event in rehearsal.first_step:
        actor = training.plan.actors[event.actor]
        if event.stage not in shares or not isinstance(actor.work, RegionWork):
            continue
        share = shares[event.stage]
        for k in range(int(event.start / slice_s), min(columns - 1, int(event.end / slice_s)) + 1):
            overlap = min(event.end, (k + 1) * slice_s) - max(event.start, k * slice_s)
            share[k][actor.phase] = share[k].get(actor.phase, 0.0) + max(0.0, overlap)
    lines = []
    for stage, share in shares.items():
        line = Text(f"stage {stage:<3} ", no_wrap=True)
        for phase in _phases_shown(share, slice_s):
            line.append(*_MARKS.get(phase, ("·", "dim")))
        lines.append(line)
    end = f"{'first step, ' + seconds(rehearsal.first_step_s):>{columns - 1}}"
    return Group(*lines, Text(f"          0{end}", style="dim"), Text(_LEGEND, style="dim"))


def _phases_shown(slots: list[dict[str, float]], slice_s: float) -> Iterator[str]:
    """Yield the phase that stands for each slot of a line, "" for waiting.

    Of a slot with several, one is taken, so that in all slots so far each has about its share: a
    line of many micro-batches is as empty as the stage.
    slots: seconds of each phase.  slice_s: seconds of a slot.
    """
    owed: dict[str, float] = {}
    for slot in slots:
        busy = sum(slot.values())
        shares = {phase: spent / max(busy, slice_s) for phase, spent in slot.items() if spent}
        if busy < slice_s * (1 - 1e-9):
            shares[""] = 1 - busy / slice_s
        for phase, share in shares.items():
            owed[phase] = owed.get(phase, 0.0) + share
        taken = max(shares, key=owed.__getitem__)
        owed[taken] -= 1
        yield taken
