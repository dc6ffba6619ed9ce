"""Step time of Wide & Deep against the size of its tables: python tests/support/wide_deep_steps.py.

Real processes, the recipe's layout (data 2, tables by rows), median of the steps behind the first
ten; what a step waits for in reading is no part of the compute, so batches are made beforehand.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from flowrun.launcher.recipe import load
from flowrun.launcher.run import run

SIZES = (100_000, 1_000_000, 10_000_000)


def step_ms(ids: int, *overrides: str, steps: int = 60) -> float:
    """Median milliseconds of a step."""
    always = ["recipe=wide_deep", f"model.ids={ids}", f"train.steps={steps}", "train.save=false"]
    with tempfile.TemporaryDirectory() as folder:
        run(load([*always, "eval.batches=0", *overrides]), Path(folder))
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return 1e3 * statistics.median(json.loads(line)["step_s"] for line in lines[10:])


if __name__ == "__main__":
    for ids in SIZES:
        print(f"{ids:>11,} ids  {step_ms(ids, *sys.argv[1:]):8.2f} ms", flush=True)
