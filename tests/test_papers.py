"""README, ARCHITECTURE and CONTRIBUTING name files that exist, and stay short."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAPERS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
PAGES = [
    *map(ROOT.joinpath, PAPERS),
    ROOT / "docs/walks.md",
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
]


def test_architecture_is_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_bytes()) <= 12_000


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


def test_the_image_takes_extras_that_exist() -> None:
    asked = re.findall(r"^ARG EXTRAS=(.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*asked[0].split(",")} <= project["optional-dependencies"].keys()
