import ast
import queue
import re
import signal
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowrun.launcher.supervise.driver import THREADS
from flowrun.launcher.supervise.hands import watch
from flowrun.launcher.supervise.hands.desk import Desk, Interrupted
from flowrun.launcher.supervise.hands.event_loop import find_quiet
from flowrun.launcher.supervise.hands.signals import Signals
from flowrun.launcher.supervise.life.events import Asked
from support.runs.unit_watch import unit_watch

LAUNCHER = Path(__file__).resolve().parents[3] / "launcher"
FILES = sorted((f.relative_to(LAUNCHER).as_posix(), f.read_text()) for f in LAUNCHER.rglob("*.py"))
STARTS = re.compile(r"\b(Thread|Timer|ThreadPool|ThreadPoolExecutor|to_thread|run_in_executor)\(")


def starts_threads(text: str) -> bool:
    return bool(STARTS.search(text))


def test_a_thread_is_started_only_where_it_is_named() -> None:
    found = {name for name, text in FILES if starts_threads(text)}
    others = {"store/checkpoint.py"}  # sums of files, all in one call
    assert found - others == set(THREADS)


def test_a_planted_thread_is_seen() -> None:
    assert starts_threads("threading.Timer(2.0, stop).start()")


def test_a_run_has_one_event_loop() -> None:
    made = [name for name, text in FILES if re.search(r"new_event_loop\(|asyncio\.run\(", text)]
    of_a_command = "command_line/ray_jobs.py"  # which waits for runs elsewhere
    assert made == [of_a_command, "supervise/hands/event_loop.py"]


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


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGHUP])
def test_a_signal_that_ends_a_run_at_once_interrupts_the_main_thread(number: int) -> None:
    desk, signals, posted = Desk(), Signals(), queue.SimpleQueue[object]()
    desk.yields_to = 2  # as while a virtual cluster trains
    with ExitStack() as ended:
        before = signal.signal(number, signal.SIG_DFL)  # ignored, where tests run under nohup
        ended.callback(signal.signal, number, before)
        with signals.handling(), signals.posting(posted.put, desk), pytest.raises(Interrupted):
            signal.raise_signal(number)
    assert posted.get(timeout=60) == Asked(signal.Signals(number).name, again=True)


def test_no_class_of_supervision_has_many_attributes() -> None:
    counted = {}
    for text in (text for name, text in FILES if name.startswith("supervise/")):
        for node in ast.walk(ast.parse(text)):
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
    return found | {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and ast.unparse(each.value) == "self"
    }
