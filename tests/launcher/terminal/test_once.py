import os
import time
from pathlib import Path

import pytest

from flowrun.launcher.terminal.once import is_first_today


def test_advice_comes_once_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [is_first_today("this"), is_first_today("this"), is_first_today("that")] == [
        True,
        False,
        True,
    ]
    yesterday = time.time() - 90_000
    os.utime(tmp_path / "flowrun" / "said-this", (yesterday, yesterday))
    assert is_first_today("this")


def test_where_nothing_is_remembered_it_comes_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flowrun").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert is_first_today("this") and is_first_today("this")
