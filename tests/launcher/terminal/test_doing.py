"""The line that says what is being done before there is a plan."""

from __future__ import annotations

import io
import sys

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


def test_a_file_gets_no_such_line(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    doing.doing("reading the recipe")
    doing.clear()
    assert file.getvalue() == ""
