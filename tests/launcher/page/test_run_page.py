"""Runs and sweeps as JSON, by their folders alone."""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.page import page_data, run_view
from flowrun.launcher.page.make_page import make_page
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.report.sweep_table import TABLE
from flowrun.launcher.run import run
from flowrun.launcher.terminal.as_json import to_json

SCHEMA = json.loads(Path(page_data.__file__).with_name("page.schema.json").read_text())
KILLED = {
    "restart": 1,
    "where": "rank 1",
    "problem": "it was killed.\nmore",
    "reached": 3,
    "first": 2,
    "source": "checkpoint",
}


def made(*folders: Path) -> Any:
    page = json.loads(to_json(make_page([*map(str, folders)], None)))
    jsonschema.validate(page, SCHEMA)
    return page


def written(folder: Path, *lines: str, **keys: object) -> Path:
    """The folder of a run that wrote these lines of metrics.jsonl, and has not ended."""
    folder.mkdir()
    train = {"steps": 100, **keys}
    (folder / "recipe.yaml").write_text(f"name: mine\ntrain: {json.dumps(train)}\n")
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def curves(page: Any, k: int = 0) -> dict[str, tuple[list[int], list[float | None]]]:
    return {c["tag"]: (c["steps"], c["values"]) for c in page["runs"][k]["curves"]}


def test_a_run_shows_what_its_folder_says(place: Path) -> None:
    keys = ("train.steps=4", "eval.every=2", "eval.fraction=0.2", "engine.trace=2")
    report = run(load(["recipe=small", "launch=virtual", *keys]), place / "out")
    page = made(place / "out")
    (shown,) = page["runs"]
    assert page["plan"] is None and shown["status"] == "complete" and shown["keys"]["train.steps"]
    found = curves(page)
    assert found["loss"][0] == [0, 1, 2, 3] and found["loss"][1][-1] == report.last_loss
    assert found["validation/loss"][0] == [1, 3]
    assert found["elapsed_s"][1] == [*accumulate(found["step_s"][1])]
    assert found["foreseen/step_s"][1] == [report.foreseen["step_s"]] * 2
    figures = {figure["name"]: figure for figure in shown["figures"]}
    assert figures["steps"]["measured"] == "4 of 4" and figures["step time"]["foreseen"]
    assert {"torch", "flowrun", "host"} <= (found := shown["environment"].keys())
    assert "commit" not in found  # outside of a repository
    drawing = shown["drawing"]
    assert [foreseen for _, foreseen in drawing["lanes"]] == [True, False, False]
    acts = [drawing["lane"].count(lane) for lane in range(3)]
    assert acts[0] == acts[1] == acts[2] and any(why >= 0 for why in drawing["why"])


def test_a_restart_stands_at_its_step(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", '{"step": 0, "loss": 1.0, "step_s": 0.5}')
    (folder / "restarts.jsonl").write_text(json.dumps(KILLED) + "\n")
    ((step, text),) = made(folder)["runs"][0]["restarts"]
    assert step == 3
    assert text == (
        "step 3, rank 1: it was killed. Ranks began again at step 2 from the checkpoint."
    )


def test_a_line_that_is_cut_off_and_a_loss_that_is_no_number_leave_the_rest(tmp_path: Path) -> None:
    lines = (
        '{"step": 0, "loss": null, "grad_norm": 2}',
        '{"step": 1, "loss": 3}',
        '{"step": 2, "lo',
    )
    page = made(written(tmp_path / "a", *lines))
    assert curves(page) == {"loss": ([0, 1], [None, 3]), "grad_norm": ([0], [2])}
    assert page["runs"][0]["drawing"] is None and page["runs"][0]["environment"] == {}


def test_a_long_curve_keeps_its_peaks(tmp_path: Path) -> None:
    values = [1.0] * 50_000
    values[31_234], values[40_001] = 9.0, -9.0
    lines = (json.dumps({"step": k, "loss": value}) for k, value in enumerate(values))
    steps, kept = curves(made(written(tmp_path / "a", *lines)))["loss"]
    assert len(kept) <= run_view.MOST_POINTS and {9.0, -9.0} <= {*kept}
    assert steps[kept.index(9.0)] == 31_234 and steps == sorted(steps)


def test_a_damaged_trace_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    (folder / "trace.json").write_text('{"traceEvents": [')
    with pytest.raises(RecipeError, match=r"trace.json\n.*damaged"):
        made(folder)


def test_texts_are_shown_as_they_were_written(tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    text = {"step": 5, "prompt": "def ", "text": "f(): </script>"}
    (folder / "samples.jsonl").write_text(json.dumps(text) + "\n")
    assert made(folder)["runs"][0]["samples"] == [[5, "def ", "f(): </script>"]]


COLUMNS = "job,optim.lr,status,reason,loss,tokens_per_s,validation_accuracy"
ROWS = ("0,0.1,ran,,2.5,100,0.5", "1,0.3,ran,,1.5,90,0.9", "2,9,failed,loss: nan,nan,,")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / TABLE).write_text("\n".join((COLUMNS, *ROWS)) + "\n")
    for job in range(2):
        written(folder / str(job), '{"step": 0, "loss": 1.0}')
    return folder


def test_a_sweep_has_its_table_its_best_row_and_the_runs_of_its_jobs(sweep: Path) -> None:
    page = made(sweep)
    table = page["sweep"]
    assert table["keys"] == ["optim.lr"] and table["objective"] == "loss" and table["best"] == 1
    assert table["rows"][2]["loss"] is None and table["rows"][2]["reason"] == "loss: nan"
    assert [Path(each["folder"]).name for each in page["runs"]] == ["0", "1"]
    assert page["title"] == "mine: a sweep of 3 jobs"


def test_what_the_sweeper_looked_for_decides_which_row_is_best(sweep: Path) -> None:
    asked = "sweep: {objective: tokens_per_s}\nhydra: {sweeper: {direction: maximize}}\n"
    (sweep / "multirun.yaml").write_text(asked)
    table = made(sweep)["sweep"]
    assert (table["objective"], table["highest"], table["best"]) == ("tokens_per_s", True, 0)


def test_what_goes_on_no_page_is_refused(tmp_path: Path, sweep: Path) -> None:
    folder = written(tmp_path / "a")
    for given, why in (
        ([str(folder), "train.steps=3"], "do not go with folders"),
        ([str(sweep), str(folder)], "one sweep alone"),
        ([str(tmp_path / "nowhere")], "not a folder of a run"),
    ):
        with pytest.raises(RecipeError, match=why):
            make_page(given, None)
