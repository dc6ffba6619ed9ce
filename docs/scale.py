"""Seconds of planning against ranks and layers: `python docs/scale.py` makes scale.svg, and the
table at the end of scale.md.

GPT-3 (recipes/gpt3_175b.yaml), made smaller; each plan in a process of its own, none kept.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

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
TABLE = "<!-- table: python docs/scale.py -->\n"


def main() -> None:
    """Measure, draw, write."""
    page = Path(__file__).with_suffix(".md")
    text = page.read_text().partition(TABLE)[0]
    lines = ["", "| | seconds | peak memory |", "| --- | ---: | ---: |"]
    found: dict[str, dict[int, float]] = {"ranks": {}, "layers": {}}
    for what, plans in (("ranks", RANKS), ("layers", LAYERS)):
        for number, keys in plans.items():
            seconds, peak = planned(keys)
            found[what][number] = seconds
            lines.append(f"| {number:,} {what} | {seconds:.0f} | {peak / 1e9:.1f} GB |")
    page.write_text(text + TABLE + "\n".join(lines) + "\n")
    draw(found, page.with_suffix(".svg"))


def planned(keys: str) -> tuple[float, int]:
    """Seconds of the whole command; peak bytes of the largest so far."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "flowrun.launcher.cli", "plan", *keys.split()]
    subprocess.run([*command, "engine.cache=false"], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - begin
    return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def draw(found: dict[str, dict[int, float]], file: Path) -> None:
    """Two panels side by side."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(8, 3), sharey=False)
    for panel, (what, values) in zip(panels, found.items(), strict=True):
        panel.plot(list(values), list(values.values()), marker="o")
        panel.set(xlabel=what, ylabel="seconds of flowrun plan", ylim=(0, None))
        panel.set_xscale("log" if what == "ranks" else "linear")
    figure.tight_layout()
    figure.savefig(file)


if __name__ == "__main__":
    main()
