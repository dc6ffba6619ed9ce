"""Plans as text, reviewed like code: tests/behaviour/golden/*.txt.

FLOWRUN_REGENERATE=1 writes them anew; then read what `git diff` shows.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowrun.engine.actors.plan import Plan
from support.layouts.grids import Layout, compiled
from support.layouts.plain_loop import Training, gpt, mlp

GOLDEN = Path(__file__).resolve().parent / "golden"
TESTS = Path(__file__).resolve().parents[1]

# Tiny recipes: gpt_hybrid's layout with one block a stage, and the seed programs' MLP.
PLANS: dict[str, tuple[Training, Layout]] = {
    "gpt_hybrid": (gpt(blocks=2, width=16, micro_batches=4), Layout(tensor=2, stages=2)),
    "mlp_data": (mlp(micro_batches=2), Layout(data=2)),
    "mlp_zero3": (mlp(micro_batches=2), Layout(data=2, zero=3)),
}


def text_of(plan: Plan) -> str:
    """The plan, and the order of collectives in each group."""
    lines = [str(plan).rstrip(), "order of collectives in a step (actor.act):"]
    for (stage, axis), acts in plan.order:
        told = " ".join(f"{actor}.{act}" for actor, act in acts)
        lines.append(f"  stage {stage}, {plan.axes[axis]}: {told}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", list(PLANS))
def test_the_plan_is_the_golden_one(name: str) -> None:
    found = text_of(compiled(*PLANS[name]).plan)
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("FLOWRUN_REGENERATE"):
        file.write_text(found)
    assert found.splitlines() == file.read_text().splitlines()


def test_a_plan_does_not_depend_on_the_process_that_compiles_it() -> None:
    """Every host of a run compiles by itself; hashes of strings differ from process to process."""
    program = (
        "from test_golden_plans import PLANS, compiled, text_of\n"
        "print(text_of(compiled(*PLANS['gpt_hybrid']).plan), end='')"
    )
    path = os.pathsep.join([str(TESTS), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "17"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == text_of(compiled(*PLANS["gpt_hybrid"]).plan)
