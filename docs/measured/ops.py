"""Writes docs/measured/ops.md, and the rows that ship: modules and functions of torch.

    python docs/measured/ops.py [name …]

Each is trained two steps on one rank and on two, on the virtual cluster and in a plain torch loop.
Rows are kept in ops.json; with names those alone are measured.  What ops without a table were found
to do goes to engine/ops/proof/found_rows.json.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402

from flowrun.engine.errors import FlowrunError  # noqa: E402
from flowrun.engine.ops.proof.kept_rows import SHIPPED, kept_rows, rows_text, shipped_rows  # noqa: E402
from support.layouts.grids import compiled, virtual_run  # noqa: E402
from support.layouts.plain_loop import plain_loop  # noqa: E402
from support.nets.survey import CASES, NoCase, verdict  # noqa: E402

FILE = ROOT / "docs" / "measured" / "ops.md"
BOUND = 1e-5
NO_CASE = "no case"
ROWS = FILE.with_suffix(".json")
PAGE = """# Modules and functions

Written by `python docs/measured/ops.py` with torch {torch}.

{number} nets, each of one module or function of torch with weights of its own, trained on one rank
and on two ranks, data parallel, and compared with a plain torch loop. A loss or a weight differs by
at most {apart} (relative; {bound:.0e} is allowed), and {gathered} gather their batch. All figures,
and the ops of each: `ops.json` beside this page.

## Rows by hand

All ops have rows in `engine/ops`: {by_hand}.

## Rows found by experiment

Some of their ops have no rows in `engine/ops`: these are found by experiment (`engine/ops/proof`)
and ship with flowrun; the plan notes them.

{found}

## Others

{others}
"""


def row(name: str) -> list[str]:
    """Return the figures of a case: kind, ops whose rows were found, gathered, difference."""
    try:
        found = verdict(name)
    except NoCase as error:
        return [f"{NO_CASE}: {error}", "", "", ""]
    except FlowrunError as error:
        said = " ".join(" ".join(str(error).split("\n")[1:2]).split())
        return [f"refused: {said}".replace("|", "/"), "", "", ""]
    except Exception as error:
        return [f"**failed**: {type(error).__name__}", "", "", ""]
    finally:
        for kept in (virtual_run, compiled, plain_loop):
            kept.cache_clear()
    kind = f"{found.kind}: {', '.join(found.whole)}" if found.whole else found.kind
    mark = "" if found.apart <= BOUND else " **apart**"
    targets = ", ".join(target.removeprefix("aten.") for target in found.found)
    return [kind, targets, ", ".join(found.gathered) or "-", f"{found.apart:.0e}{mark}"]


def page(rows: dict[str, list[str]]) -> str:
    """Return the text of the page: row by name in the order of CASES."""
    kept = {name: rows[name] for name in CASES if name in rows}
    known = {name: cells for name, cells in kept.items() if not cells[0].startswith(NO_CASE)}
    kinds = {"by hand": list[str](), "found": list[str]()}
    others = []
    for name, (kind, *_) in known.items():
        if kind in kinds:
            kinds[kind].append(name)
        else:
            others.append(f"- {name}: {kind}")
    shares = [cells[3].split()[0] for cells in known.values() if cells[3]]
    gathering = sum(cells[2] not in ("", "-") for cells in known.values())
    return PAGE.format(
        torch=torch.__version__.split("+")[0],
        number=len(known),
        apart=max(shares, key=float),
        bound=BOUND,
        gathered=gathering or "none",
        by_hand=", ".join(kinds["by hand"]),
        found=", ".join(kinds["found"]),
        others="\n".join(others),
    )


def write(rows: dict[str, list[str]]) -> None:
    """Write the rows, one a line, and the page."""
    lines = (f"{json.dumps(name)}: {json.dumps(rows[name])}" for name in CASES if name in rows)
    ROWS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    FILE.write_text(page(rows))


def main(names: list[str]) -> None:
    """Make the rows of some cases, or of all."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    for name in names or CASES:
        rows[name] = row(name)
        print(" | ".join([name, *rows[name]]), flush=True)
        write(rows)
        SHIPPED.write_text(rows_text({**shipped_rows(), **kept_rows(None).own}))


if __name__ == "__main__":
    main(sys.argv[1:])
