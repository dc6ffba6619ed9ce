"""What is printed must not end what prints."""

from __future__ import annotations

import errno
import io
import sys
from typing import TextIO, cast

import pytest
from rich.console import Console

from flowrun.launcher.terminal.console import LastingOutput, printable


class FullDisk(io.StringIO):
    """Takes a few characters, then nothing."""

    def write(self, text: str) -> int:
        if len(self.getvalue()) + len(text) > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_output_that_nobody_takes_is_dropped_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    full, output = FullDisk(), LastingOutput()
    monkeypatch.setattr(sys, "stdout", full)
    console = Console(file=cast(TextIO, output), width=80)
    console.print("one")
    assert output.lost == ""
    for _ in range(3):
        console.print("more than the disk takes")
    assert output.lost == "OSError: [Errno 28] No space left on device"
    assert full.getvalue() == "one\n"


def test_what_a_model_writes_steers_no_terminal() -> None:
    assert printable("a\tb\n\x1b[2Jc\x00 é") == "a\tb\n\ufffd[2Jc\ufffd é"
