"""What mkdocs calls while it builds the site (mkdocs.yml, `hooks`).

It adds the pages that stand outside docs/ (ARCHITECTURE.md …) and those that are made from code,
and turns links to source files, which the site does not have, into plain text.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests")]

import command_help  # noqa: E402
import recipe_keys  # noqa: E402

from support import typing_links  # noqa: E402

OUTSIDE = {  # files of the tree's root that are pages of the site
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
MADE = {
    "reference/recipe_keys.md": recipe_keys.page,
    "reference/command_line.md": command_help.page,
}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_startup(**_: Any) -> None:
    """Make the folder in which mkdocstrings finds the package."""
    typing_links.main()


def on_config(config: Any) -> Any:
    """Complete the navigation by what tells how flowrun is made."""
    decisions = [
        f"decisions/{file.name}" for file in sorted((ROOT / "docs/decisions").glob("*.md"))
    ]
    decisions.sort(key=lambda page: not page.endswith("index.md"))
    pages = [page for name, page in OUTSIDE.items() if (ROOT / name).exists()]
    inside = [page for page in ("tour.md", "walks.md") if (ROOT / "docs" / page).exists()]
    config.nav.append({"Inside": [*inside, *pages, {"Decisions": decisions}]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for name, page in OUTSIDE.items():
        if (ROOT / name).exists():
            files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for page, make in MADE.items():
        files.append(File.generated(config, page, content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links of the tree into links of the site."""
    uri = page.file.src_uri
    outside = {there: name for name, there in OUTSIDE.items()}
    source = outside.get(uri, f"docs/{uri}")
    return _LINK.sub(lambda match: site_link(match, source, uri), markdown)


def site_link(match: re.Match[str], source: str, uri: str) -> str:
    """Return a link as the page `uri` has it; of a file that is no page, its label alone."""
    label, target, anchor = match[1], match[2], match[3] or ""
    if "://" in target:
        return match[0]
    path = os.path.normpath(os.path.join(os.path.dirname(source), target))
    there = {**OUTSIDE, "README.md": "index.md"}.get(path, path.removeprefix("docs/"))
    if there == path and (ROOT / path).exists():
        return label
    return f"[{label}]({os.path.relpath(there, os.path.dirname(uri) or '.')}{anchor})"
