import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flowrun.engine.errors import RecipeError
from flowrun.engine.runtime.calibration.calibration import ProbeSizes
from flowrun.launcher.commands import calibrate
from flowrun.launcher.commands.calibrate import show_ops, with_ops
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.hardware_keys import load_shipped, of_file

SMALL = ProbeSizes(
    products=((16, 16, 16), (64, 64, 64)),
    dtypes=("fp32",),
    stream_bytes=1 << 14,
    moved_bytes=(1 << 10, 1 << 22),
    trials=3,
    pace_s=0.0,
    pace_rounds=1,
)


@pytest.mark.processes
def test_a_profile_is_measured_written_and_taken_by_a_recipe(tmp_path: Path) -> None:
    base = load_shipped("cpu")
    found = calibrate.calibrate(base, "mine", SMALL, (2,))
    file = tmp_path / "hardware" / "mine.yaml"
    calibrate.write(found.hardware, file)
    taken = load(["recipe=gpt_dp", "hardware=mine"], str(tmp_path)).hardware
    assert taken == found.hardware
    assert taken.fp32.flop == (2 * 16.0**3, 2 * 64.0**3)
    assert taken.fp16 == base.fp16  # not measured
    assert taken.levels[-1].shared_memory is False
    assert [list(level.exchange_bytes) for level in taken.levels] == [[], [2]]
    assert taken.levels[-1].exchange_bytes[2] in (0, *SMALL.moved_bytes)

    console = Console(file=io.StringIO(), width=120)
    calibrate.show(found, base, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "message"):
        assert f"gloo, {kind}" in text
    assert "gloo, exchange" in text
    assert "shared memory, exchange" not in text
    assert "gloo, all-reduces of 2 exchanged up to, kB" in text
    assert text.count("not used") >= 2  # of the two ways, the other


@pytest.mark.processes
def test_the_ops_of_a_recipe_are_added_to_a_profile(tmp_path: Path) -> None:
    given = ["recipe=gpt_dp", "model.depth=1", "data.max_bytes=100000", "eval.batches=0"]
    recipe = load([*given, "launch=virtual", "engine.cache=false"])
    before = {"aten.mm.default": {"fp32 1x1 1x1 1x1": 3.0}}
    found = with_ops(replace(load_shipped("cpu"), ops=before), [recipe], steps=1)
    assert found.ops["aten.mm.default"]["fp32 1x1 1x1 1x1"] == 3.0
    assert len(found.ops["aten.mm.default"]) > 1

    file = tmp_path / "hardware" / "mine.yaml"
    calibrate.write(found, file)
    assert of_file(file) == found
    assert load(["recipe=gpt_dp", "hardware=mine"], str(tmp_path)).hardware == found
    console = Console(file=io.StringIO(), width=120)
    show_ops(found, console)
    assert "aten.gelu.default" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("ops", "problem"),
    [
        ("{aten.mm.default: {fp32 2y2: 1.5}}", "cannot be read as shapes"),
        ("{aten.mm.default: {fp32 2x2: 0.0}}", "over 0"),
    ],
)
def test_ops_that_cannot_be_are_refused_at_their_key(ops: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem) as error:
        load(["recipe=gpt_dp", f"+hardware.ops={ops}"])
    assert error.value.where.startswith("hardware.ops.aten.mm.default")
