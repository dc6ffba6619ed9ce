"""A fixture: an empty working directory for a test, without the user's recipes."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLOWRUN_RECIPES", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path
