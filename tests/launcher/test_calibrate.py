"""Measuring this machine, in processes; and the profile that a recipe takes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from flowrun.engine.runtime.calibration import Sizes
from flowrun.launcher import calibrate
from flowrun.launcher.profile import shipped
from flowrun.launcher.recipe import load

SMALL = Sizes(
    products=((16, 16, 16), (64, 64, 64)),
    dtypes=("fp32",),
    stream_bytes=1 << 14,
    moved_bytes=(1 << 8, 1 << 22),
    trials=3,
    pace_s=0.0,
)


@pytest.mark.processes
def test_a_profile_is_measured_written_and_taken_by_a_recipe(tmp_path: Path) -> None:
    base = shipped("cpu")
    found = calibrate.calibrate(base, "mine", SMALL, (2,))
    file = tmp_path / "hardware" / "mine.yaml"
    calibrate.write(found.hardware, file)
    taken = load(["recipe=gpt_dp", "hardware=mine"], str(tmp_path)).hardware
    assert taken == found.hardware
    assert taken.fp32.flop == (2 * 16.0**3, 2 * 64.0**3)
    assert taken.fp16 == base.fp16  # not measured
    assert taken.levels[-1].shared_memory is False

    console = Console(file=io.StringIO(), width=120)
    calibrate.show(found, base, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "message"):
        assert f"gloo, {kind}" in text
