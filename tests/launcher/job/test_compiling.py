import re
from pathlib import Path

import pytest

from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import plan
from support.runs.command import Command, losses, run_folder, workplace

MLP = ["recipe=mlp_data_parallel"]


def test_a_plan_says_how_many_programs_inductor_gets() -> None:
    found = re.search(
        r"inductor builds (\d+) regions, (\d+) different",
        str(plan(load([*MLP, "engine.compiler=inductor"]))),
    )
    assert found and int(found[1]) > int(found[2]) > 0
    assert "builds" not in str(plan(load(MLP)))


@pytest.mark.processes
def test_forked_ranks_run_what_the_launcher_compiled(tmp_path: Path) -> None:
    place = workplace(tmp_path)
    eager = Command(place, "recipe=small", run_folder(place / "eager")).end()
    told = Command(
        place, "recipe=small", "engine.compiler=inductor", run_folder(place / "compiled")
    ).end(240)
    assert (eager.status, told.status, told.err) == (0, 0, "")
    assert "built in" in told.out  # how many are new, the host's cache decides
    assert losses(place / "compiled") == pytest.approx(losses(place / "eager"), rel=1e-5)
