"""Draws losses in fp32, bf16 and fp16 over the same 200 steps: docs/how_to/precision.svg.

    python docs/how_to/precision.py [steps]

Trains the recipe of precision.md three times (some minutes on two cores).  Needs the extra `plot`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
DTYPES = {"fp32": "black", "bf16": "tab:blue", "fp16": "tab:orange"}
# two stages x tensor 2, all ranks in one process; narrow, so that three runs take minutes
RECIPE = [
    "recipe=gpt_hybrid",
    "launch=virtual",
    "model.width=64",
    "model.depth=2",
    "data.length=64",
    "train.batch_size=16",
    "train.micro_batches=2",
    "eval.batches=0",
    "train.save=false",
]


def losses(dtype: str, steps: int) -> list[float]:
    """Train in one dtype and return the loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"precision.dtype={dtype}", f"train.steps={steps}", f"hydra.run.dir={folder}"]
        command = [sys.executable, "-m", "flowrun.launcher.cli", *RECIPE, *settings]
        subprocess.run(command, check=True)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def draw(curves: dict[str, list[float]], file: Path) -> None:
    """Draw the losses, and below them the differences from fp32."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "flowrun"  # the same bytes at each run
    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for dtype, values in curves.items():
        style = {"color": DTYPES[dtype], "linewidth": 1.0, "label": dtype}
        above.plot(values, **style)
        if dtype != "fp32":
            below.plot([a - b for a, b in zip(values, curves["fp32"], strict=True)], **style)
    above.set_ylabel("loss")
    above.legend()
    below.set_ylabel("loss - loss in fp32")
    below.set_xlabel("step")
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Train, draw, and print the largest differences of the curves."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    curves = {dtype: losses(dtype, steps) for dtype in DTYPES}
    draw(curves, HERE / "precision.svg")
    for dtype, values in curves.items():
        apart = max(abs(a - b) for a, b in zip(values, curves["fp32"], strict=True))
        print(f"{dtype}: {values[0]:.4f} -> {values[-1]:.4f}, at most {apart:.4f} from fp32")


if __name__ == "__main__":
    main()
