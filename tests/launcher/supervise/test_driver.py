import ast
import queue
import re
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowrun.launcher.supervise.driver import THREADS
from flowrun.launcher.supervise.hands import watch
from flowrun.launcher.supervise.hands.desk import Desk
from flowrun.launcher.supervise.hands.event_loop import find_quiet
from support.runs.unit_watch import unit_watch

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "launcher").rglob("*.py"))
STARTS = re.compile(r"\b(Thread|Timer|ThreadPool|ThreadPoolExecutor|to_thread|run_in_executor)\(")


def starts_threads(text: str) -> bool:
    return bool(STARTS.search(text))


def test_a_thread_is_started_only_where_it_is_named() -> None:
    found = {
        file.relative_to(ROOT / "launcher").as_posix()
        for file in FILES
        if starts_threads(file.read_text())
    }
    others = {"store/checkpoint.py"}  # sums of files, all in one call
    assert found - others == set(THREADS)


def test_a_planted_thread_is_seen() -> None:
    assert starts_threads("threading.Timer(2.0, stop).start()")


def test_a_run_has_one_event_loop() -> None:
    made = [
        file.relative_to(ROOT).as_posix()
        for file in FILES
        if re.search(r"new_event_loop\(|asyncio\.run\(", file.read_text())
    ]
    of_a_command = "launcher/command_line/ray_jobs.py"  # which waits for runs elsewhere
    assert made == [of_a_command, "launcher/supervise/hands/event_loop.py"]


def test_a_main_thread_that_the_disk_blocks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    desk, disk = Desk(), threading.Event()
    left: queue.SimpleQueue[int] = queue.SimpleQueue()

    def leave(status: int) -> None:
        watching._ended.set()
        left.put(status)

    monkeypatch.setattr(watch.os, "_exit", leave)
    desk._order("completing the checkpoint of step 8", disk.wait, 0)
    serving = threading.Thread(target=desk.serve)
    serving.start()
    loop = SimpleNamespace(beaten_s=time.monotonic() + 3600)
    own = partial(find_quiet, desk, loop)  # type: ignore[arg-type]
    watching = unit_watch(tmp_path, limit_s=0.05, own=own)
    with watching:
        assert left.get(timeout=60) == 1
    disk.set()
    desk.close()
    serving.join()
    named = "the launcher, completing the checkpoint of step 8"
    assert capfd.readouterr().err.startswith(f"{named}\n  it has not gone on for 0 s.")
    assert (tmp_path / watch.FILE).read_text().startswith(f"{named}\n")


def test_no_class_of_supervision_has_many_attributes() -> None:
    counted = {}
    for file in (ROOT / "launcher" / "supervise").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                counted[node.name] = len(attributes_of(node))
    assert {name: count for name, count in counted.items() if count > 12} == {}


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's fields, and of what its methods set on self."""
    found = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and not ast.unparse(each.annotation).startswith("ClassVar")
    }
    for each in ast.walk(node):
        targets = each.targets if isinstance(each, ast.Assign) else []
        targets = [each.target] if isinstance(each, ast.AnnAssign) else targets
        flat = [part for target in targets for part in ast.walk(target)]
        found |= {
            part.attr
            for part in flat
            if isinstance(part, ast.Attribute)
            and isinstance(part.value, ast.Name)
            and part.value.id == "self"
            and isinstance(part.ctx, ast.Store)
        }
    return found
