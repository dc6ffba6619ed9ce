"""make_page: a recipe -> a page, as one file that loads nothing from a network."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from flowrun.engine.ir.files import replace_text
from flowrun.launcher.job.job import Job
from flowrun.launcher.page.page_data import Page
from flowrun.launcher.page.plan_view import plan_view
from flowrun.launcher.place.settle import job_to_plan
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.terminal.as_json import to_json
from flowrun.launcher.terminal.units import size

_HERE = Path(__file__).parent
_FILES = {  # mark in page.html -> the files that take its place
    "vendor": ("vendor/uPlot.min.css",),
    "library": ("vendor/uPlot.iife.min.js",),
    "script": ("page.js", "runs.js"),
}


def make_page(given: list[str], config_dir: str | None) -> Page:
    """Make the page of what the command is given.  Raises RecipeError.

    given: "key=value" of a recipe.  config_dir: the user's own groups.
    """
    return plan_page(job_to_plan(load(given, config_dir))[0])


def plan_page(job: Job) -> Page:
    """Make the page of a job that is planned."""
    title = f"{job.recipe.name}: what it will do"
    return Page(title=title, made_by=version("flowrun"), plan=plan_view(job))


def to_html(page: Page) -> str:
    """Return a page as HTML; in the JSON of its data no tag can end."""
    text = (_HERE / "page.html").read_text(encoding="utf-8")
    for mark, files in _FILES.items():
        parts = ((_HERE / file).read_text(encoding="utf-8") for file in files)
        text = text.replace(f"/*{mark}*/", "\n".join(parts))
    return text.replace("/*data*/", to_json(page).replace("<", "\\u003c"))


def write_page(page: Page, file: Path, *, as_json: bool = False) -> str:
    """Write a page to a file, and return a line that says so.  Raises OSError."""
    text = to_json(page) if as_json else to_html(page)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, text)
    return f"{file} is written: {size(len(text))}"
