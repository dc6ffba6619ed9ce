"""Working directories of tests, an empty one for each and one with the recipe `small`; and commands
that run in them.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowrun.launcher.cli import main
from support.runs import command

End = Callable[..., tuple[Any, str, str]]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, from which modules are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("FLOWRUN_RECIPES", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


@pytest.fixture
def place(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the recipe `small`: 2 ranks, 4 steps of 2 micro-batches."""
    monkeypatch.delitem(sys.modules, "samples", raising=False)  # another test's
    return command.workplace(workplace)


@pytest.fixture
def end(capsys: pytest.CaptureFixture[str]) -> End:
    """(exit status, stdout, stderr) of a command."""

    def run(*arguments: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        return ended.value.code, *capsys.readouterr()

    return run


@contextmanager
def working_in(folder: Path) -> Iterator[Path]:
    """A folder with the recipe `small` as working directory, from which modules are imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(command.workplace(folder))
        patch.syspath_prepend(folder)
        patch.delitem(sys.modules, "samples", raising=False)  # another test's
        yield folder
