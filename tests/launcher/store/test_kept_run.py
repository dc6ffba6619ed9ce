import itertools
import os
import shutil
import sys
import threading
import zlib
from pathlib import Path

import pytest

from flowrun.engine.errors import RecipeError, RunError
from flowrun.engine.ir.files import replace_text
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.store.checkpoint import (
    About,
    Checkpoint,
    complete,
    find_all,
    partial_folder,
    prune,
)
from flowrun.launcher.store.fetched_run import continue_at, fetch_figures, fetch_run
from flowrun.launcher.store.kept_run import KeptRun, open_store, whole_checkpoints
from flowrun.launcher.urls import object_store
from flowrun.launcher.urls.object_store import ObjectStore, StoreError
from support.checks.thorough import few
from support.runs.store_server import access, faulty_proxy, s3_server

RECIPE = "name: x\ntrain: {steps: 9, keep_best: loss}\n"


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(object_store, "_WAITS_S", (0.0,))
    return f"memory://{tmp_path}/store"


def save(run: Path, step: int, keep: int = 2, loss: float = 1.0, ranks: int = 2) -> Checkpoint:
    """Complete a checkpoint whose files say its step."""
    folder, files = partial_folder(run, step), {}
    folder.mkdir(parents=True)
    for rank in range(ranks):
        content = f"rank {rank} step {step} loss {loss}".encode()
        (folder / f"rank0000{rank}.safetensors").write_bytes(content)
        files[f"rank0000{rank}.safetensors"] = (len(content), zlib.crc32(content))
    replace_text(run / "recipe.yaml", RECIPE)
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write(f'{{"step": {step - 1}}}\n')
    done = complete(folder, About(step, 0, 1, {}, {"loss": loss}, files), RECIPE)
    prune(done, keep, "loss", due=0, busy=())
    return done


def keep(url: str, run: Path, resumed: bool) -> KeptRun:
    kept = open_store(url, run, resumed)
    assert kept
    kept.claim()
    return kept


def names(url: str) -> set[str]:
    return {*ObjectStore.open(url, "x").find()} - {".writer"}


def whole(folder: Path) -> list[int]:
    return [kept.step for kept in find_all(folder) if not kept.damage()]


def test_the_store_has_what_the_folder_has(tmp_path: Path, url: str) -> None:
    kept = keep(url, tmp_path / "run", False)
    for step in (1, 2, 3):
        save(tmp_path / "run", step)
        kept.put_all()
    (tmp_path / "run" / ".token").write_text("secret")
    (tmp_path / "run" / "report.json").write_text("{}")
    kept.put_all()
    files = ("checkpoint.json", "rank00000.safetensors", "rank00001.safetensors", "recipe.yaml")
    steps = ("step_00000001", "step_00000002", "step_00000003")  # the first is the best
    expected = {f"checkpoints/{step}/{file}" for step, file in itertools.product(steps, files)}
    assert names(url) == expected | {"recipe.yaml", "metrics.jsonl", "report.json"}


