"""Draws the tutorial's pictures from the engine's own types: `python docs/make/pictures.py`.

What a picture shows is computed: which piece a rank holds by `local_slices`, what a boxing is and
moves by `boxing.path`, when an actor acts by `protocol`, a pipeline's timeline by the rehearsal.
tests/test_site.py compares the files with what this draws.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "docs" / "make")]

from svg import LINE, PAPER, QUIET, RANKS, TINTS, Sheet  # noqa: E402

from flowrun.engine.actors.protocol import (  # noqa: E402
    Ring,
    begin,
    can_act,
    counts,
    end,
    initial_state,
    receive,
    wire,
)
from flowrun.engine.boxing.boxing import path, path_bytes  # noqa: E402
from flowrun.engine.ir.graph import BACKWARD, FORWARD  # noqa: E402
from flowrun.engine.ir.placement import local_slices  # noqa: E402
from flowrun.engine.ir.sbp import B, NdSbp, P, S, Sbp, format_nd_sbp  # noqa: E402
from flowrun.engine.rehearsal.rehearsal import rehearse  # noqa: E402
from support.plans.unit_pipeline import unit_plan, unit_seconds  # noqa: E402

FOLDER = ROOT / "docs" / "tutorial"
CELL = 22
SHADES = ((4, "#9dc1e0"), (2, "#c3d9ec"), (0.1, "#e3eef7"), (0, "#f1f3f5"))  # bytes in T, from most


def held(
    shape: tuple[int, int], nd_sbp: NdSbp, grid: tuple[int, ...], where: tuple[int, ...]
) -> set[tuple[int, int]]:
    """Return the cells of a matrix that the rank at a coordinate of the grid holds."""
    rows, columns = local_slices(shape, nd_sbp, grid, where)
    return {
        (row, column)
        for row in range(rows[0], sum(rows))
        for column in range(columns[0], sum(columns))
    }


def draw_matrix(
    sheet: Sheet,
    x: float,
    y: float,
    shape: tuple[int, int],
    fill: Callable[[int, int], tuple[str, object] | None],
    cell: int = CELL,
) -> None:
    """Draw cells; fill gives color and text of one, or None where nothing is held."""
    for row in range(shape[0]):
        for column in range(shape[1]):
            found = fill(row, column)
            left, top = x + column * cell, y + row * cell
            color, words = found or (PAPER, "")
            sheet.box(left, top, cell - 2, cell - 2, color, dashed=found is None, radius=2)
            sheet.text(left + cell / 2 - 1, top + cell / 2 + 3, words, size=10, anchor="middle")


def sbp() -> Sheet:
    """One matrix on two ranks, as S(0), S(1), B and P."""
    shape, sheet = (4, 4), Sheet(760, 300, "One tensor on two ranks: S(0), S(1), B, P")
    values = [[4 * row + column for column in range(4)] for row in range(4)]
    parts = [[(5 * row + 3 * column) % 7 for column in range(4)] for row in range(4)]
    sheet.text(20, 34, "logical tensor", bold=True)
    draw_matrix(sheet, 20, 66, shape, lambda r, c: ("#eef1f4", values[r][c]))
    notes = {S(0): "pieces of dim 0", S(1): "pieces of dim 1", B: "the same on all", P: "a sum"}
    for k, (layout, note) in enumerate(notes.items()):
        x = 180 + 145 * k
        sheet.text(x, 34, layout, bold=True, mono=True, size=15)
        sheet.text(x, 52, note, size=11, color=QUIET)
        for rank in range(2):
            y = 66 + 112 * rank
            cells = held(shape, (layout,), (2,), (rank,))

            def fill(r: int, c: int, rank: int = rank, cells: set = cells, layout: Sbp = layout):
                if (r, c) not in cells:
                    return None
                share = values[r][c] - parts[r][c] if rank else parts[r][c]
                return TINTS[rank], share if layout == P else values[r][c]

            draw_matrix(sheet, x, y, shape, fill)
            if k == 0:
                sheet.text(160, y + 48, f"rank {rank}", size=12, color=RANKS[rank], anchor="end")
    return sheet


def nd_sbp() -> Sheet:
    """One matrix on a grid of data 2 x tensor 2."""
    shape, grid, cell = (4, 4), (2, 2), 15
    sheet = Sheet(760, 210, "nd-SBP: one SBP for each axis of the grid data 2 x tensor 2")
    layouts = [(S(0), B), (B, S(1)), (S(0), S(1)), (S(0), S(0))]
    for k, layout in enumerate(layouts):
        x = 70 + 175 * k
        sheet.text(x, 26, format_nd_sbp(layout), bold=True, mono=True, size=14)
        for rank in range(4):
            where = divmod(rank, 2)
            cells = held(shape, layout, grid, where)
            left, top = x + 74 * where[1], 62 + 74 * where[0]
            draw_matrix(
                sheet,
                left,
                top,
                shape,
                lambda r, c, rank=rank, cells=cells: (TINTS[rank], "") if (r, c) in cells else None,
                cell,
            )
        for index in range(2):
            left, top = x + 30 + 74 * index, 95 + 74 * index
            sheet.text(left, 54, f"tensor {index}", size=10, color=QUIET, anchor="middle")
            if k == 0:
                sheet.text(x - 8, top, f"data {index}", size=10, color=QUIET, anchor="end")
    return sheet


def products() -> Sheet:
    """Three rows of the table of a matrix product."""
    sheet = Sheet(760, 390, "Three signatures of y = x w on two ranks")
    rows = [
        ("data parallel", (S(0), B, S(0)), "each rank has its own samples and all of the weight"),
        ("columns", (B, S(1), S(1)), "each rank computes its own columns of the result"),
        ("rows", (S(1), S(0), P), "each rank has a part of the sum: y is not whole yet"),
    ]
    names, shape = ("x", "w", "y"), (4, 4)
    for k, (name, layouts, note) in enumerate(rows):
        y = 24 + 124 * k
        text = f"{layouts[0]}, {layouts[1]} -> {layouts[2]}"
        sheet.text(20, y + 20, name, bold=True)
        sheet.text(20, y + 42, text, mono=True, size=14)
        for line, words in enumerate(wrap(note, 28)):
            sheet.text(20, y + 64 + 15 * line, words, size=11, color=QUIET)
        for rank in range(2):
            left = 250 + 255 * rank
            sheet.text(left, y, f"rank {rank}", size=11, color=RANKS[rank])
            for at, (matrix, layout) in enumerate(zip(names, layouts, strict=True)):
                cells = held(shape, (layout,), (2,), (rank,))
                x = left + 78 * at
                draw_matrix(
                    sheet,
                    x,
                    y + 12,
                    shape,
                    lambda r, c, rank=rank, cells=cells: (
                        (TINTS[rank], "") if (r, c) in cells else None
                    ),
                    15,
                )
                label = f"{matrix}: {layout}"
                sheet.text(x + 29, y + 88, label, size=11, mono=True, anchor="middle")
                if at:
                    sheet.text(x - 10, y + 46, "×="[at - 1], size=14, anchor="middle", color=QUIET)
    return sheet


def boxing() -> Sheet:
    """What turns one layout of an axis of 4 ranks into another, and the bytes that it moves."""
    ranks, shape, num_bytes = 4, (8, 8), 1200.0
    layouts = [S(0), S(1), B, P]
    sheet = Sheet(760, 300, "Boxing on an axis of 4 ranks: the collective and the bytes moved")
    sheet.text(20, 60, "from", color=QUIET, size=12)
    sheet.text(100, 26, "to", color=QUIET, size=12)
    for column, target in enumerate(layouts):
        sheet.text(175 + 160 * column, 48, target, bold=True, mono=True, size=15, anchor="middle")
    for row, source in enumerate(layouts):
        y = 60 + 56 * row
        sheet.text(60, y + 32, source, bold=True, mono=True, size=15, anchor="middle")
        for column, target in enumerate(layouts):
            steps = path((source,), (target,), (ranks,), shape)
            moved = path_bytes((source,), (target,), (ranks,), shape, num_bytes) / num_bytes
            kinds = " + ".join(step.kind.replace("_", "-") for step in steps) or "nothing"
            color = next(tint for least, tint in SHADES if moved >= least)
            sheet.box(100 + 160 * column, y, 152, 48, color)
            at = 176 + 160 * column
            sheet.text(at, y + 20, kinds, anchor="middle", size=13)
            share = Fraction(moved).limit_denominator(100)
            words = f"{share} T" if moved else "no bytes"
            sheet.text(at, y + 38, words, anchor="middle", size=11, color=QUIET)
    return sheet


def acts() -> Sheet:
    """Two actors and a register of two slots, act by act, as the protocol moves its tokens."""
    specs = wire({0: 1, 1: 1}, [Ring(0, 0, (1,), slots=2)], steps=9)
    states = {k: initial_state(spec) for k, spec in specs.items()}
    done: dict[int, int] = {0: 0, 1: 0}
    frames: list[tuple[str, int | None, dict[int, int], int, int]] = []

    def show(words: str, acting: int | None) -> None:
        tokens = {k: counts(specs[k], states[k])[0] for k in specs}
        frames.append((words, acting, tokens, done[0], done[1]))

    def act(actor: int, words: str) -> None:
        assert can_act(specs[actor], states[actor])
        states[actor] = begin(states[actor])
        done[actor] += 1
        states[actor], sent = end(specs[actor], states[actor], done[actor])
        for token in sent:
            states[token.to] = receive(states[token.to], token)
        show(words, actor)

    show("At first the producer has two credits.", None)
    act(0, "It fills slot 0: a credit becomes a version of the reader.")
    act(0, "It fills slot 1. Without a credit it must wait.")
    assert not can_act(specs[0], states[0])
    act(1, "The reader has used version 0: its token goes back.")
    act(0, "So the producer may act again; version 2 goes into slot 0.")
    sheet = Sheet(760, 50 + 62 * len(frames), "Two actors and a register of two slots")
    for x, words in ((80, "producer"), (255, "register of 2 slots"), (430, "reader")):
        sheet.text(x, 26, words, bold=True, anchor="middle")
    for k, (words, acting, tokens, made, read) in enumerate(frames):
        y = 42 + 62 * k
        for actor, x in ((0, 30), (1, 380)):
            fill = TINTS[actor] if acting == actor else PAPER
            sheet.box(x, y, 100, 44, fill, RANKS[actor], radius=8)
            for n in range(tokens[actor]):
                left = x + (38 if tokens[actor] == 2 else 50) + 24 * n
                sheet.dot(left, y + 22, RANKS[actor], hollow=actor == 0)
        for slot in range(2):
            version = max((v for v in range(made) if v % 2 == slot), default=None)
            free, x = version is None or version < read, 205 + 52 * slot
            sheet.box(x, y + 4, 48, 36, PAPER if free else "#eef1f4", dashed=free)
            label = "" if version is None else f"v{version}"
            sheet.text(x + 24, y + 27, label, size=12, mono=True, anchor="middle")
        sheet.arrow([(134, y + 22), (200, y + 22)])
        sheet.arrow([(312, y + 22), (375, y + 22)])
        for line, part in enumerate(wrap(words, 36)):
            sheet.text(505, y + 20 + 17 * line, part, size=12)
    return sheet


def play(slots: int, read_s: int, compute_s: int, acts: int) -> list[tuple[int, int, int, int]]:
    """Return (actor, act, start, end) of a reader and compute with a register between them."""
    specs = wire({0: 1, 1: 1}, [Ring(0, 0, (1,), slots)], steps=acts)
    states = {k: initial_state(spec) for k, spec in specs.items()}
    done, running, events, now = {0: 0, 1: 0}, {}, [], 0
    while True:
        for actor, seconds in ((0, read_s), (1, compute_s)):
            if actor not in running and can_act(specs[actor], states[actor]):
                states[actor] = begin(states[actor])
                running[actor] = now + seconds
                events.append((actor, done[actor], now, now + seconds))
        if not running:
            return events
        now = min(running.values())
        for actor in [a for a, when in running.items() if when == now]:
            del running[actor]
            done[actor] += 1
            states[actor], sent = end(specs[actor], states[actor], done[actor])
            for token in sent:
                states[token.to] = receive(states[token.to], token)


def slots() -> Sheet:
    """The same two actors with one slot between them, and with two."""
    sheet, unit = Sheet(760, 200, "One slot takes turns, two slots overlap"), 32
    for k, number in enumerate((1, 2)):
        y = 30 + 90 * k
        sheet.text(20, y + 6, f"{number} slot{'s' * (number > 1)}", bold=True)
        for actor, name in ((0, "read"), (1, "compute")):
            sheet.text(150, y + 24 + 28 * actor, name, size=12, anchor="end", color=QUIET)
        events = play(number, 2, 2, 4)
        for actor, act, start, stop in events:
            x = 165 + unit * start
            width = unit * (stop - start)
            sheet.box(x, y + 8 + 28 * actor, width - 2, 24, TINTS[actor], RANKS[actor])
            middle = x + width / 2
            sheet.text(middle, y + 24 + 28 * actor, act, size=11, anchor="middle")
        last = max(stop for *_, stop in events)
        sheet.text(175 + unit * last, y + 38, f"{last} units", size=12)
    return sheet


def pipeline() -> Sheet:
    """Three schedules of 4 stages and 8 micro-batches; they differ by slots of the stash alone."""
    title = "GPipe, 1F1B and zero bubble: the same actors with other slots"
    return draw_schedules(title, ("gpipe", "1f1b", "zero_bubble"), chunks=1, unit=17)


def v_shapes() -> Sheet:
    """Three schedules that go down the stages and up again; bold: on the way up."""
    title = "V-ZB, V-Half and V-Min: down the stages and up again"
    return draw_schedules(title, ("v_zero_bubble", "v_half", "v_min"), chunks=2, unit=10.3)


def draw_schedules(title: str, names: Sequence[str], chunks: int, unit: float) -> Sheet:
    """Draw the first step of 4 stages and 8 micro-batches by each schedule.

    unit: pixels of a unit of time.
    """
    stages, micro_batches, row, left = 4, 8, 17, 118 + 24 * (chunks - 1)
    sheet = Sheet(760, 340, title)
    colors = {FORWARD: TINTS[0], BACKWARD: TINTS[2], "weight": TINTS[1]}
    for k, name in enumerate(names):
        plan = unit_plan(stages, micro_batches, name, chunks)
        rehearsal = rehearse(plan, unit_seconds)
        y = 40 + 96 * k
        sheet.text(20, y - 8, f"in_flight: {name}", bold=True, mono=True, size=12)
        sheet.text(745, y - 8, f"{rehearsal.first_step_s:.0f} units", size=12, anchor="end")
        for stage in range(stages):
            slots = " + ".join(str(plan.schedule.slots(stage, chunk)) for chunk in range(chunks))
            sheet.text(20, y + row * stage + 13, f"stage {stage}", size=11, color=QUIET)
            sheet.text(68, y + row * stage + 13, f"{slots} slots", size=11, color=QUIET)
        for event in rehearsal.first_step:
            actor, long = plan.actors[event.actor], event.end - event.start
            if not long or event.stage >= stages:
                continue
            kind = actor.phase if actor.phase in colors else "weight"
            x, top = left + unit * event.start * 0.98, y + row * event.stage
            sheet.box(x, top, unit * long * 0.98 - 1, row - 2, colors[kind], radius=2)
            middle, up = x + unit * long * 0.98 / 2, actor.work.ops[0].chunk > 0
            sheet.text(middle, top + 12, event.act, size=9, anchor="middle", bold=up)
    for k, (words, color) in enumerate(
        (("forward", TINTS[0]), ("backward", TINTS[2]), ("weight gradient", TINTS[1]))
    ):
        sheet.box(118 + 130 * k, 318, 14, 12, color)
        sheet.text(138 + 130 * k, 328, words, size=11)
    return sheet


def story() -> Sheet:
    """The way from a recipe to a report."""
    sheet = Sheet(760, 200, "From a recipe to a report")
    rows = [
        [
            ("recipe", "YAML + overrides"),
            ("logical graph", "one huge device"),
            ("stages", "who owns which op"),
            ("signatures", "S, B, P of all"),
            ("boxing", "where layouts meet"),
        ],
        [
            ("plan", "actors, registers"),
            ("rehearsal", "proof, time, memory"),
            ("actors", "on every rank"),
            ("report", "foreseen, measured"),
        ],
    ]
    width, gap = 120, 28
    for k, row in enumerate(rows):
        y = 24 + 96 * k
        for at, (name, note) in enumerate(row):
            x = 20 + (width + gap) * at
            tint = TINTS[1] if (k, at) in ((0, 0), (1, 3)) else TINTS[0] if k == 0 else TINTS[2]
            sheet.box(x, y, width, 56, tint, LINE, radius=8)
            sheet.text(x + width / 2, y + 25, name, bold=True, anchor="middle")
            sheet.text(x + width / 2, y + 43, note, size=10.5, color=QUIET, anchor="middle")
            if at < len(row) - 1:
                sheet.arrow([(x + width + 3, y + 28), (x + width + gap - 3, y + 28)])
    down = 20 + (width + gap) * 4 + width / 2
    sheet.arrow([(down, 83), (down, 100), (80, 100), (80, 117)])
    return sheet


PICTURES: dict[str, Callable[[], Sheet]] = {
    "story": story,
    "sbp": sbp,
    "nd_sbp": nd_sbp,
    "products": products,
    "boxing": boxing,
    "acts": acts,
    "slots": slots,
    "pipeline": pipeline,
    "v_shapes": v_shapes,
}


def main(names: Sequence[str] = ()) -> None:
    """Draw all pictures, or those that are named."""
    for name in names or PICTURES:
        PICTURES[name]().write(FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
