"""Faults that `python tests/hangs/plant.py` plants replace functions that there are."""

from typing import Any

import pytest

from hangs import planted
from hangs.plant import NAMED

REPLACES = sorted(planted.PLANTS.keys() - {"reads", "frozen", "cut"})


@pytest.mark.parametrize("fault", REPLACES)
def test_a_fault_replaces_a_function(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = []

    def wrap(owner: Any, name: str, instead: Any) -> None:
        replaced.append((getattr(owner, name), instead))

    monkeypatch.setattr(planted, "wrap", wrap)
    planted.PLANTS[fault]()
    assert [callable(each) for pair in replaced for each in pair] == [True, True]


def test_each_fault_has_the_words_that_name_it() -> None:
    assert NAMED.keys() == planted.PLANTS.keys()
