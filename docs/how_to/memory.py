"""Writes the table of memory.md, foreseen and measured memory: `python docs/how_to/memory.py`.

A GPT of 13 million parameters is trained for three steps in each layout.  The CPU of one small
machine will do: 2 processes, half a gigabyte each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

GPT = (
    "recipe=gpt_dp model.width=384 model.depth=6 model.heads=6 data.length=256 "
    "placement.axes.data=1 train.batch_size=16 train.micro_batches=2 train.steps=3 "
    "train.save=false eval.batches=0"
)
AGAIN = "recompute.modules=[blocks.*]"
DATA = "placement.axes.data=2 zero.axis=data"
LAYOUTS = {
    "plain": "",
    "recompute blocks.*": AGAIN,
    "recompute blocks.*, keep matmul": f"{AGAIN} recompute.keep=[matmul]",
    "data 2": "placement.axes.data=2",
    "data 2, ZeRO 1": f"{DATA} zero.stage=1",
    "data 2, ZeRO 2": f"{DATA} zero.stage=2",
    "data 2, ZeRO 3": f"{DATA} zero.stage=3",
    "data 2, ZeRO 3, recompute blocks.*": f"{DATA} zero.stage=3 {AGAIN}",
    "stages 2, 1F1B": "placement.stages=2 placement.in_flight=1f1b",
    "tensor 2": "placement.axes={tensor: 2}",
    "tensor 2, recompute blocks.*": "placement.axes={tensor: 2} " + AGAIN,
}
TABLE = "<!-- table: python docs/how_to/memory.py -->\n"
HEAD = """
The model, a GPT of 13 million parameters:

    flowrun {gpt}

| layout | foreseen | at most | measured | process |
| --- | ---: | ---: | ---: | ---: |
"""


def main() -> None:
    """Run every layout, and write the table at the end of the page after each."""
    page = Path(__file__).with_suffix(".md")
    text = page.read_text().partition(TABLE)[0]
    page.write_text(text + TABLE + HEAD.format(gpt=GPT))
    for name, keys in LAYOUTS.items():
        with page.open("a") as table:
            table.writelines(f"{line}\n" for line in measured(name, keys))
    print(page.read_text())


def measured(name: str, keys: str) -> list[str]:
    """Return the lines of a layout, one for ranks that are foreseen alike."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "flowrun.launcher.cli", *arguments(f"{GPT} {keys}")]
        subprocess.run([*command, f"hydra.run.dir={folder}"], check=True, capture_output=True)
        report = json.loads((Path(folder) / "report.json").read_text())
    foreseen, measured = report["foreseen"], report["measured"]
    alike: dict[tuple[int, int], list[str]] = {}
    for rank, peak in foreseen["peak_bytes"].items():
        alike.setdefault((peak, foreseen["bound_bytes"][rank]), []).append(rank)
    lines = []
    for (peak, bound), ranks in alike.items():
        title = name if len(alike) == 1 else f"{name}, rank {', '.join(ranks)}"
        found = ", ".join(f"{measured['peak_bytes'][rank] / 1e6:.1f}" for rank in ranks)
        process = ", ".join(f"{measured['process_bytes'][rank] / 1e6:.0f}" for rank in ranks)
        lines.append(f"| {title} | {peak / 1e6:.1f} | {bound / 1e6:.1f} | {found} | {process} |")
    return lines


def arguments(text: str) -> list[str]:
    """Return the words of a command line; a mapping is one word."""
    return text.replace(": ", ":").split()


if __name__ == "__main__":
    main()
