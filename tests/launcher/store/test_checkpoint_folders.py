import multiprocessing
import platform
import subprocess
from pathlib import Path

import pytest

from flowrun.engine.ir.files import replace_text
from flowrun.launcher.store.checkpoint import (
    About,
    complete,
    find_all,
    find_best,
    partial_folder,
    prune,
    remove_partial,
)


def save(run: Path, step: int, loss: float | None = None, keep: int = 1, best: str = "") -> None:
    """Complete a checkpoint with the file of one rank."""
    folder = partial_folder(run, step)
    folder.mkdir(parents=True)
    (folder / "rank00000.safetensors").write_bytes(b"abc")
    validation = {} if loss is None else {"loss": loss}
    files = {"rank00000.safetensors": (3, 891568578)}
    about = About(step, 0, 1, {}, validation, files)
    prune(complete(folder, about, "name: x\n"), keep, best, due=0, busy=())


def steps(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in find_all(run)]


@pytest.mark.parametrize(
    ("best", "kept"), [("", [4]), ("loss", [2, 4]), ("-loss", [3, 4]), ("accuracy", [4])]
)
def test_the_best_stays_beside_the_newest(tmp_path: Path, best: str, kept: list[int]) -> None:
    for step, loss in enumerate([3.0, 1.0, 4.0, 2.0], 1):
        save(tmp_path, step, loss, best=best)
    assert steps(tmp_path) == kept
    assert all(not checkpoint.damage() for checkpoint in find_all(tmp_path))


def test_a_checkpoint_without_a_finite_result_is_never_the_best(tmp_path: Path) -> None:
    for step, loss in enumerate([float("nan"), None, 5.0, 6.0], 1):
        save(tmp_path, step, loss, keep=0)
    found = find_best(find_all(tmp_path), "loss")
    assert found is not None
    assert found.step == 3
    (found.folder / "checkpoint.json").write_text("{}")  # and a damaged one neither
    found = find_best(find_all(tmp_path), "loss")
    assert found is not None
    assert found.step == 4


def test_of_equal_ones_the_earliest_is_best(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, 1.0, best="loss")
    assert steps(tmp_path) == [1, 3]


def test_later_ones_go_where_a_run_was_gone_back_on(tmp_path: Path) -> None:
    for step, loss in ((2, 3.0), (4, 1.0), (6, 2.0)):
        save(tmp_path, step, loss, keep=0, best="loss")
    save(tmp_path, 3, 5.0, keep=1, best="loss")
    assert steps(tmp_path) == [2, 3]


def test_files_of_ranks_that_are_no_more_are_left_out(tmp_path: Path) -> None:
    folder = partial_folder(tmp_path, 1)
    folder.mkdir(parents=True)
    (folder / "rank00001.safetensors").touch()
    complete(folder, About(1, 0, 1, {}), "name: x\n")
    (found,) = find_all(tmp_path)
    expected = ["checkpoint.json", "recipe.yaml"]
    assert sorted(file.name for file in found.folder.iterdir()) == expected


def test_what_processes_that_have_ended_left_of_a_text_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    lefts = {pid: tmp_path / f"a.json.{platform.node()}-{pid}-0.partial" for pid in (ended.pid, 1)}
    mine = tmp_path / "mine-7x.partial"
    for file in (*lefts.values(), mine):
        file.touch()
    replace_text(tmp_path / "a.json", "{}")
    remove_partial(tmp_path)
    assert set(tmp_path.iterdir()) == {lefts[1], mine, tmp_path / "a.json"}


def test_two_processes_may_write_one_text(tmp_path: Path) -> None:
    """One that is between its write and its rename does not lose its file to the other."""

    def write() -> None:
        for k in range(200):
            replace_text(tmp_path / "a.json", str(k))

    both = [multiprocessing.get_context("fork").Process(target=write) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
