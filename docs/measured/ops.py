"""Writes docs/measured/ops.md, and the rows that ship: modules and functions of torch.

    python docs/measured/ops.py [name …]

Each is trained two steps on one rank and on two, on the virtual cluster and in a plain torch loop.
With names those rows of the page alone are made anew.  What ops without a table were found to do
goes to engine/proof/found_rows.json.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402

from flowrun.engine.errors import FlowrunError  # noqa: E402
from flowrun.engine.proof.kept_rows import SHIPPED, kept_rows, rows_text, shipped_rows  # noqa: E402
from support.layouts.grids import compiled, virtual_run  # noqa: E402
from support.layouts.plain_loop import plain_loop  # noqa: E402
from support.nets.survey import CASES, verdict  # noqa: E402

FILE = ROOT / "docs" / "measured" / "ops.md"
BOUND = 1e-5
HEADS = ["module or function", "its ops", "found by experiment", "gathered", "apart from torch"]
PAGE = """# Modules and functions

Written by `python docs/measured/ops.py` with torch {torch}.

This page lists torch's modules and functions, and how each trains under data parallelism.

Every line is a net of one module or function with weights of its own, trained on one rank and on
two ranks, and compared with a plain torch loop. Its ops have rows **by hand** (`engine/ops`), rows
that are **found** by experiment (`engine/proof`; the plan notes which), or none, so that every rank
computes them **whole**; or the net is **refused**, with the reason. "Gathered" are samples that are
sent so that a rank has them all; "apart" is the largest relative difference of a loss or a weight
from plain torch ({bound:.0e} is allowed).

{counts}
"""


def row(name: str) -> list[str]:
    """Return the cells of a case."""
    try:
        found = verdict(name)
    except FlowrunError as error:
        said = " ".join(" ".join(str(error).split("\n")[1:2]).split())
        return [name, f"refused: {said}".replace("|", "/"), "", "", ""]
    except Exception as error:
        return [name, f"**failed**: {type(error).__name__}", "", "", ""]
    finally:
        for kept in (virtual_run, compiled, plain_loop):
            kept.cache_clear()
    kind = f"{found.kind}: {', '.join(found.whole)}" if found.whole else found.kind
    mark = "" if found.apart <= BOUND else " **apart**"
    targets = ", ".join(target.removeprefix("aten.") for target in found.found)
    return [name, kind, targets, ", ".join(found.gathered) or "-", f"{found.apart:.0e}{mark}"]


def written() -> dict[str, list[str]]:
    """Return the rows of the present page, by name."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    return {row[0]: row for row in cells[2:]}


def write(rows: dict[str, list[str]]) -> None:
    """Return the page, with rows in the order of CASES."""
    known = [rows[name] for name in CASES if name in rows]
    kinds = Counter(cells[1].split(":")[0] for cells in known)
    counts = f"{len(known)} lines: " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
    gathering = sum(cells[3] not in ("", "-") for cells in known)
    counts += f". {gathering or 'None'} gathers its batch."
    table = "\n".join(f"| {' | '.join(line)} |" for line in [HEADS, ["---"] * len(HEADS), *known])
    version = torch.__version__.split("+")[0]
    FILE.write_text(f"{PAGE.format(torch=version, bound=BOUND, counts=counts)}\n{table}\n")


def main(names: list[str]) -> None:
    """Make the rows of some cases, or of all."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = written()
    for name in names or CASES:
        rows[name] = row(name)
        print(" | ".join(rows[name]), flush=True)
        write(rows)
        SHIPPED.write_text(rows_text({**shipped_rows(), **kept_rows(None).own}))


if __name__ == "__main__":
    main(sys.argv[1:])
