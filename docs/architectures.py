"""Writes docs/architectures.md: unmodified models of transformers, in every layout, by plain torch.

    python docs/architectures.py [architecture …]

Each is trained five steps on the virtual cluster and in a plain torch loop.  Without names all are
run, which takes some minutes, and the page is written; with names the rows are only printed.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402

from flowrun.engine.errors import FlowrunError  # noqa: E402
from flowrun.engine.ops import registry  # noqa: E402
from support.architectures import (  # noqa: E402
    ARCHITECTURES,
    LAYOUTS,
    LOSS_TOLERANCE,
    PINNED,
    STEPS,
    training,
    unpinned,
    weights_apart,
)
from support.layouts import compiled, virtual_run  # noqa: E402
from support.plain_loop import loss_difference, plain_loop  # noqa: E402

PAGE = """# Architectures of transformers

Written by `python docs/architectures.py` with torch {torch} and transformers {transformers}.

Models of `transformers` as they are: tiny configurations ({layers} layers), random weights, no
dropout. Each is trained {steps} steps in fp32 (SGD with momentum, two micro-batches) on the virtual
cluster and in a plain torch loop. A cell is the largest relative difference of a step's loss, and
behind it that of a weight, as a share of the way that training moved it. "Pinned" is Megatron's
layout as pins; elsewhere nothing is pinned. "Ops" are those of the captured graph of one
micro-batch; "without a table" are kinds of op that every rank does whole, as the plan notes.
"""

LAYERS = 2


def row(name: str) -> list[str]:
    """Cells of an architecture."""
    plain = plain_loop(training(name, LAYERS), 0.0, STEPS)
    cells, ops, fallen = [], "-", "-"
    for key, layout in LAYOUTS.items():
        given = (training if key == PINNED else unpinned)(name, LAYERS)
        try:
            graph = compiled(given, layout).plan.graph
            found = virtual_run(given, layout, STEPS)
        except FlowrunError as error:
            cells.append(str(error).splitlines()[1].strip())
            continue
        losses = loss_difference(found.losses, plain)
        mark = "" if losses <= LOSS_TOLERANCE else " **apart**"
        cells.append(f"{losses:.0e} / {weights_apart(found.weights, plain):.0e}{mark}")
        own = [op for op in graph.ops if not op.target.startswith("flow.")]
        if key == "data 2":
            ops = str(len(own))
            targets = {op.target for op in own if not registry.has_table(op.target)}
            fallen = ", ".join(sorted(targets)) or "none"
    return [ARCHITECTURES[name].name, *cells, ops, fallen]


def main(names: list[str]) -> None:
    """All rows, or those of some architectures."""
    import transformers

    heads = ["architecture", *LAYOUTS, "ops", "without a table"]
    lines = [heads, ["---"] * len(heads)]
    for name in names or ARCHITECTURES:
        lines.append(row(name))
        print(" | ".join(lines[-1]), flush=True)
    if not names:
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        head = PAGE.format(
            torch=torch.__version__.split("+")[0],
            transformers=transformers.__version__,
            layers=LAYERS,
            steps=STEPS,
        )
        (ROOT / "docs" / "architectures.md").write_text(f"{head}\n{table}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
