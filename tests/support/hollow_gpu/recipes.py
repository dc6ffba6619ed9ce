"""Train the shipped recipes for 3 steps on the stand-in, beside the same plan on a virtual cluster.

python tests/support/hollow_gpu/run.py --gpus 8 --lazy 1 --room 1 --mib 4000 \
    --communicator-mib 300 python tests/support/hollow_gpu/recipes.py [WORD ...]

Recipes are as small as tests have them (small_recipes.py), and planned for an H100.  WORD: of their
names; none: all that fit.  Those with more ranks than GPUs are named and left out.  The exit status
is the number of recipes that fail.
"""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import flowrun
from flowrun.engine.errors import FlowrunError
from flowrun.launcher.recipe.compose import load
from support.plans.small_recipes import RECIPES, overrides_of
from support.runs.command import losses

WORDS = (
    *("train.steps=3", "train.save=false", "log=[]"),
    *("eval.batches=0", "engine.check_capture=false", "hardware=h100"),
)
WITHIN = 1e-4  # of a loss


def try_recipe(recipe: Path, folder: Path) -> str:
    """Return what a person reads of a recipe; "same" or "left out" begins it if all is well."""
    words = [*overrides_of(recipe), *WORDS]
    if (ranks := load([f"recipe={recipe}", *words]).num_ranks) > int(os.environ["HOLLOW_GPUS"]):
        return f"left out: {ranks} ranks"
    try:
        for name, how in (("gpu", "launch.device=cuda"), ("cpu", "launch=virtual")):
            flowrun.run(recipe, [*words, how], folder=folder / name)
    except FlowrunError as error:
        return f"fails: {error}"
    found, expected = losses(folder / "gpu"), losses(folder / "cpu")
    apart = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
    return f"{'same' if apart <= WITHIN else 'differs'}: {found}, {apart:.1e} apart, {ranks} ranks"


def main(words: list[str]) -> int:
    failed = 0
    for recipe in RECIPES:
        if not words or any(word in recipe.stem for word in words):
            with tempfile.TemporaryDirectory() as folder:
                said = try_recipe(recipe, Path(folder))
            print(f"{recipe.stem:24} {said}", flush=True)
            failed += not said.startswith(("same", "left out"))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
