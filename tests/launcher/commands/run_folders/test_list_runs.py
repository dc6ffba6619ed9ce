import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flowrun.engine.errors import RecipeError
from flowrun.launcher.cli import app
from flowrun.launcher.commands.run_folders.list_runs import follow_run, show_runs
from flowrun.launcher.commands.run_folders.run_summary import find_runs, find_status, read_keys
from flowrun.launcher.store.checkpoint import lock_run_folder
from flowrun.launcher.supervise.hands.lease import Lease, Owner


def make_run(folder: Path, steps: int = 3, **train: Any) -> Path:
    """A run's folder, as one that was killed leaves it."""
    folder.mkdir(parents=True)
    keys = {"steps": 5, "seed": 0, **train}
    recipe = {"name": folder.name, "train": keys, "launch": {"nnodes": 1}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    add_steps(folder, range(steps))
    return folder


def add_steps(folder: Path, steps: range) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for k in steps:
            file.write(json.dumps({"step": k, "loss": 3.0 - k, "tokens_per_s": 10.0}) + "\n")


@pytest.fixture
def shown() -> Callable[..., str]:
    def run(*folders: str, followed: str | None = None, width: int = 80) -> str:
        out = io.StringIO()
        console = Console(file=out, width=width)
        show_runs([Path(each) for each in folders], Path(followed) if followed else None, console)
        return out.getvalue()

    return run


def test_runs_are_listed_with_how_they_ended(tmp_path: Path, shown: Callable[..., str]) -> None:
    make_run(tmp_path / "outputs" / "a")
    ended = make_run(tmp_path / "outputs" / "day" / "b", steps=5)
    (ended / "report.json").write_text(json.dumps({"ended_by": ""}))
    early = make_run(tmp_path / "runs" / "c", steps=2)
    (early / "report.json").write_text(json.dumps({"ended_by": "EarlyStopping"}))
    stopped = make_run(tmp_path / "runs" / "d")
    (stopped / "ended.json").write_text(json.dumps({"status": "preempted"}))
    make_run(stopped / "host1")  # of the same run
    rows = {line.split()[0]: line for line in shown(width=120).splitlines()}
    assert "died" in rows["outputs/a"] and "3/5" in rows["outputs/a"]
    assert "complete" in rows["outputs/day/b"] and "-1.0000" in rows["outputs/day/b"]
    assert "ended by EarlyStopping" in rows["runs/c"]
    assert "preempted" in rows["runs/d"] and "runs/d/host1" not in rows


def test_a_folder_that_a_process_holds_is_of_a_run_that_goes_on(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    with lock_run_folder(folder, hosts=1):
        assert find_status(folder) == "running"
    assert find_status(folder) == "died"


def test_a_folder_that_several_hosts_write_to_is_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """They lock none; the lease names them, and metrics.jsonl is new."""
    folder = make_run(tmp_path / "a")
    for epoch, status in ((1, "running"), (0, "died")):
        Lease(folder).take(Owner("node0", 1, epoch, ""))
        assert find_status(folder) == status


def test_the_best_of_some_runs_is_marked(tmp_path: Path, shown: Callable[..., str]) -> None:
    for k, name in enumerate("abc"):
        make_run(tmp_path / name, steps=k + 3, seed=k * 7 % 2)
    text = shown("a", "b")
    rows = [line.split() for line in text.splitlines()]
    assert ["train.seed", "0", "1"] in rows and ["last", "loss", "1.0000", "0.0000"] in rows
    assert ["1", "2", "best"] in rows
    assert all(len(line) <= 80 for line in text.splitlines())
    rows = [line.split() for line in shown("a", "b", "c").splitlines()]  # a line each
    assert ["3", "best", "died", "5", "-1.0000"] in rows and ["2", "b", "1"] in rows
    metrics = tmp_path / "c" / "metrics.jsonl"
    metrics.write_text(re.sub('"loss": [-0-9.]+', '"loss": NaN', metrics.read_text()))
    assert ["2", "best", "died", "4", "0.0000"] in map(str.split, shown("c", "b", "a").splitlines())
    assert "last loss" in shown("a")


def test_a_run_is_shown_with_the_folder_of_its_logs(
    tmp_path: Path, shown: Callable[..., str]
) -> None:
    folder = make_run(tmp_path / "a")
    assert "what its ranks printed" not in shown(str(folder))
    (folder / "logs").mkdir()
    assert f"what its ranks printed: {folder}/logs/" in shown(str(folder))


def test_the_steps_of_a_run_are_followed_until_it_ends(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", steps=1)
    out, looks = io.StringIO(), iter((range(1, 3), range(3, 5)))

    def wait(_: float) -> None:
        add_steps(folder, next(looks))
        if "step 2" in out.getvalue():
            (folder / "report.json").write_text(json.dumps({"ended_by": ""}))

    with lock_run_folder(folder, hosts=1):
        assert follow_run(folder, Console(file=out, width=80), wait) == "complete"
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["0", "2", "4"]
    assert lines[-1].endswith(": complete")


def test_what_is_no_run_is_refused(tmp_path: Path, shown: Callable[..., str]) -> None:
    make_run(tmp_path / "a")
    for folders in (("nothing",), ("a", "nothing")):
        with pytest.raises(RecipeError):
            shown(*folders)
    with pytest.raises(RecipeError, match="not a folder of a run"):
        shown(followed="nothing")
    (tmp_path / "empty").mkdir()
    assert "there is no run in empty" in shown("empty")
    assert find_runs([tmp_path / "empty"]) == []


@pytest.mark.parametrize(
    "text",
    ["train: {steps: .inf}", "train: {steps: ten}", "train: {steps: 4}\nlaunch: 7", "train: 7"],
)
def test_a_damaged_recipe_is_no_run(text: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError, match="not a folder of a run"):
        read_keys(folder)


@pytest.mark.parametrize(
    ("file", "content", "status", "code"),
    [
        ("report.json", {"ended_by": ""}, "complete", 0),
        ("report.json", {"ended_by": "EarlyStopping"}, "ended by EarlyStopping", 0),
        ("ended.json", {"status": "preempted"}, "preempted", 1),
        ("other.json", {}, "died", 1),
    ],
)
def test_scripts_read_the_status_of_a_run(
    tmp_path: Path, file: str, content: Any, status: str, code: int
) -> None:
    run = make_run(tmp_path / "a")
    (run / file).write_text(json.dumps(content))
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 3, "loss": NaN}\n')
    ended = CliRunner().invoke(app, ["status", str(run), "--json"])
    said = json.loads(ended.stdout, parse_constant=pytest.fail)
    assert (ended.exit_code, said["status"], said["done"], said["asked"]) == (code, status, 4, 5)
    assert said["loss"] is None and said["version"] == 1
