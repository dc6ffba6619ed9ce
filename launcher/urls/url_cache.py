"""Objects of a URL, copied to a folder of the disk: one of the user's cache, or another."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flowrun.engine.errors import ArgumentError, RecipeError
from flowrun.engine.ir.files import DAMAGED, replace_text
from flowrun.engine.ir.own_files import Unusable, cache_folder, drop_unused, own_folder
from flowrun.launcher.terminal.doing import doing
from flowrun.launcher.terminal.units import size
from flowrun.launcher.urls.object_store import ObjectStore, each, is_url, nothing_at

MOST_BYTES = 1 << 36  # what the cache may hold of URLs; the longest unused goes first
HUB = "hf://"
_ON_HUB = re.compile(HUB + r"(datasets/)?([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.+))?")
_PREFIX, _STAMPS = "url-", ".fetched"  # names of a folder of the cache, and of a file in it


class UrlCopy:
    """A folder with objects of a store.

    One of the cache keeps what the store has said of each object, its size and version included:
    what has changed there is got again.

    found: name -> what the store says of it.  caches: the folder is one of the cache.
    """

    def __init__(self, store: ObjectStore, folder: Path | None = None) -> None:
        """folder: None: one of the cache."""
        self.store, self.found, self.caches = store, store.find(), folder is None
        self._had: dict[str, str] = {}
        if folder is None:
            digest = hashlib.sha256(store.url.encode()).hexdigest()
            folder = own_cache() / f"{_PREFIX}{digest[:16]}-{store.name}"
            with suppress(OSError, *DAMAGED):
                self._had = json.loads((folder / _STAMPS).read_text(encoding="utf-8"))
                os.utime(folder)
        self.folder = folder

    def get(self, names: Collection[str]) -> None:
        """Get what is not there.  Raises StoreError."""
        for name in self._had.keys() - self.found.keys():  # removed there
            self.path(name).unlink(missing_ok=True)
        had = {name: stamp for name, stamp in self._had.items() if name in self.found}
        stamps = {name: str(self.found[name]) for name in names}
        new = [n for n in names if had.get(n) != stamps[n] or not self.path(n).exists()]
        total = sum(int(str(self.found[name]["size"])) for name in new)
        if self.caches:
            drop_unused(self.folder.parent, f"{_PREFIX}*", MOST_BYTES - total, kept=1)
        doing(f"fetching {len(new)} files of {self.store.url}, {size(total)}")
        each(lambda name: self.store.get(name, self.path(name)), new)
        self._had = had | stamps
        if self.caches:
            replace_text(self.folder / _STAMPS, json.dumps(self._had))

    def path(self, name: str) -> Path:
        """Return the file of an object; the root has the URL's last word as its name."""
        return self.folder / (name or self.store.name)


def own_cache() -> Path:
    """Return the folder of flowrun's cache.  Raises RecipeError for one that others may change."""
    try:
        return own_folder(cache_folder())
    except (Unusable, OSError) as error:
        raise RecipeError(
            str(cache_folder()),
            f"it cannot hold what is fetched: {error}.",
            "Set XDG_CACHE_HOME to a folder of your own.",
        ) from None


def on_disk(path: str, where: str) -> Path:
    """Return a path as it is, and a URL as the path of a copy of its file or folder.

    where: key of the recipe that has it.  Raises RecipeError, RunError.
    """
    if not is_url(path):
        return Path(path).expanduser()
    if path.startswith(HUB):
        return _of_hub(path, where)
    copy = UrlCopy(ObjectStore.open(path, where))
    if not copy.found:
        raise nothing_at(path, where)
    copy.get(copy.found)
    return copy.path("") if "" in copy.found else copy.folder


def _of_hub(path: str, where: str) -> Path:
    """Return a folder or a file of the hub in the cache of huggingface_hub, which fetches it; with
    HF_HUB_OFFLINE=1 it has to be there.  Raises RecipeError.
    """
    named = _ON_HUB.fullmatch(path)
    try:
        from huggingface_hub import snapshot_download

        data, name, revision, inside = named.groups() if named else ("", "", None, None)
        kind, only = "dataset" if data else "model", [inside, f"{inside}/*"] if inside else None
        folder = snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=only)
        if (found := Path(folder, inside or "")).exists():
            return found
        problem = f"{folder} has no {inside}"
    except (ImportError, OSError, ValueError) as error:
        problem = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    raise RecipeError(
        where,
        f"{path} cannot be had of the hub: {problem}.",
        "Write hf://ORG/NAME or hf://datasets/ORG/NAME, with @REVISION and /FILE where needed, and"
        " install flowrun[text].",
    )


def data_on_disk(path: str) -> Path:
    """Return what on_disk does, for a data set's argument `path`.  Raises ArgumentError."""
    with refusing_path():
        return on_disk(path, "path")


@contextmanager
def refusing_path() -> Iterator[None]:
    """Within, what is refused is an ArgumentError of a data set's `path`."""
    try:
        yield
    except RecipeError as error:
        raise ArgumentError("path", error.problem, error.instead) from error
