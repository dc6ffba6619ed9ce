"""Searches placements of Llama 3 beside those that experts ran: `python docs/measured/experts.py`.

It writes the last table of placement_sweeps.md; `python docs/measured/experts.py 0 3` measures rows
0 and 3 alone, and only prints them.  Each search and plan is a process of its own, none is kept.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

SIZES = {
    "8B": "model.depth=32 model.heads=32 model.width=4096 model.inner=14336",
    "70B": "model.depth=80 model.heads=64 model.width=8192 model.inner=28672",
    "405B": "",
}
SELECTIVE = "recompute.modules=[blocks.*] recompute.keep=[matmul]"
FULL = "recompute.modules=[blocks.*]"
TABLE = "<!-- table: python docs/measured/experts.py -->\n"
HEAD = """
| Llama 3 | H100s | chosen | a step | experts' | a step |
| --- | ---: | --- | ---: | --- | ---: |"""


class Row(NamedTuple):
    """experts: the sizes of data, tensor and stages that they ran, ZeRO, keys of memory."""

    size: str
    ranks: int
    sequences: int
    micro_batches: int
    data: int
    tensor: int
    stages: int
    zero: int
    memory: str


ROWS = (
    Row("8B", 8, 128, 16, 8, 1, 1, 3, SELECTIVE),  # torchtitan: FSDP
    Row("8B", 64, 512, 8, 64, 1, 1, 3, SELECTIVE),
    Row("70B", 64, 512, 64, 8, 8, 1, 3, FULL),  # torchtitan: FSDP x TP
    Row("405B", 512, 512, 8, 64, 8, 1, 3, FULL),
    Row("405B", 16384, 2048, 16, 128, 8, 16, 1, FULL),  # arXiv 2407.21783, table 4
)


def main() -> None:
    """Measure the rows, and write them to the page where all were asked for."""
    asked = [ROWS[int(k)] for k in sys.argv[1:]] or ROWS
    lines = []
    for row in asked:
        lines.append(describe(row))
        print(lines[-1], flush=True)
    if asked is ROWS:
        page = Path(__file__).with_name("placement_sweeps.md")
        text = page.read_text().partition(TABLE)[0]
        page.write_text("\n".join((text + TABLE + HEAD, *lines)) + "\n")


def describe(row: Row) -> str:
    """Return a row of the table."""
    keys = f"recipe=llama3_405b {SIZES[row.size]} train.batch_size={row.sequences}"
    chosen = run(f"{keys} auto.placement=true auto.ranks={row.ranks}")
    best = re.search(r"^ *1 +(\S+ \S+).*?% +(\S.*?) *$", chosen, re.M)  # of the ten best
    seconds, picked = best.groups() if best else ("", "none")
    sizes = f"{{data: {row.data}, tensor: {row.tensor}}}".replace(" ", "")
    experts = run(
        f"{keys} placement.axes={sizes} placement.stages={row.stages} {row.memory}"
        f" train.micro_batches={row.micro_batches} zero.stage={row.zero}"
    )
    step = re.search(r"foreseen on \w+: (.*?) a step", experts)
    lacks = re.search(r"needs ([\d,]+) bytes", experts)
    theirs = step[1] if step else f"needs {lacks[1]} B" if lacks else experts[-200:]
    name = f"data {row.data} x tensor {row.tensor} x stages {row.stages}, ZeRO {row.zero}"
    return f"| {row.size} | {row.ranks:,} | {picked} | {seconds} | {name} | {theirs} |"


def run(keys: str) -> str:
    """Return what a plan prints."""
    command = [sys.executable, "-m", "flowrun.launcher.cli", "plan", *keys.split()]
    process = subprocess.run(
        [*command, "engine.cache=false"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "300"},
    )
    return process.stdout.decode()


if __name__ == "__main__":
    main()
