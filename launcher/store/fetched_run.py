"""A run that is kept at a URL, fetched to a folder of this disk.

All comes but tensors; of these only what is asked for.  Of other checkpoints the folder has
checkpoint.json alone: it counts them when it keeps the newest and the best, as the store does.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.files import open_more
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.recipe.schema import STORE
from flowrun.launcher.store.checkpoint import ABOUT, FOLDER, Checkpoint, find_all, find_best
from flowrun.launcher.store.kept_run import name_in, whole_checkpoints
from flowrun.launcher.store.run_files import ENDED, METRICS, RECIPE, REPORT
from flowrun.launcher.terminal.doing import doing
from flowrun.launcher.urls.object_store import ObjectStore, StoreError
from flowrun.launcher.urls.url_cache import UrlCopy

_TENSORS, _LOCK = ".safetensors", ".fetching"
_LONGEST_S, _LOOK_S = 600.0, 0.2
_TRIES = 5  # for a checkpoint that the run does not remove before it is here


def continue_at(url: str, folder: Path) -> None:
    """Fetch the newest checkpoint of a run to its folder, if the store is ahead of it; of several
    hosts that see the folder one does.  url: empty, if it has none.  Raises RecipeError, RunError.
    """
    if not url:
        return
    with _one_after_the_other(folder):
        for left in reversed(range(_TRIES)):
            copy = UrlCopy(ObjectStore.open(url, STORE), folder)
            here = max((kept.step for kept in find_all(folder) if kept.has_files()), default=-1)
            there = max(whole_checkpoints(copy.found), default=-1)
            if (folder / RECIPE).exists() and here >= there:
                return
            try:
                return _fetch(copy)
            except StoreError as error:  # a run that is under way removes what it keeps no longer
                if not left or not isinstance(error.__cause__, FileNotFoundError):
                    raise


@contextmanager
def _one_after_the_other(folder: Path) -> Iterator[None]:
    """Let one host after the other fetch to a folder.  One that is stopped is not waited for long,
    and a file system may have no locks: what two fetch is whole, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + _LONGEST_S
    with open(open_more(folder / _LOCK), "ab") as file:
        while time.monotonic() < until_s:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                doing("waiting for another host, which fetches the run")
                time.sleep(_LOOK_S)
            except OSError:
                break
            else:
                break
        yield


def fetch_run(url: str, step: int | None, best: bool, to: Path | None = None) -> Path:
    """Fetch a run that a command names by its URL; return its folder.

    step, best: of the checkpoint; None, False: the newest.  to: the folder, of a run that is to be
    continued; None: one of the cache, and the weights of the run's end do for a checkpoint.  Raises
    RecipeError, RunError.
    """
    copy = _open(url, to)
    if RECIPE not in copy.found:
        what = f"no run is kept there: it has no {RECIPE}."
        raise CommandLineError(url, what, f"Write the URL that a run had as {STORE}.")
    _fetch(copy, step, best)
    return copy.folder


def fetch_figures(url: str) -> Path:
    """Fetch what says how the runs at a URL, or below it, are going; return their folder.  Raises
    RecipeError, RunError.
    """
    copy = _open(url)
    paths = {name: name.split("/") for name in copy.found if f"{FOLDER}/" not in name}
    read = (RECIPE, METRICS, REPORT, ENDED)
    copy.get([name for name, path in paths.items() if path[-1] in read])
    return copy.folder


def _open(url: str, folder: Path | None = None) -> UrlCopy:
    try:
        return UrlCopy(ObjectStore.open(url, url), folder)
    except RecipeError as error:
        raise CommandLineError(url, error.problem, error.instead) from error


def _fetch(copy: UrlCopy, step: int | None = None, best: bool = False) -> None:
    """Fetch the tensors of a checkpoint that is whole, and all files without tensors."""
    there = whole_checkpoints(copy.found)
    plain = {name for name in copy.found if not name.startswith((".", f"{FOLDER}/"))}
    tensors = {name for name in plain if name.endswith(_TENSORS)}
    copy.get([*plain - tensors, *(name_in(one, ABOUT) for one in there)])
    if copy.caches and REPORT in plain and tensors and step is None and not best:
        copy.get(tensors)
        return
    step = _best_step(copy.folder) if best and step is None else step
    _get_whole(copy, {one: there[one] for one in there if step in (None, one)})


def _get_whole(copy: UrlCopy, there: Mapping[int, Sequence[str]]) -> None:
    """Get checkpoints, by step, until one is whole, the newest first.  there: their files."""
    for step in sorted(there, reverse=True):
        copy.get(there[step])
        if not Checkpoint((copy.folder / name_in(step, ABOUT)).parent, step).damage():
            return


def _best_step(folder: Path) -> int | None:
    train = yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8"))["train"]
    chosen = find_best(find_all(folder), train["keep_best"])
    return chosen.step if chosen else None
