"""Writes docs/measured/architectures.md: unmodified models in every layout.

    python docs/measured/architectures.py [architecture …]

Each is trained three steps on the virtual cluster and in a plain torch loop.  Rows are kept in
architectures.json and the page is written from them after every one: with names those rows alone
are measured, and without names those that are missing, so that a run that was broken off goes on.
All take half an hour of one core.  Those of torchvision and timm need `pip install -e '.[vision]'`.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
import transformers  # noqa: E402

from flowrun.engine.errors import FlowrunError  # noqa: E402
from support.layouts.grids import Layout, captured, compiled, virtual_run  # noqa: E402
from support.layouts.plain_loop import Trained, Training, plain_loop  # noqa: E402
from support.nets.architecture import BOUND, LAYOUTS, STEPS, Apart, apart, in_double  # noqa: E402
from support.nets.architectures import ARCHITECTURES, training  # noqa: E402
from support.nets.vision import make_importable, versions  # noqa: E402

FILE = ROOT / "docs" / "measured" / "architectures.md"
ROWS = FILE.with_suffix(".json")
PAGE = """# Architectures

Written by `python docs/measured/architectures.py` with {versions}.

The models that flowrun ships, and unmodified ones of `transformers`, torchvision and timm: tiny (a
layer of each block), with random weights, no dropout, and their own losses (CTC, balance of
experts). Each trains {steps} steps in fp32 (SGD, two micro-batches; one with batch normalisation or
a loss over pairs or all tokens) on the virtual cluster and in a plain loop; layouts: {layouts}.
"Pinned": Megatron's layout, else every weight split along its first dim.

## Trains as in plain torch

The number: the largest difference of a weight in any layout, as a share of the way that training
moved it (all figures: `architectures.json`).

{same}

## Trains as in plain torch in fp64

Batch normalisation over few values, and relu near 0, amplify a last bit. Where a difference exceeds
{bound:.0e}, both sides are trained again in fp64; **apart**: there, too.

{amplified}

{refused}## Packages

Of ten packages, unmodified, on one rank, data 2 and tensor 2:

- as plain torch: vector_quantize_pytorch, torch_geometric (its graph a buffer, or batched without
  `add_self_loops`), monai, x_transformers, diffusers, timm; segmentation_models_pytorch (data 2
  in fp64: fp32 is as far from itself)
- torchdiffeq: `odeint` with fixed steps (rk4), not adaptive or `odeint_adjoint`
- performer_pytorch: with `auto_check_redraw=False`
- pytorch_metric_learning: NormalizedSoftmaxLoss and SoftTripleLoss; others select by
  labels: refused

## Ops without rows by hand

{found}{whole}
"""

LAYERS = 1
Row = dict[str, Any]  # refused: why; or apart: of each layout, ops: number, found, whole: kinds


def row(name: str) -> Row:
    """Return the figures of an architecture."""
    given = training(name, LAYERS)
    plain = plain_loop(given, 0.0, STEPS)
    try:
        graph = captured(given)
    except FlowrunError as error:
        return {"refused": _reason(error)}
    own = [op for op in graph.ops if not op.target.startswith("flow.")]
    return {
        "apart": {key: _cell(name, given, key, plain) for key in LAYOUTS},
        "ops": len(own),
        "found": _listed({op.target for op in own if op.table}),
        "whole": _listed(_whole(given)),
    }


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


def _listed(targets: set[str]) -> list[str]:
    return sorted(target.removeprefix("aten.") for target in targets)


def _reason(error: FlowrunError) -> str:
    return " ".join(error.problem.split()).replace("|", "\\|")


def page(versions: str, rows: dict[str, Row]) -> str:
    """Return the text of the page."""
    known = {a.name: rows[a.name] for a in ARCHITECTURES.values() if a.name in rows}
    trained = {name: row for name, row in known.items() if "apart" in row}
    amplified = [
        name for name, row in trained.items() if any("(" in c for c in row["apart"].values())
    ]
    refused = {name: row["refused"] for name, row in known.items() if "refused" in row}
    return PAGE.format(
        versions=versions,
        steps=STEPS,
        layouts="; ".join(LAYOUTS),
        bound=BOUND,
        same=_libraries({n: r for n, r in trained.items() if n not in amplified}),
        amplified=_table(
            ["architecture", "loss / weight in fp32", "in fp64"],
            [[name, *_worst(trained[name])] for name in amplified],
        ),
        refused=_refusals(refused),
        found=_kinds(trained, "found", "Found by experiment: "),
        whole=_kinds(trained, "whole", "Computed whole by every rank of data 2: "),
    )


def _libraries(rows: dict[str, Row]) -> str:
    lines: dict[str, list[str]] = {}
    for name, row in rows.items():
        library = next((x for x in ("torchvision", "timm") if name.startswith(x)), "")
        kind = name.removeprefix(f"{library} ")
        library = library or ("transformers" if hasattr(transformers, name) else "flowrun")
        weight = max(float(cell.split("/")[1]) for cell in row["apart"].values())
        lines.setdefault(library, []).append(f"{kind} {weight:.0e}")
    return "\n".join(f"- **{library}**: {', '.join(of)}" for library, of in lines.items())


def _worst(row: Row) -> tuple[str, str]:
    """Return the layout's cell with the largest difference of a weight in fp32, its fp64 apart."""
    cell = max(row["apart"].values(), key=lambda cell: float(cell.split()[2]))
    single, _, double = cell.partition(" (")
    return single, double.replace(")", "")


def _refusals(refused: dict[str, str]) -> str:
    """Return the part of the page on what is refused, if anything is."""
    lines = [[why, names] for why, names in _reasons(refused).items()]
    table = _table(["reason", "architectures"], lines)
    return f"## Refused, before anything starts\n\n{table}\n\n" if lines else ""


def _reasons(refused: dict[str, str]) -> dict[str, str]:
    """Return reason -> names; a reason that names its architecture is one with its like."""
    reasons: dict[str, list[str]] = {}
    for name, why in refused.items():
        reasons.setdefault(why.replace(name, "the model"), []).append(name)
    return {why: ", ".join(names) for why, names in reasons.items()}


def _kinds(rows: dict[str, Row], key: str, says: str) -> str:
    named: dict[str, list[str]] = {}
    for name, row in rows.items():
        named.setdefault(", ".join(row[key]), []).append(name)
    of = [f"`{kinds}` in {', '.join(names)}" for kinds, names in named.items() if kinds]
    return f"{says}{'; '.join(of)}.\n" if of else ""


def _table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *rows])


def read() -> tuple[str, dict[str, Row]]:
    """Return what the rows were measured with, and the rows by architecture."""
    if not ROWS.exists():
        return "", {}
    rows = json.loads(ROWS.read_text())
    return rows.pop("with"), rows


def write(versions: str, rows: dict[str, Row]) -> None:
    """Write the rows, one a line, and the page."""
    lines = [
        f"{json.dumps(key)}: {json.dumps(of)}" for key, of in {"with": versions, **rows}.items()
    ]
    ROWS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    FILE.write_text(page(versions, rows))


def main(names: list[str]) -> None:
    """Measure the rows of some architectures, or those that are missing; write the page."""
    make_importable()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    measured, rows = read()
    for name in names or [n for n, a in ARCHITECTURES.items() if a.name not in rows]:
        title = ARCHITECTURES[name].name
        rows[title] = row(name)
        print(title, rows[title], flush=True)
        write(versions(), rows)
        for kept in (captured, compiled, virtual_run, plain_loop, training):
            kept.cache_clear()
    if not names:
        write(measured or versions(), rows)


if __name__ == "__main__":
    main(sys.argv[1:])
