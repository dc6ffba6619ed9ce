import pytest

from flowrun.engine.ir.module_path import block_of, unit_of, within


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("blocks.3.attn.qkv", "blocks.3"),
        ("blocks.3.mlp.0", "blocks.3"),
        ("groups.3.2.reduce.conv", "groups.3.2"),
        ("embed.wte", "embed"),
        ("head", "head"),
    ],
)
def test_a_block_is_the_path_up_to_its_first_numbers(path: str, unit: str) -> None:
    assert unit_of(path) == unit


@pytest.mark.parametrize(
    ("path", "blocks", "number"),
    [
        ("body.layers.12.fc", "body.layers", 12),
        ("body.layers.3", "body.layers", 3),
        ("body.layers", "body.layers", None),
        ("body.layers2.3", "body.layers", None),
        ("first", "body.layers", None),
        ("3.fc", "", 3),
        ("first.3", "", None),
    ],
)
def test_a_module_lies_in_one_block_of_a_list(path: str, blocks: str, number: int | None) -> None:
    assert block_of(path, blocks) == number


def test_a_module_is_within_all_that_hold_it_and_itself() -> None:
    assert within("blocks.3.attn") == ["blocks", "blocks.3", "blocks.3.attn"]
