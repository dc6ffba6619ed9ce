"""README, ARCHITECTURE and CONTRIBUTING say what is so: screens, sizes, and names of files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flowrun

ROOT = Path(__file__).resolve().parents[1]
PAPERS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
PAGES = [*map(ROOT.joinpath, PAPERS), *sorted((ROOT / "docs" / "decisions").glob("*.md"))]
SCREEN = re.compile(r"<!-- printed by: flowrun plan (.*?) -->\n```text\n(.*?)```", re.DOTALL)


def lines_of(text: str) -> list[str]:
    """The lines of a screen, without blanks at their ends and without notes, which tell of this
    machine.
    """
    return [line.rstrip() for line in text.strip().splitlines() if not line.startswith("note: ")]


def test_readme_shows_what_the_command_prints() -> None:
    found = SCREEN.search((ROOT / "README.md").read_text())
    assert found
    (recipe,) = re.findall(r"recipe=(\S+)", found[1])
    assert lines_of(str(flowrun.plan(recipe))) == lines_of(found[2])


def test_architecture_is_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_bytes()) <= 11_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    linked = {ref.split("#")[0] for ref in re.findall(r"\]\(([^)]+)\)", text) if "://" not in ref}
    assert [ref for ref in linked if ref and not (page.parent / ref).exists()] == []
    named = set(re.findall(r"(?:engine|launcher|models|tests|testing|conf|docs)/[\w./]*\w", text))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert [name for name in missing if "NAME" not in name] == []


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "index.md").read_text()
    assert [p.name for p in folder.glob("[0-9]*.md") if f"({p.name})" not in index] == []
