"""Plans and losses of the shipped recipes, in small, as digests: a change of structure leaves them.

    python tests/support/pinned_plans.py                 compare with pinned_plans.json
    python tests/support/pinned_plans.py --write         pin what there is now
    python tests/support/pinned_plans.py --texts FOLDER  write the plans out, for `diff -r`

A plan is the same on every machine with the same torch.  Losses are those of this machine, to the
last bit: another processor adds in another order, and so they are compared by this command alone,
on the machine that wrote them.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flowrun.engine.runtime.process.cpu_share import PROBE
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from support.plans.small_recipes import RECIPES, overrides_of, small_job

PINNED = Path(__file__).with_suffix(".json")
STEPS = ("train.steps=3", "train.save=false", "eval.batches=0", "launch=virtual")
TORCH = ".".join(torch.__version__.split(".")[:2])  # another one may capture other ops
PLANNED_ONLY = ("gpt3_175b", "llama3_405b")  # too wide for one process, even in small


def texts(job: Job) -> dict[str, str]:
    """The plans of a job, by kind."""
    plans = dict(zip(("training", "evaluation"), job.plans.compiled, strict=True))
    return {kind: str(made.plan) for kind, made in plans.items() if made}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def losses(recipe: Path) -> list[str]:
    """Of three steps, each as a float's own bits."""
    with tempfile.TemporaryDirectory() as folder:
        run(load([f"recipe={recipe}", *overrides_of(recipe), *STEPS]), Path(folder))
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [float(json.loads(line)["loss"]).hex() for line in lines]


def found(recipe: Path) -> dict[str, Any]:
    """What there is to pin of a recipe."""
    plans = {kind: digest(text) for kind, text in texts(small_job(recipe)).items()}
    return {**plans, "losses": [] if recipe.stem in PLANNED_ONLY else losses(recipe)}


def main() -> int:
    """Return how many recipes differ from what is pinned."""
    os.environ[PROBE] = "0"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--texts", type=Path)
    asked = parser.parse_args()
    pinned = json.loads(PINNED.read_text()) if PINNED.exists() else {}
    differ = 0
    for recipe in RECIPES:
        if asked.texts:
            for kind, text in texts(small_job(recipe)).items():
                asked.texts.mkdir(parents=True, exist_ok=True)
                (asked.texts / f"{recipe.stem}.{kind}.txt").write_text(f"{text}\n")
            continue
        now, before = found(recipe), pinned.get(recipe.stem, {})
        unlike = [key for key in now if now[key] != before.get(key)]
        differ += bool(unlike)
        print(recipe.stem, "unlike: " + ", ".join(unlike) if unlike else "same", flush=True)
        pinned[recipe.stem] = now
    if asked.write:
        PINNED.write_text(json.dumps({**pinned, "torch": TORCH}, indent=1) + "\n")
    return 0 if asked.write else differ


if __name__ == "__main__":
    sys.exit(main())
