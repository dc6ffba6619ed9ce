"""Writes docs/architectures.md: unmodified models in every layout, beside plain torch.

    python docs/architectures.py [architecture …]

Each is trained five steps on the virtual cluster and in a plain torch loop.  The page has a row for
each and is written after every one: with names those rows alone are made anew, and without names
those that the page has not, so that a run that was broken off goes on.  All take some minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402

from flowrun.engine.errors import FlowrunError  # noqa: E402
from flowrun.engine.ops import registry  # noqa: E402
from support.architecture import LAYOUTS, PINNED, STEPS, weights_apart  # noqa: E402
from support.architectures import ARCHITECTURES, training, unpinned  # noqa: E402
from support.layouts import compiled, virtual_run  # noqa: E402
from support.plain_loop import loss_difference, plain_loop  # noqa: E402

FILE = ROOT / "docs" / "architectures.md"
PAGE = """# Architectures

Written by `python docs/architectures.py` with torch {torch} and transformers {transformers}.

Models of the paper that flowrun ships, then models of `transformers` as they are: tiny ({layers}
layers), random weights, no dropout. Each is trained {steps} steps in fp32 (SGD, two micro-batches;
one where there is batch normalisation) on the virtual cluster and in a plain torch loop. A cell is
the largest relative difference of a step's loss, and behind it that of a weight, as a share of the
way that training moved it. A loss that differs by more than {bound:.0e} is marked. "Pinned" is
Megatron's layout as pins, or split classes or tables; elsewhere nothing is pinned. "Ops" are those
of the captured graph of one micro-batch; "without a table" are kinds of op that every rank does
whole, as the plan notes.
"""

LAYERS = 2
LOSS_BOUND = 1e-4
HEADS = ["architecture", *LAYOUTS, "ops", "without a table"]


def row(name: str) -> list[str]:
    """Cells of an architecture."""
    plain = plain_loop(training(name, LAYERS), 0.0, STEPS)
    cells, ops, fallen = [], "-", "-"
    for key, plainly in LAYOUTS.items():
        given = (training if key == PINNED else unpinned)(name, LAYERS)
        layout = ARCHITECTURES[name].layout(plainly)
        try:
            graph = compiled(given, layout).plan.graph
            found = virtual_run(given, layout, STEPS)
        except FlowrunError as error:
            cells.append(str(error).splitlines()[1].strip())
            continue
        losses = loss_difference(found.losses, plain)
        mark = "" if losses <= LOSS_BOUND else " **apart**"
        cells.append(f"{losses:.0e} / {weights_apart(found.weights, plain):.0e}{mark}")
        own = [op for op in graph.ops if not op.target.startswith("flow.")]
        if key == "data 2":
            ops = str(len(own))
            targets = {op.target for op in own if not registry.has_table(op.target)}
            fallen = ", ".join(sorted(targets)) or "none"
    return [ARCHITECTURES[name].name, *cells, ops, fallen]


def written() -> dict[str, list[str]]:
    """Rows of the page as it is, by architecture."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return {cells[0]: cells for cells in rows[2:]}


def write(rows: dict[str, list[str]]) -> None:
    """The page, rows in the order of ARCHITECTURES."""
    import transformers

    known = [rows[a.name] for a in ARCHITECTURES.values() if a.name in rows]
    lines = [HEADS, ["---"] * len(HEADS), *known]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    head = PAGE.format(
        torch=torch.__version__.split("+")[0],
        transformers=transformers.__version__,
        layers=LAYERS,
        steps=STEPS,
        bound=LOSS_BOUND,
    )
    missing = ", ".join(a.name for a in ARCHITECTURES.values() if a.name not in rows)
    left = f"\nNot run yet: {missing}.\n" if missing else ""
    FILE.write_text(f"{head}\n{table}\n{left}")


def main(names: list[str]) -> None:
    """The rows of some architectures, or those that the page has not."""
    rows = written()
    for name in names or [n for n, a in ARCHITECTURES.items() if a.name not in rows]:
        made = row(name)
        rows[made[0]] = made
        print(" | ".join(made), flush=True)
        write(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
