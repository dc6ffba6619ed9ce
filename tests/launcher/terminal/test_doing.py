import io
import logging
import sys
import time

import pytest

from flowrun.launcher.terminal import doing


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_each_line_takes_the_place_of_the_one_before_and_the_last_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = _Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    doing.doing("reading the recipe")
    doing.doing("capturing the model")
    doing.clear()
    written = screen.getvalue()
    doing.clear()
    assert screen.getvalue() == written  # there is nothing to take away
    erase = "\r\x1b[2K"
    assert written.split(erase) == ["", "reading the recipe …", "capturing the model …", ""]


def test_a_file_gets_a_line_for_each_phase_at_once_and_another_after_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, now = io.StringIO(), [1.0]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(doing, "_written", {})
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    doing.doing("reading the recipe")  # nowhere
    with doing.keep_lines(file):
        for what in ("reading a.txt", "reading b.txt", "planning", "planning: boxings"):
            doing.doing(what)
        now[0] += 10
        doing.doing("planning: registers")
        doing.clear()
    lines = [line.partition("  ")[2] for line in file.getvalue().splitlines()]
    assert lines == ["reading a.txt …", "planning …", "planning: registers …"]


def test_what_a_logger_is_told_is_shown_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    logger = logging.getLogger("flowrun.some.data")
    with doing.show_log("flowrun.some"):
        logger.info("tokenising %s", "a.txt")
    logger.info("and this is not")
    doing.clear()
    assert "tokenising a.txt …" in screen.getvalue() and "is not" not in screen.getvalue()
