import errno
import io
import sys
from typing import TextIO, cast

import pytest
from rich.console import Console

from flowrun.launcher.terminal.console import LastingOutput, printable, say, wrap_words


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


LONG = "a note of a path: /a/very/long/path/that/must/stay/whole.yaml, and more"


def test_lines_break_between_words_alone() -> None:
    assert wrap_words("one two\n  three four", 9) == "one two\n  three\n  four"
    lines = wrap_words(LONG, 20).splitlines()
    assert "/a/very/long/path/that/must/stay/whole.yaml," in lines
    assert all(len(line) <= 20 for line in lines if "/" not in line)


@pytest.mark.parametrize(("terminal", "number"), [(True, 3), (False, 1)])
def test_a_file_gets_a_line_for_a_note(terminal: bool, number: int) -> None:
    out = io.StringIO()
    say(Console(file=out, width=20, force_terminal=terminal, color_system=None), LONG)
    assert len(out.getvalue().splitlines()) == number
