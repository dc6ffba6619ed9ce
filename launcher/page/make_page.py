"""make_page: a recipe, or folders -> a page, as one file that loads nothing from a network."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from flowrun.engine.ir.files import replace_text
from flowrun.launcher.job.job import Job
from flowrun.launcher.page.page_data import Page
from flowrun.launcher.page.plan_view import plan_view
from flowrun.launcher.page.run_view import run_view
from flowrun.launcher.page.sweep_view import job_folders, sweep_view
from flowrun.launcher.place.settle import job_to_plan
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.report.sweep_table import TABLE
from flowrun.launcher.terminal.as_json import to_json
from flowrun.launcher.terminal.doing import doing
from flowrun.launcher.terminal.units import size

_HERE = Path(__file__).parent
_FILES = {  # mark in page.html -> the files that take its place
    "vendor": ("vendor/uPlot.min.css",),
    "library": ("vendor/uPlot.iife.min.js",),
    "script": ("page.js", "runs.js"),
}


def make_page(given: Sequence[str], config_dir: str | None) -> Page:
    """Make the page of what the command is given.  Raises RecipeError.

    given: folders of runs, one of a sweep, or "key=value" of a recipe.
    """
    folders = [Path(word) for word in given if "=" not in word or Path(word).is_dir()]
    if not folders:
        return plan_page(job_to_plan(load(list(given), config_dir))[0])
    for word in given:
        if Path(word) not in folders:
            problem = "keys of a recipe do not go with folders."
            raise CommandLineError(word, problem, "Write keys or folders alone.")
    return folders_page(folders)


def folders_page(folders: Sequence[Path]) -> Page:
    """Make the page of some runs, or of one sweep and the runs of its jobs.  Raises RecipeError."""
    sweep = None
    for folder in folders:
        if (folder / TABLE).exists():
            if len(folders) > 1:
                raise CommandLineError(str(folder), "a page has one sweep alone.", "Write one.")
            sweep = sweep_view(folder)
            folders = job_folders(folder, sweep)
    runs = []
    for number, folder in enumerate(folders, 1):
        doing(f"reading run {number} of {len(folders)}")
        runs.append(run_view(folder))
    names = ", ".join(dict.fromkeys(run.name for run in runs)) or "nothing ran"
    of = f"{len(runs)} run{'s' * (len(runs) > 1)}"
    of = f"a sweep of {len(sweep.rows)} jobs" if sweep else of
    return Page(title=f"{names}: {of}", made_by=version("flowrun"), runs=tuple(runs), sweep=sweep)


def plan_page(job: Job) -> Page:
    """Make the page of a job that is planned."""
    title = f"{job.recipe.name}: what it will do"
    return Page(title=title, made_by=version("flowrun"), plan=plan_view(job))


def to_html(page: Page, *, live: bool = False) -> str:
    """Return a page as HTML; in the JSON of its data no tag can end.  live: it is served
    (serve_page.py), and asks its server for what is new.
    """
    text = (_HERE / "page.html").read_text(encoding="utf-8")
    if live:
        text = text.replace("default-src 'none';", "default-src 'none'; connect-src 'self';")
    for mark, files in {**_FILES, "live": ("live.js",) if live else ()}.items():
        parts = ((_HERE / file).read_text(encoding="utf-8") for file in files)
        text = text.replace(f"/*{mark}*/", "\n".join(parts))
    return text.replace("/*data*/", to_json(page).replace("<", "\\u003c"))


def write_page(page: Page, file: Path, *, as_json: bool = False) -> str:
    """Write a page to a file, and return a line that says so.  Raises OSError."""
    text = to_json(page) if as_json else to_html(page)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, text)
    return f"{file} is written: {size(len(text))}"
