import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from flowrun.launcher.bench.bench import FILE
from flowrun.launcher.bench.foreseen import foresee as story
from flowrun.launcher.bench.foreseen.foresee import foresee
from flowrun.launcher.bench.foreseen.published import Foreseen, parse
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.recipe import Recipe


def suite() -> Foreseen:
    table = {
        "title": "A perceptron",
        "source": "nobody",
        "recipe": "mlp_hybrid",
        "overrides": ["engine.cache=false"],
        "columns": ["samples_per_s", "train.batch_size", "sbp.hidden.weight.data"],
        "rows": {
            "64": [1e4, 64, None],
            "128": [2e4, 128, None],
            "1024": [1e5, 1024, None],
            "wrong": [1.0, 64, "S5"],
        },
    }
    bounds = {"rank_at_least": 0.9, "error_at_most": 0.15}
    return parse({"name": "mine", "note": "", "tables": {"mlp": table}, **bounds})


def test_a_table_is_planned_shown_and_written(tmp_path: Path) -> None:
    screen = io.StringIO()
    lines = foresee(suite(), tmp_path, Console(file=screen, width=120))
    assert [line.row for line in lines] == ["mlp/64", "mlp/128", "mlp/1024", "mlp/wrong"]
    assert lines[3].foreseen is None and lines[3].problem
    text = screen.getvalue()
    assert "A perceptron" in text and "not planned" in text
    assert "samples/s, 3 rows: rank correlation 1.000 (>= 0.90 yes)" in text
    written = json.loads((tmp_path / FILE).read_text())
    assert written["lines"][0]["foreseen"] == lines[0].foreseen
    assert written["scores"][0]["rank"] == pytest.approx(1.0)


def test_a_row_too_large_for_this_machine_is_a_line_with_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(recipe: Recipe) -> Job:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 419430400000 bytes.\nMore.")

    monkeypatch.setattr(story, "job_to_plan", refused)
    lines = foresee(suite(), tmp_path, Console(file=io.StringIO()))
    assert all(line.foreseen is None for line in lines)
    assert "can't allocate memory: 419430400000 bytes." in {line.problem for line in lines}.pop()

    def broken(recipe: Recipe) -> Job:
        raise RuntimeError("a defect")

    monkeypatch.setattr(story, "job_to_plan", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        foresee(suite(), tmp_path, Console(file=io.StringIO()))
