"""Writes the tables of auto.md: `python docs/how_to/auto.py`.

It searches a layout for every shipped recipe, with its pins and without, and for a GPT of 4, 24 and
96 blocks.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from flowrun.engine.compile import Compilation
from flowrun.engine.ir.graph import TRAINED
from flowrun.engine.passes.search.search_sbp import LayoutSearch, search_layout
from flowrun.engine.pipeline import advance
from flowrun.engine.strategy import Auto
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load

TABLE = "<!-- tables: python docs/how_to/auto.py -->\n"
RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
SMALLER = {  # too large to be searched here in a minute
    "gpt3_175b": (
        "model.depth=12",
        "placement.stages=8",
        "train.micro_batches=32",
        "train.batch_size=192",
    ),
    "llama3_405b": ("model.depth=8", "placement.stages=2"),
}
GPT = RECIPES[0].with_name("gpt_tp.yaml")


def main() -> None:
    """Search and write the page, again after every line, since all of it takes minutes."""
    page = Path(__file__).with_suffix(".md")
    text = page.read_text().partition(TABLE)[0] + TABLE + "\n"
    for line in rows():
        text += line + "\n"
        page.write_text(text)


def rows() -> Iterator[str]:
    """Yield the lines of all tables."""
    figures = "inferred, searched"
    yield f"| recipe | pinned, ms: {figures} | free, ms: {figures} | search, s |"
    yield "| --- | --- | --- | ---: |"
    for file in RECIPES:
        keys = [f"recipe={file}", *SMALLER.get(file.stem, ())]
        if load(keys).axes:
            yield row_of(file.stem, keys)
    yield ""
    yield "| GPT, tensor 2 | search, s |"
    yield "| --- | ---: |"
    for depth in (4, 24, 96):
        _, seconds = search_of([f"recipe={GPT}", f"model.depth={depth}"], pins=False)
        yield f"| {depth} blocks | {seconds:.1f} |"


def row_of(name: str, keys: Sequence[str]) -> str:
    """Return the line of one recipe."""
    (pinned, seconds), (free, _) = (search_of(keys, pins) for pins in (True, False))
    return f"| `{name}` | {_result(pinned)} | {_result(free)} | {seconds:.1f} |"


def _result(found: LayoutSearch) -> str:
    inferred = f"{found.network.cost(found.inferred)[0] * 1e3:.1f}, " if found.inferred else ""
    gap = f" (gap {found.found.gap:.1%})" if found.found.gap >= 5e-4 else ""
    return f"{inferred}{found.seconds * 1e3:.1f}{gap}"


def search_of(keys: Sequence[str], pins: bool) -> tuple[LayoutSearch, float]:
    """Return what the search finds, and its time in seconds."""
    job = Job(load([*keys, "engine.cache=false"]), values=False)
    strategy = replace(job.strategy, auto=Auto(enabled=True))
    if not pins:
        strategy = replace(strategy, pins=())
    graph = Compilation(job.materials.task, job.materials.example, strategy).captured
    graph = advance(graph, strategy, TRAINED)
    gc.disable()  # as launcher/job/job.py does while a plan is made
    begin = time.process_time()
    found = search_layout(graph, strategy)
    seconds = time.process_time() - begin
    gc.enable()
    return found, seconds


if __name__ == "__main__":
    main()