def test_files_that_the_run_has_removed_go(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    kept = keep(url, run, False)
    save(run, 1)
    for name in ("report.json", "weights.rank00000.safetensors"):
        (run / name).write_text("{}")
    kept.put_all()
    ObjectStore.open(url, "x").write("notes.txt", b"a user's")
    before = names(url)
    (run / "weights.rank00000.safetensors").unlink()
    kept.put_all()
    assert before - names(url) == {"weights.rank00000.safetensors"}
    (run / "report.json").unlink()
    keep(url, run, True).put_all()  # a launcher that has put nothing yet
    assert names(url) & {"report.json", "notes.txt"} == {"notes.txt"}


def test_a_checkpoint_counts_once_its_last_file_is_there(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, put = keep(url, tmp_path / "run", False), ObjectStore.put
    save(tmp_path / "run", 1)
    kept.put_all()
    save(tmp_path / "run", 2)
    order: list[str] = []
    broken = True

    def watch(self: ObjectStore, name: str, file: Path) -> None:
        order.append(name)
        if name.endswith("step_00000002/checkpoint.json") and broken:
            raise StoreError(self.url, "gone")
        put(self, name, file)

    monkeypatch.setattr(ObjectStore, "put", watch)
    with pytest.raises(StoreError):
        kept.put_all()
    assert order[-1].endswith("checkpoint.json") and "metrics.jsonl" in order[:-1]
    for fetched, left in ((tmp_path / "a", [order[-1]]), (tmp_path / "b", [])):
        continue_at(url, fetched)
        assert whole(fetched) == [1 if broken else 2]
        broken = False
        order.clear()
        kept.put_all()
        assert order == left  # what had arrived is not put again


def test_a_step_that_is_saved_again_replaces_the_one_before(tmp_path: Path, url: str) -> None:
    kept = keep(url, tmp_path / "run", False)
    for step in (1, 2):
        save(tmp_path / "run", step)
    kept.put_all()
    assert fetch_run(url, 2, best=False).joinpath("checkpoints/step_00000002").is_dir()
    save(tmp_path / "run", 1, loss=3.0, ranks=1)  # of a run that was gone back on
    kept.put_all()
    folder = fetch_run(url, None, best=False)
    assert whole(folder) == [1]
    assert not (folder / "checkpoints/step_00000001/rank00001.safetensors").exists()
    assert (folder / "checkpoints/step_00000001/rank00000.safetensors").read_text().endswith("3.0")


def test_the_best_and_any_step_are_fetched_alone(tmp_path: Path, url: str) -> None:
    kept = keep(url, tmp_path / "run", False)
    for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
        save(tmp_path / "run", step, keep=0, loss=loss)
    kept.put_all()
    assert whole(fetch_run(url, 1, best=False, to=tmp_path / "one")) == [1]
    assert whole(fetch_run(url, None, best=True, to=tmp_path / "best")) == [2]
    assert whole(fetch_run(url, None, best=False, to=tmp_path / "last")) == [3]
    assert [kept.step for kept in find_all(tmp_path / "last")] == [1, 2, 3]


def test_one_that_is_damaged_in_the_store_gives_way_to_the_one_before(
    tmp_path: Path, url: str
) -> None:
    kept = keep(url, tmp_path / "run", False)
    for step in (1, 2):
        save(tmp_path / "run", step)
    kept.put_all()
    store = ObjectStore.open(url, "x")
    name = "checkpoints/step_00000002/rank00000.safetensors"
    store.write(name, store.read(name).upper().encode())
    continue_at(url, tmp_path / "new")
    assert whole(tmp_path / "new") == [1]


def test_a_folder_that_is_ahead_of_the_store_stays(tmp_path: Path, url: str) -> None:
    kept = keep(url, tmp_path / "run", False)
    save(tmp_path / "run", 1)
    kept.put_all()
    save(tmp_path / "run", 2)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    continue_at(url, tmp_path / "run")
    assert whole(tmp_path / "run") == [1, 2]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == lines


def test_a_run_that_continues_elsewhere_keeps_what_the_store_has(tmp_path: Path, url: str) -> None:
    kept = keep(url, tmp_path / "run", False)
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0)):
        save(tmp_path / "run", step, loss=loss)
    kept.put_all()
    continue_at(url, tmp_path / "new")
    other = keep(url, tmp_path / "new", True)
    save(tmp_path / "new", 4, loss=4.0)
    other.put_all()
    assert whole(fetch_run(url, 1, best=False, to=tmp_path / "last")) == [1]  # the best
    assert [each.step for each in find_all(tmp_path / "last")] == [1, 3, 4]
    with pytest.raises(StoreError, match="another launcher has taken the store"):
        kept.put_all()


