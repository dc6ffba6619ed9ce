"""Measures planning against ranks and layers: `python docs/measured/scale.py`.

It makes scale.svg and the table of scale.md.

GPT-3 (recipes/gpt3_175b.yaml), made smaller; each plan in a process of its own, none kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

FEW_STAGES = "recipe=gpt3_175b model.depth=16 placement.stages=8 train.micro_batches=32"
RANKS = {  # ranks -> keys: the same 8 stages, wider
    data * tensor * 8: f"{FEW_STAGES} placement.axes={{data:{data},tensor:{tensor}}} "
    f"train.batch_size={32 * data}"
    for data, tensor in ((1, 2), (2, 4), (4, 8), (16, 8), (64, 8))
}
LAYERS = {  # layers -> keys: as many stages as GPT-3 has for them
    depth: f"recipe=gpt3_175b model.depth={depth} placement.stages={depth * 2 // 3}"
    for depth in (6, 12, 24, 48, 96)
}
TITLES = {
    "ranks": "16 layers on 8 stages, more ranks each",
    "layers": "3 layers on 2 stages of 48 ranks, more of both",
}
TABLE = "<!-- table: python docs/measured/scale.py -->\n"


class Planned(NamedTuple):
    """The cost of one `flowrun plan`, imports included: seconds of a core, largest memory."""

    seconds: float
    peak_bytes: int


def main() -> None:
    """Measure, draw, and write the page."""
    page = Path(__file__).with_suffix(".md")
    text = page.read_text().partition(TABLE)[0]
    lines = ["", "| | seconds of a core | peak memory |", "| --- | ---: | ---: |"]
    found: dict[str, dict[int, Planned]] = {"ranks": {}, "layers": {}}
    for what, plans in (("ranks", RANKS), ("layers", LAYERS)):
        for number, keys in plans.items():
            each = found[what][number] = planned(keys)
            row = f"| {number:,} {what} | {each.seconds:.0f} | {each.peak_bytes / 1e6:,.0f} MB |"
            lines.append(row)
            print(row, flush=True)
    page.write_text(text + TABLE + "\n".join(lines) + "\n")
    draw(found, page.with_suffix(".svg"))


def planned(keys: str) -> Planned:
    """Run one plan in a process of its own."""
    command = [sys.executable, "-m", "flowrun.launcher.cli", "plan", *keys.split()]
    process = subprocess.Popen([*command, "engine.cache=false"], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Planned(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def draw(found: dict[str, dict[int, Planned]], file: Path) -> None:
    """Draw seconds above and megabytes below, against ranks (left) and layers (right)."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot, ticker

    matplotlib.rcParams["svg.hashsalt"] = "flowrun"  # the same bytes for the same figures
    figure, panels = pyplot.subplots(2, 2, figsize=(8, 4.8), sharex="col", sharey="row")
    for column, (what, plans) in enumerate(found.items()):
        numbers = list(plans)
        rows = (
            ("seconds of a core", [each.seconds for each in plans.values()], "tab:blue"),
            ("peak memory, MB", [each.peak_bytes / 1e6 for each in plans.values()], "tab:orange"),
        )
        for panel, (label, values, colour) in zip(panels[:, column], rows, strict=True):
            panel.plot(numbers, values, marker="o", color=colour)
            panel.grid(alpha=0.3)
            if not column:
                panel.set_ylabel(label)
            if what == "ranks":
                panel.set_xscale("log")
            panel.set_xticks(numbers)
            panel.xaxis.set_major_formatter(ticker.FuncFormatter(lambda n, _: f"{n:,.0f}"))
            panel.xaxis.set_minor_locator(ticker.NullLocator())
        panels[0, column].set_title(TITLES[what], fontsize=10)
        panels[1, column].set_xlabel(what)
    for panel in panels[:, 0]:  # behind all lines: both panels of a row share it
        panel.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main()
