"""Working directories of tests: an empty one for each test, and one with the recipe `small`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.runs import command


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLOWRUN_RECIPES", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


@contextmanager
def working_in(folder: Path) -> Iterator[Path]:
    """A folder with the recipe `small` as working directory, from which modules are imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(command.workplace(folder))
        patch.syspath_prepend(folder)
        patch.delitem(sys.modules, "samples", raising=False)  # another test's
        yield folder
