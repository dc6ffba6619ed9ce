from pathlib import Path

import pytest

from flowrun.launcher.recipe.locate import FilePosition, locate

RECIPE = """\
# Mine.
defaults: [/model: gpt_tiny, /data: text]
train: {steps: 3}
sbp:
  blocks.*.attn.qkv.weight: {tensor: S(0)}
  blocks.*.attn: {out: {tensor: B}}
placement:
  stages:
    - {modules: [embed, "blocks.[0-1]"]}
    - {modules: [head]}
"""


@pytest.fixture
def recipe(workplace: Path) -> str:
    (workplace / "mine.yaml").write_text(RECIPE)
    return "recipe=mine.yaml"


# key -> (line, column, key, value)
PLACES = {
    "train.steps": (3, 16, "train.steps", "3"),
    "sbp.blocks.*.attn.qkv.weight.tensor": (5, 38, "sbp.blocks.*.attn.qkv.weight.tensor", '"S(0)"'),
    "sbp.blocks.*.attn.out.tensor": (6, 33, "sbp.blocks.*.attn.out.tensor", '"B"'),
    "placement.stages.1.modules": (10, 17, "placement.stages.1.modules", "[head]"),
    "train.seed": (3, 1, "train", None),
    "zero.axis": (0, 0, "", None),
    "data": (2, 37, "data", '"text"'),
}


@pytest.mark.parametrize("key", PLACES)
def test_a_key_in_the_recipe(recipe: str, key: str) -> None:
    assert locate(key, [recipe]) == FilePosition("mine.yaml", *PLACES[key])


@pytest.mark.parametrize(
    ("key", "arguments", "shown"),
    [
        (
            "train",
            ["train.steps=7", "train.seed=1"],
            "mine.yaml:3:8, command line train.steps=7 train.seed=1",
        ),
        ("data", ["data.path=nope.bin"], "mine.yaml:2:37, command line data.path=nope.bin"),
        ("data", ["data=text", "data.path=nope.bin"], "command line data.path=nope.bin"),
    ],
)
def test_what_the_command_line_changes_inside_of_a_mapping_is_shown(
    recipe: str, key: str, arguments: list[str], shown: str
) -> None:
    place = locate(key, [recipe, *arguments])
    assert str(place).startswith(shown)
    if key == "train":
        assert place is not None and place.value == "{steps: 7, seed: 1}"