def test_one_of_several_hosts_fetches_what_all_see(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, got, get = keep(url, tmp_path / "run", False), list[str](), ObjectStore.get
    save(tmp_path / "run", 1)
    kept.put_all()

    def note(self: ObjectStore, name: str, file: Path) -> None:
        got.append(name)
        get(self, name, file)

    monkeypatch.setattr(ObjectStore, "get", note)
    hosts = [threading.Thread(target=continue_at, args=(url, tmp_path / "new")) for _ in range(3)]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join()
    assert whole(tmp_path / "new") == [1]
    assert len(got) == len({*got}) > 3


def test_a_checkpoint_that_is_removed_while_it_is_fetched_gives_way_to_the_next(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, get = keep(url, tmp_path / "run", False), ObjectStore.get
    save(tmp_path / "run", 1, keep=1)
    kept.put_all()

    removes = threading.Lock()

    def get_late(self: ObjectStore, name: str, file: Path) -> None:
        with removes:
            if "step_00000001/rank" in name and not find_all(tmp_path / "run")[1:]:
                save(tmp_path / "run", 2, keep=0, loss=0.5)
                shutil.rmtree(tmp_path / "run/checkpoints/step_00000001")
                save(tmp_path / "run", 3, keep=0, loss=0.5)
                kept.put_all()
        get(self, name, file)

    monkeypatch.setattr(ObjectStore, "get", get_late)
    continue_at(url, tmp_path / "new")
    assert whole(tmp_path / "new") == [3]


def test_a_store_is_written_by_the_first_host_of_the_latest_epoch(tmp_path: Path, url: str) -> None:
    first, second, third = (open_store(url, tmp_path / name, False, True) for name in "abc")
    assert first and second and third
    first.claim(1, "a:1")
    save(tmp_path / "a", 1)
    first.put_all()
    second.claim(2, "b:2", follows=True)
    assert KeptRun(ObjectStore.open(url, "x"), tmp_path).before == (2, "b:2")
    for late in (lambda: first.claim(1, "a:1"), lambda: third.claim(2, "c:3", follows=True)):
        with pytest.raises(RunError, match="another launcher has taken the store of this run"):
            late()
    save(tmp_path / "a", 2)
    taken: list[RunError] = []
    first.replaced = taken.append
    first.look()
    first.end(str, error=ValueError())
    assert len(taken) >= 1
    assert 2 not in whole_checkpoints(names(url))


def test_a_new_run_is_not_mixed_with_another(tmp_path: Path, url: str) -> None:
    kept = keep(url, tmp_path / "run", False)
    save(tmp_path / "run", 1)
    kept.put_all()
    with pytest.raises(RecipeError, match=r"has a checkpoint of step 1, and this run has none as"):
        keep(url, tmp_path / "other", False)


def test_a_folder_that_the_store_is_ahead_of_takes_nothing_from_it(
    tmp_path: Path, url: str
) -> None:
    kept = keep(url, tmp_path / "run", False)
    save(tmp_path / "run", 1)
    kept.put_all()
    continue_at(url, tmp_path / "new")
    other = keep(url, tmp_path / "new", True)
    save(tmp_path / "new", 2)
    other.put_all()
    there = names(url)
    for look in (open_store, keep):
        with pytest.raises(RecipeError, match=f"flowrun resume {url} continues from there"):
            look(url, tmp_path / "run", True)
    first_here = KeptRun(ObjectStore.open(url, "x"), tmp_path / "run")  # of a host that was second
    with pytest.raises(RecipeError):
        first_here.claim()
    assert names(url) == there


def test_the_end_waits_and_says_what_the_store_lacks(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, put, free = (keep(url, tmp_path / "run", False), ObjectStore.put, threading.Event())
    save(tmp_path / "run", 1)
    said: list[str] = []

    def wait(self: ObjectStore, name: str, file: Path) -> None:
        free.wait()
        put(self, name, file)

    def say(text: str) -> None:
        said.append(text)
        free.set()

    monkeypatch.setattr(ObjectStore, "put", wait)
    kept.look()
    kept.end(say)
    assert [text.split()[0] for text in said] == ["waiting", url]
    assert "checkpoints/step_00000001/checkpoint.json" in names(url)

    def fail(self: ObjectStore, name: str, file: Path) -> None:
        raise StoreError(self.url, "the disk of the store is full.")

    monkeypatch.setattr(ObjectStore, "put", fail)
    again = keep(url, tmp_path / "run", True)
    again.note = said.append
    save(tmp_path / "run", 2)
    again.look()
    with pytest.raises(RunError, match="lacks: the disk of the store is full"):
        again.end(say)
    assert "It is tried again." in said[-1]


def test_nothing_moves_while_a_launcher_forks(tmp_path: Path, url: str) -> None:
    kept = keep(url, tmp_path / "run", False)
    save(tmp_path / "run", 1)
    kept.rest()
    kept.look()
    assert not kept._slots.acquire(blocking=False)  # which each file takes
    assert names(url) == set()
    kept.go_on()
    kept.end(str)
    assert "metrics.jsonl" in names(url)


def test_a_url_without_a_run_is_an_error_of_the_command_line(url: str) -> None:
    with pytest.raises(CommandLineError, match=r"no run is kept there: it has no recipe\.yaml"):
        fetch_run(url, None, best=False)
    with pytest.raises(CommandLineError, match="cannot be opened: Protocol not known: foo"):
        fetch_figures("foo://x")


def test_runs_at_a_url_are_listed_without_tensors(tmp_path: Path, url: str) -> None:
    for name in ("a", "b"):
        save(tmp_path / name, 1)
        keep(f"{url}/{name}", tmp_path / name, False).put_all()
    folder = fetch_figures(url)
    found = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.*"))
    assert found == [
        ".fetched",
        *(f"{name}/{file}" for name in "ab" for file in ("metrics.jsonl", "recipe.yaml")),
    ]


@pytest.mark.parametrize("part", few(range(20), often=[0]))
def test_saves_and_loads_survive_a_store_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """One request of ten fails: before, while or after it is done, or with 503."""
    with s3_server() as port, faulty_proxy(port, first=part) as proxy:
        for name, value in access(proxy.server_address[1]).items():
            monkeypatch.setenv(name, value)
        url = "s3://bucket/runs/x"
        kept = keep(url, tmp_path / "run", False)
        for step in range(1, 11):
            save(tmp_path / "run", step, loss=-step)
            kept.put_all()
            folder = tmp_path / f"new{step}"
            continue_at(url, folder)
            newest = find_all(folder)[-1]
            assert newest.step == step and newest.damage() == ""
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            assert len(lines) == step
        assert proxy.failed > 10


def test_the_store_always_has_a_whole_checkpoint_and_a_report_comes_after_all(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that the run removes while it is put was to replace the one before."""
    run, put = tmp_path / "run", ObjectStore.put
    kept = keep(url, run, False)
    save(run, 1, keep=1)
    kept.put_all()
    save(run, 2, keep=1, loss=0.9)

    def go_on(self: ObjectStore, name: str, file: Path) -> None:
        if name.endswith("step_00000002/rank00000.safetensors"):
            save(run, 3, keep=1, loss=0.8)
            (run / "report.json").write_text("{}")
        put(self, name, file)

    monkeypatch.setattr(ObjectStore, "put", go_on)
    kept.put_all()
    assert whole_checkpoints(names(url)).keys() == {1}
    assert "report.json" not in names(url)
    kept.put_all()
    assert whole_checkpoints(names(url)).keys() == {3}
    assert "report.json" in names(url)


@pytest.mark.skipif(sys.platform != "linux", reason="there a thread has a priority of its own")
def test_what_moves_files_gives_way_to_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the store, those that it starts, and the one in which the driver runs."""
    put, asked, nice = ObjectStore.put, threading.Event(), set[int]()

    def watch(self: ObjectStore, name: str, file: Path) -> None:
        put(self, name, file)
        drivers = [each for each in threading.enumerate() if each.name == "fsspecIO"]
        for thread in (threading.current_thread(), *drivers):
            nice.add(os.getpriority(os.PRIO_PROCESS, thread.native_id or 0))
        asked.set()

    monkeypatch.setattr(ObjectStore, "put", watch)
    with s3_server() as port:
        for name, value in access(port).items():
            monkeypatch.setenv(name, value)
        kept = keep("s3://bucket/nice", tmp_path / "run", False)
        save(tmp_path / "run", 1)
        kept.look()
        asked.wait()
        assert nice == {15}
        kept.end(str)
