"""Listeners start with the first event, and one that fails does no harm to the others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flowrun.engine.errors import RunError
from flowrun.launcher.listeners.dispatch import Listeners
from flowrun.launcher.listeners.listener import RunInfo
from flowrun.launcher.listeners.make import NamedListener

RUN = RunInfo(folder=Path("run"), name="tiny", recipe={}, first_step=0, steps=3)


class Notes:
    """It notes what is called."""

    def __init__(self, stop_at: int | None = None, fail_at: int | None = None) -> None:
        self.calls: list[str] = []
        self.stop_at, self.fail_at = stop_at, fail_at

    def on_start(self, run: RunInfo) -> None:
        self.calls.append(f"start {run.name}")

    def on_step(self, step: int, values: Mapping[str, float]) -> str | None:
        if step == self.fail_at:
            raise ValueError("no disk\nBuy another one.")
        self.calls.append(f"step {step}: {values['loss']}")
        return "stop" if step == self.stop_at else None

    def on_end(self, status: str) -> None:
        self.calls.append(f"end {status}")


def listeners(*made: Notes, may_end: bool = False) -> tuple[Listeners, list[str]]:
    lost: list[str] = []
    named = [NamedListener(f"notes{k}", each, may_end) for k, each in enumerate(made)]
    found = Listeners(named, lost.append)
    found.prepare(lambda: RUN)
    return found, lost


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
    found, lost = listeners(bad, good)
    for step in range(3):
        found.call("on_step", step, {"loss": 1.0})
    found.end("complete")
    assert lost == ["the log of notes0 ends at step 1: ValueError: no disk"]
    assert len(good.calls) == 5 and bad.calls == ["start tiny", "step 0: 1.0", "end failed"]


def test_a_callback_that_fails_ends_the_run() -> None:
    found, _ = listeners(Notes(fail_at=1), may_end=True)
    with pytest.raises(RunError, match="no disk") as ended:
        found.call("on_step", 1, {"loss": 1.0})
    assert ended.value.where == "callback notes0, on_step at step 1"


def test_the_one_that_asks_to_stop_is_named() -> None:
    found, _ = listeners(Notes(), Notes(stop_at=1))
    asked: Any = [found.call("on_step", step, {"loss": 1.0}) for step in range(3)]
    assert asked == ["", "notes1", ""]


def test_other_hosts_call_nobody() -> None:
    notes = Notes()
    found, _ = listeners(notes)
    found.off = True
    found.call("on_step", 0, {"loss": 1.0})
    assert notes.calls == []
