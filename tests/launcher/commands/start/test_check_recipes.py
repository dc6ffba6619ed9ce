"""flowrun check: recipes whose keys are right, and wrong, without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from flowrun.launcher.commands.start.check_recipes import check_recipes


def test_all_shipped_recipes_are_right_without_torch() -> None:
    program = (
        "import sys\n"
        "from flowrun.launcher.commands.start.check_recipes import check_recipes\n"
        "found = check_recipes([])\n"
        "print(len(found.recipes), found.right, {'torch', 'numpy'} & {*sys.modules})\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
    number, *rest = shown.split()
    assert int(number) > 25
    assert rest == ["True", "set()"]


@pytest.mark.parametrize(
    ("words", "place", "said"),
    [
        (["gpt_dp", "train.batch_size=7"], "gpt_dp.yaml:5:16", "7 samples cannot be divided"),
        (["recipe=gpt_dp", "optm.lr=1"], "command line  optm", "Did you mean 'optim'?"),
        (["gpt_dp", "optim.lr=-1"], "command line", "lr is over 0"),
        (["nowhere"], "command line  recipe = nowhere", "there is no recipe"),
    ],
    ids=["samples", "key", "range", "name"],
)
def test_what_is_wrong_is_said_with_its_place(words: list[str], place: str, said: str) -> None:
    found = check_recipes(words)
    assert not found.right
    assert place in str(found)
    assert said in str(found)


def test_a_broken_file_does_not_hide_another(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: {_target_: [\n")
    found = check_recipes([str(broken), "gpt_dp"])
    assert [bool(each.problem) for each in found.recipes] == [True, False]
    assert "broken.yaml:2:1" in found.recipes[0].problem


def test_samples_that_the_recipe_pins_or_a_search_places_are_not_divided_here() -> None:
    assert check_recipes(["gpt_dp", "train.batch_size=7", "auto.placement=true"]).right
    pinned = check_recipes(["gpt_dp", "train.batch_size=7", "+sbp.batch.tokens.data=B"])
    assert "divided" not in str(pinned)
