"""Runs the commands whose output the pages show: `python docs/make/screens.py --write`.

A screen is a block of text behind a comment that names its command:

    <!-- screen: flowrun plan recipe=mlp_hybrid -->

`--write` puts in the command and what it prints on a terminal of 100 columns.  Behind a command
`| grep -E 'PATTERN'` may stand, as in a shell.  tests/test_site.py runs the same commands and
compares, times and machine aside; it leaves out a `slow screen:`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = "100"
_SCREEN = re.compile(r"(<!-- (slow )?screen: (.*?) -->\n```text\n)(.*?)(?=^```$)", re.DOTALL | re.M)
_NUMBER = r"~?\d[\d.,]*"
# what differs between machines and runs: times and speeds, losses, folders, what the host has
_CHANGING = (
    (re.compile(r"\d\d:\d\d:\d\d (?= step )"), ""),
    (re.compile(rf"{_NUMBER} ?(?:s|min|ms|us|%|x|samples/s|tokens/s|kB|MB)(?!\w)"), "#"),
    (re.compile(rf"(?<=loss |racy ){_NUMBER}|(?<=-> ){_NUMBER}|(?<=step ){_NUMBER}"), "#"),
    (re.compile(r"[CPFBWU·]{9,}"), "timeline"),
    (re.compile(r"(?<=of this run: )\S+"), "FOLDER"),
    (re.compile(r"\s+"), " "),
)
_OF_THE_HOST = re.compile(
    r"^note: (?:the profile .*?measures\s+this\s+one\s+\(3\s+minutes\)|\d+ ranks share.*?host"
    r"|hardware=cpu, scaled by .*?messages\s+x\S+|this host is under load:.*?its\s+cores"
    r"|hardware=cpu is of another.*?measures\s+this"
    r"|a step takes \S+ x as long as foreseen; .*?\(launch\.data_workers\))\n",
    re.DOTALL | re.M,
)


class Screen(NamedTuple):
    """One screen of a page."""

    page: Path
    command: str
    slow: bool
    text: str

    @property
    def run(self) -> str:
        """The command alone, without the pipe to grep."""
        return self.command.partition(" | ")[0]

    def shown(self, output: str) -> str:
        """Return the lines of the command's output that grep, if there is one, lets through."""
        *_, pattern = shlex.split(self.command) if " | grep -E " in self.command else [""]
        kept = [line for line in output.splitlines(keepends=True) if re.search(pattern, line)]
        return "".join(kept)


def screens() -> Iterator[Screen]:
    """Yield all screens of all pages."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for found in _SCREEN.finditer(page.read_text()):
            text = found[4].removeprefix(f"$ {found[3]}\n")
            yield Screen(page, found[3], bool(found[2]), text)


def printed(screen: Screen) -> str:
    """Run a command in an empty folder and return what it prints, errors too."""
    _, *arguments = shlex.split(screen.run)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "flowrun.launcher.cli", *arguments],
            cwd=folder,
            env={**os.environ, "COLUMNS": COLUMNS, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        text = done.stdout.replace(folder + "/", "")
    return screen.shown("".join(line.rstrip() + "\n" for line in text.splitlines()))


def alike(text: str) -> list[str]:
    """Return the lines of a screen without what differs from machine to machine, each once."""
    lines = []
    for line in _OF_THE_HOST.sub("", text).splitlines():
        for pattern, word in _CHANGING:
            line = pattern.sub(word, line)
        lines.append(line.strip())
    return list(dict.fromkeys(filter(None, lines)))


def main() -> None:
    """Write the screens of all pages, or of those that are named."""
    named = {Path(name).resolve() for name in sys.argv[1:] if name != "--write"}
    for page in dict.fromkeys(screen.page for screen in screens()):
        if "--write" in sys.argv and (not named or page in named):
            page.write_text(_SCREEN.sub(_renewed, page.read_text()))


def _renewed(found: re.Match[str]) -> str:
    screen = Screen(ROOT, found[3], bool(found[2]), "")
    return f"{found[1]}$ {found[3]}\n{printed(screen)}"


if __name__ == "__main__":
    main()
