"""Prose reads plainly: sentences have subjects, functions are verbs, parameters are named."""

from __future__ import annotations

import ast

import pytest

from support.checks.prose import ROOT, docstrings, findings

FILES = sorted(
    file
    for folder in ("engine", "launcher", "models", "testing")
    for file in (ROOT / folder).rglob("*.py")
)


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """Findings of each kind, as FILE:LINE what."""
    kinds: dict[str, list[str]] = {"subject": [], "parameters": [], "verb": [], "dialect": []}
    for file in FILES:
        for kind, line, what in findings(file):
            kinds[kind].append(f"{file.relative_to(ROOT)}:{line} {what}")
    return kinds


def test_fewer_than_one_docstring_in_a_hundred_has_no_subject(found: dict[str, list[str]]) -> None:
    count = sum(len(list(docstrings(ast.parse(file.read_text())))) for file in FILES)
    assert len(found["subject"]) < count / 100, found["subject"]


@pytest.mark.parametrize("kind", ["parameters", "verb", "dialect"])
def test_nothing_is_found_of_a_kind(found: dict[str, list[str]], kind: str) -> None:
    assert found[kind] == []


def test_planted_lines_are_found(tmp_path: object) -> None:
    planted = ROOT / "build" / "planted.py"
    planted.parent.mkdir(exist_ok=True)
    planted.write_text(
        'def planned(a, b, c):\n    """Of a step, so many; a."""\n    raise ValueError()\n'
    )
    try:
        assert {kind for kind, *_ in findings(planted)} == {
            "subject",
            "parameters",
            "verb",
            "dialect",
        }
    finally:
        planted.unlink()
