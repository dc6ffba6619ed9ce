"""Writes docs/measured/architectures.md: unmodified models in every layout.

    python docs/measured/architectures.py [architecture …]

Each is trained three steps on the virtual cluster and in a plain torch loop.  The page has a row
for each and is written after every one: with names those rows alone are made anew, and without
names those that the page has not, so that a run that was broken off goes on.  All take half an
hour of one core.  Those of torchvision and timm need `pip install -e '.[vision]'`.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402

from flowrun.engine.errors import FlowrunError  # noqa: E402
from support.layouts.grids import Layout, captured, compiled, virtual_run  # noqa: E402
from support.layouts.plain_loop import Trained, Training, plain_loop  # noqa: E402
from support.nets.architecture import BOUND, LAYOUTS, STEPS, Apart, apart, in_double  # noqa: E402
from support.nets.architectures import ARCHITECTURES, training  # noqa: E402
from support.nets.vision import versions  # noqa: E402

FILE = ROOT / "docs" / "measured" / "architectures.md"
PAGE = """# Architectures

Written by `python docs/measured/architectures.py` with {versions}.

This page lists which architectures train in which layouts, and how close they come to plain torch.

The models are those of the paper that flowrun ships, then unmodified models of `transformers`,
torchvision and timm: tiny (one layer of each block), with random weights and without dropout.
Each is trained {steps} steps in fp32 (SGD, two micro-batches; one with batch normalisation or a
loss over pairs of samples) on the virtual cluster and in a plain torch loop. A cell has the
largest relative difference of a step's loss, then that of a weight, as a share of the distance
that training moved it. "Pinned" is Megatron's layout where there is one; else every weight is
split along its first dim. In the other columns nothing is pinned.

Batch normalisation over few values, and relu near 0, amplify a last bit: plain torch in fp32 is
then as far from plain torch in fp64. If a difference is larger than {bound:.0e}, both sides are
trained again in fp64, and the new differences stand in brackets; the cell is marked **apart**
if these are larger too.

"Ops" is the number of ops in the captured graph of one micro-batch. "Found" are kinds of op whose
rows were found by experiment; "whole" are those that every rank of data 2 computes for the whole
batch. A reason in place of figures is flowrun's refusal, before anything starts.
"""

LAYERS = 1
HEADS = ["architecture", *LAYOUTS, "ops", "found", "whole"]


def row(name: str) -> list[str]:
    """Return the cells of an architecture."""
    given, title = training(name, LAYERS), ARCHITECTURES[name].name
    plain = plain_loop(given, 0.0, STEPS)
    try:
        graph = captured(given)
    except FlowrunError as error:
        return [title, _reason(error), *[""] * len(LAYOUTS), "", ""]
    cells = [_cell(name, given, key, plain) for key in LAYOUTS]
    own = [op for op in graph.ops if not op.target.startswith("flow.")]
    found = {op.target for op in own if op.table}
    return [title, *cells, str(len(own)), _listed(found), _listed(_whole(given))]


def _cell(name: str, given: Training, key: str, plain: Trained) -> str:
    layout = ARCHITECTURES[name].layout(LAYOUTS[key])
    try:
        difference = _difference(given, layout, plain)
        if difference.within(BOUND, BOUND):
            return str(difference)
        given = in_double(given)
        exact = _difference(given, layout, plain_loop(given, 0.0, STEPS))
    except FlowrunError as error:
        return _reason(error)
    return f"{difference} ({exact})" + ("" if exact.within(BOUND, BOUND) else " **apart**")


def _difference(given: Training, layout: Layout, plain: Trained) -> Apart:
    run = virtual_run(given, layout, STEPS)
    return apart(run.losses, run.weights, plain)


def _whole(given: Training) -> set[str]:
    """Return the kinds of op that every rank of data 2 computes whole, by the plan."""
    notes = compiled(given, LAYOUTS["data 2"]).plan.notes
    return {note.split()[0] for note in notes if "has no signature table" in note}


def _listed(targets: set[str]) -> str:
    return ", ".join(sorted(t.removeprefix("aten.") for t in targets)) or "none"


def _reason(error: FlowrunError) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[1:]).replace("|", "\\|")


def written() -> dict[str, list[str]]:
    """Return the rows of the present page, by architecture."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return {cells[0]: cells for cells in rows[2:] if len(cells) == len(HEADS)}


def write(rows: dict[str, list[str]]) -> None:
    """Return the page, with rows in the order of ARCHITECTURES."""
    known = [rows[a.name] for a in ARCHITECTURES.values() if a.name in rows]
    lines = [HEADS, ["---"] * len(HEADS), *known]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    head = PAGE.format(versions=versions(), steps=STEPS, bound=BOUND)
    missing = ", ".join(a.name for a in ARCHITECTURES.values() if a.name not in rows)
    left = f"\nNot run yet: {missing}.\n" if missing else ""
    FILE.write_text(f"{head}\n{table}\n{left}")


def main(names: list[str]) -> None:
    """Make the rows of some architectures, or those that the page lacks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = written()
    for name in names or [n for n, a in ARCHITECTURES.items() if a.name not in rows]:
        made = row(name)
        rows[made[0]] = made
        print(" | ".join(made), flush=True)
        write(rows)
        for kept in (captured, compiled, virtual_run, plain_loop, training):
            kept.cache_clear()


if __name__ == "__main__":
    main(sys.argv[1:])
