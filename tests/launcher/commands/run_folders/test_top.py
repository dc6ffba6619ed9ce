"""flowrun top: what it shows of a run's folder."""

import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.run_folders.top import Curve, RunReader, choose_run, show_top
from flowrun.launcher.store.checkpoint import lock_run_folder


def make_run(folder: Path, steps: range) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = {"name": "tiny", "train": {"steps": 8}, "launch": {"nnodes": 1}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    with (folder / "metrics.jsonl").open("a") as file:
        for k in steps:
            line = {"step": k, "loss": 3.0 - k if k else None, "step_s": 0.5, "memory_bytes": 2e6}
            file.write(json.dumps(line) + "\n")
    return folder


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=2000), st.integers(1, 80))
def test_a_curve_keeps_means_of_all_values_in_little_memory(values: list[float], bars: int) -> None:
    curve = Curve()
    for value in values:
        curve.add(value)
    assert len(curve.points) < 256
    assert (curve.last, curve.lowest) == (values[-1], min(values))
    assert sum(curve.points) * curve.width == pytest.approx(
        math.fsum(values[: len(curve.points) * curve.width]), rel=1e-6, abs=1e-3
    )
    assert len(curve.draw(bars)) == min(bars, len(curve.points))


def test_a_curve_goes_from_its_lowest_to_its_highest_bar() -> None:
    curve = Curve()
    for value in (0.0, math.nan, 7.0, 3.0):
        curve.add(value)
    assert curve.draw(10) == "▁█▄"


def test_a_reader_takes_whole_new_lines_and_all_where_ranks_went_back(tmp_path: Path) -> None:
    reader = RunReader(make_run(tmp_path, range(3)))
    metrics = tmp_path / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 3, "loss": -')
        file.flush()
        reader.read()
        assert reader.curves["loss"].points == [2.0, 1.0]
        file.write('1.0}\n{"step": 3, "validation": {"accuracy": 0.5}}\n')
    reader.read()
    assert reader.curves["loss"].points == [2.0, 1.0, -1.0]
    assert reader.curves["validation/accuracy"].last == 0.5
    again = tmp_path / "again"
    again.write_text('{"step": 0, "loss": 9.0}\n')
    again.replace(metrics)
    reader.read()
    assert reader.curves["loss"].points == [9.0]


def test_a_run_is_shown_until_it_ends(tmp_path: Path) -> None:
    make_run(tmp_path, range(2))
    (tmp_path / "restarts.jsonl").write_text("{}\n{}\n")
    out = io.StringIO()
    looks = []
    with lock_run_folder(tmp_path, 1):

        def sleep(_: float) -> None:
            looks.append(out.getvalue())
            make_run(tmp_path, range(2, 8))
            (tmp_path / "report.json").write_text(json.dumps({"ended_by": ""}))

        show_top(tmp_path, Console(file=out, width=80, force_terminal=True), sleep)
    assert "step 2 of 8 (25%)" in looks[0]
    assert "started again 2 x" in looks[0]
    assert "3 s left" in looks[0]
    assert "not finite" not in out.getvalue().rpartition("complete")[2]
    assert "step 8 of 8 (100%)" in out.getvalue()


def test_off_a_terminal_a_run_is_shown_once(tmp_path: Path) -> None:
    out = io.StringIO()
    with lock_run_folder(make_run(tmp_path, range(1)), 1):
        show_top(tmp_path, Console(file=out, width=80), sleep=pytest.fail)
    assert "not finite" in out.getvalue()


def test_without_a_folder_the_newest_run_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="there is no run here"):
        choose_run(None)
    make_run(Path("outputs/day/a"), range(1))
    assert choose_run(None) == Path("outputs/day/a")
    with pytest.raises(RecipeError, match="not a folder of a run"):
        choose_run(tmp_path)
