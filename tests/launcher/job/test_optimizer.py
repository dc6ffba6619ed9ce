from pathlib import Path

import pytest

from flowrun.launcher.job.optimizer import FUSED, TRACED, optimizer_of
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.schema import CHOICES

GROUP = Path(__file__).resolve().parents[3] / "conf" / "optim"


def test_every_optimizer_has_a_word_and_a_file_of_numbers() -> None:
    assert {*FUSED, *TRACED} == {*CHOICES["optim.name"]} == {file.stem for file in GROUP.iterdir()}


@pytest.mark.parametrize("name", CHOICES["optim.name"])
def test_a_file_of_numbers_gives_all_that_the_update_reads(name: str) -> None:
    made = optimizer_of(load(["model=mlp", "data=digits", f"optim={name}"]).optim, steps=1)
    assert made.name == name and len(made.arguments) > 1
