import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flowrun.engine.errors import RunError
from flowrun.launcher.listeners import dispatch
from flowrun.launcher.listeners.dispatch import Listeners, Outlets
from flowrun.launcher.listeners.listener import RunInfo
from flowrun.launcher.listeners.make import NamedListener

RUN = RunInfo(folder=Path("run"), name="tiny", recipe={}, first_step=0, steps=3)


class Notes:
    def __init__(self, fail_at: int | None = None) -> None:
        self.calls: list[str] = []
        self.fail_at = fail_at

    def on_start(self, run: RunInfo) -> None:
        self.calls.append(f"start {run.name}")

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.fail_at:
            raise ValueError("no disk\nBuy another one.")
        self.calls.append(f"step {step}: {values['loss']}")

    def on_end(self, status: str) -> None:
        self.calls.append(f"end {status}")


@dataclass
class Said:
    """What the threads of listeners report."""

    lost: list[str] = field(default_factory=list)
    failed: list[RunError] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)


def listeners(*made: object, may_end: bool = False, limit_s: float = 0.0) -> tuple[Listeners, Said]:
    said = Said()
    named = [NamedListener(f"notes{k}", each, may_end) for k, each in enumerate(made)]
    outlets = Outlets(lose=said.lost.append, fail=said.failed.append, stop=said.stopped.append)
    found = Listeners(named, lambda: RUN, outlets, limit_s)
    return found, said


def train(found: Listeners) -> None:
    """Let three steps come, and the end."""
    for step in range(3):
        found.call("on_step", step, {"loss": 1.0})
    found.end("complete")


def test_they_start_with_the_first_event_and_again_after_an_end() -> None:
    notes = Notes()
    found, _ = listeners(notes)
    found.end("failed")
    assert notes.calls == []
    for status in ("restarted", "complete"):
        found.call("on_step", 0, {"loss": 1.0})
        found.call("on_evaluation", 0, {"loss": 1.0})
        found.end(status)
    once = ["start tiny", "step 0: 1.0"]
    assert notes.calls == [*once, "end restarted", *once, "end complete"]


def test_a_logger_that_fails_is_left_out_with_a_line() -> None:
    bad, good = Notes(fail_at=1), Notes()
    found, said = listeners(bad, good)
    train(found)
    assert said.lost == ["the log of notes0 ends at step 1: ValueError: no disk"]
    assert len(good.calls) == 5 and bad.calls == ["start tiny", "step 0: 1.0", "end failed"]


class Leaves:
    """It raises what is not an Exception, as a panic of Rust or an exit does."""

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        raise SystemExit(3)


def test_an_exit_in_a_logger_is_a_note() -> None:
    found, said = listeners(Leaves())
    train(found)
    assert said.lost == ["the log of notes0 ends at step 0: SystemExit: 3"]


class Blocks:
    """Its step does not return before the test is over."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        self.begun.set()
        self.over.wait()


@pytest.fixture
def blocks() -> Iterator[Blocks]:
    made = Blocks()
    yield made
    made.over.set()


def test_a_logger_that_blocks_loses_lines_and_is_named_once(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_END_S", 0.05)
    good = Notes()
    found, said = listeners(blocks, good)
    for step in range(dispatch._QUEUED + 50):
        found.call("on_step", step, {"loss": 1.0})
        if not step:
            assert blocks.begun.wait(30)
        while len(good.calls) < step:
            time.sleep(0)
    assert not found.is_full and found.look() is None
    found.end("complete")
    assert len(said.lost) == 1
    assert said.lost[0].startswith("the log of notes0 is late: it loses lines from step")
    assert good.calls[-1] == "end complete"


class StartsLate(Notes):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error, self.begun, self.over = error, threading.Event(), threading.Event()

    def on_start(self, run: RunInfo) -> None:
        self.begun.set()
        assert self.over.wait(30)
        if self.error:
            raise OSError(self.error)


@pytest.mark.parametrize(
    ("error", "note"), [("no server", "ends at step 0: OSError: no server"), ("", "is late")]
)
def test_a_logger_that_starts_late_is_named_once(error: str, note: str) -> None:
    late = StartsLate(error)
    found, said = listeners(late)
    found.call("on_step", 0, {"loss": 1.0})
    assert late.begun.wait(30)
    for step in range(dispatch._QUEUED + 50):
        found.call("on_step", step, {"loss": 1.0})
    assert said.lost == []
    late.over.set()
    found.end("complete")
    assert [text.removeprefix("the log of notes0 ")[: len(note)] for text in said.lost] == [note]


def test_a_callback_that_blocks_is_named_and_loses_nothing(blocks: Blocks) -> None:
    found, said = listeners(blocks, may_end=True, limit_s=0.01)
    found.call("on_step", 7, {"loss": 1.0})
    assert blocks.begun.wait(30)
    until = time.monotonic() + 30
    while (hung := found.look()) is None and time.monotonic() < until:
        pass
    assert hung and hung.where == "callback notes0, on_step at step 7"
    assert "launch.hang_s" in hung.instead
    assert found.look() is None and said.lost == []


def test_the_end_waits_for_a_callback_that_blocks_no_longer_than_the_limit(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_END_S", 0.01)
    found, _ = listeners(blocks, may_end=True, limit_s=0.01)
    found.call("on_step", 7, {"loss": 1.0})
    hung = found.end("complete")
    assert hung and hung.where == "callback notes0, on_step at step 7"


def test_other_hosts_call_nobody() -> None:
    notes = Notes()
    found, _ = listeners(notes)
    found.off = True
    train(found)
    assert notes.calls == []
