"""Prose reads plainly: sentences have subjects, and functions are verbs."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from support.checks.prose import ROOT, docstrings, findings, plain_words

FILES = sorted(
    file
    for folder in ("engine", "launcher", "models", "testing")
    for file in (ROOT / folder).rglob("*.py")
)


# How often a phrase is written still, and a name with such a part (`told_`) bound.  It falls alone.
STILL = {
    "told_": 13,
    "found_": 399,
    "made_": 287,
    "behind_": 27,
    "anew_": 1,
    "goes on": 61,
    "anew": 19,
    "comes again": 4,
    "is no": 122,
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """Findings of each kind, as FILE:LINE what."""
    kinds: dict[str, list[str]] = {"subject": [], "verb": [], "dialect": []}
    for file in FILES:
        for kind, line, what in findings(file):
            kinds[kind].append(f"{file.relative_to(ROOT)}:{line} {what}")
    return kinds


def test_fewer_than_one_docstring_in_a_hundred_has_no_subject(found: dict[str, list[str]]) -> None:
    count = sum(len(list(docstrings(ast.parse(file.read_text())))) for file in FILES)
    assert len(found["subject"]) < count / 100, found["subject"]


@pytest.mark.parametrize("kind", ["verb", "dialect"])
def test_nothing_is_found_of_a_kind(found: dict[str, list[str]], kind: str) -> None:
    assert found[kind] == []


def test_words_that_say_little_grow_fewer() -> None:
    counts = sum((plain_words(file) for file in FILES), Counter[str]())
    assert {word: count for word, count in counts.items() if count > STILL[word]} == {}


def test_planted_words_are_counted(tmp_path: Path) -> None:
    (planted := tmp_path / "planted.py").write_text(
        "def told_of(a, found=1):\n    made = [b for found_b in a]  # it goes\n"
        '    """The run goes\n    on: this is no page."""\n'
    )
    counts = {word: count for word, count in plain_words(planted).items() if count}
    assert counts == {"told_": 1, "found_": 2, "made_": 1, "goes on": 1, "is no": 1}


def test_planted_lines_are_found(tmp_path: object) -> None:
    planted = ROOT / "build" / "planted.py"
    planted.parent.mkdir(exist_ok=True)
    planted.write_text(
        'def planned(a, b, c):\n    """Of a step, so many; a."""\n    raise ValueError()\n'
    )
    try:
        assert {kind for kind, *_ in findings(planted)} == {"subject", "verb", "dialect"}
    finally:
        planted.unlink()
