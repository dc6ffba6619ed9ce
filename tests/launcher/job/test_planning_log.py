from collections.abc import Iterator

import pytest

from flowrun.engine.pipeline import PASSES, PLAN_PASSES
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import plan
from flowrun.launcher.terminal import doing


def passes() -> Iterator[str]:
    """The names of all passes of a plan, in their order."""
    yield from (each.__name__ for each in PASSES)
    yield from (each.__name__ for level in PLAN_PASSES.values() for each in level)
    yield "rehearse"


def test_each_pass_is_shown_as_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(doing, "doing", shown.append)
    plan(load(["recipe=mlp_data_parallel", "engine.cache=false"]))
    expected = [f"planning: {name.replace('_', ' ')}" for name in passes()]
    first = shown.index(expected[0])
    assert shown[first : first + len(expected)] == expected
