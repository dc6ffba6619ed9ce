"""A folder of objects at a URL.  fsspec opens it, by the driver of its scheme (s3fs for s3://).

An object is there whole or not at all, of a disk (file://) too.  Drivers move the parts of a large
file at once, with checksums where the store has them, and try some requests again; what still fails
is tried again here, and sizes are compared.  Errors share no class: any but a refusal may pass.
"""

from __future__ import annotations

import random
import re
import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from flowrun.engine.errors import FlowrunError, RecipeError, RunError, refuse_as
from flowrun.engine.ir.files import PARTIAL, drop_partial, replacing_files
from flowrun.engine.runtime.process.give_way import NICE, give_way

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

S = TypeVar("S")
T = TypeVar("T")
AT_ONCE = 4  # files
_WAITS_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)  # between two tries, by half more or less
_REFUSALS = ("FileNotFoundError", "PermissionError", "NoCredentialsError")  # the last: botocore's
_URL = re.compile(r"[A-Za-z][\w+.-]*://.+")


def is_url(text: str) -> bool:
    """Return True for SCHEME://…, which no path of a file begins with."""
    return bool(_URL.fullmatch(text))


class StoreError(RunError):
    """A store does not do what it is asked."""


@dataclass(frozen=True)
class ObjectStore:
    """A folder of objects; names are relative to it.  Methods raise StoreError.

    url: of the folder.  driver: of its scheme.  root: the folder, as the driver names it.
    """

    url: str
    driver: AbstractFileSystem
    root: str

    @staticmethod
    def open(url: str, where: str) -> ObjectStore:
        """Find the driver, and list the folder.  where: the key or argument that has the URL.
        Raises RecipeError.
        """
        store = ObjectStore.connect(url, where)
        with store.refusing(where):
            store.find()
        return store

    @staticmethod
    def connect(url: str, where: str) -> ObjectStore:
        """Find the driver, and ask nothing.  Raises RecipeError."""
        try:
            from fsspec.core import url_to_fs

            driver, root = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:  # ValueError: an unknown scheme
            raise RecipeError(
                where,
                f"{url} cannot be opened: {error}.",
                "Write s3://BUCKET/FOLDER, gs://… or az://…, and install flowrun[stores] and the"
                " driver: s3fs, gcsfs or adlfs.",
            ) from None
        return ObjectStore(url.rstrip("/"), driver, root.rstrip("/"))

    @contextmanager
    def refusing(self, where: str) -> Iterator[None]:
        """Within, what the store refuses is a RecipeError at a key."""
        try:
            yield
        except StoreError as error:
            driver = type(self.driver).__module__.partition(".")[0]
            raise RecipeError(
                where,
                f"{self.url} cannot be used: {error.problem}",
                "Write the URL of a bucket that exists, and give the driver credentials for it:"
                f" {driver} says how.",
            ) from error

    def give_way(self, nice: int = NICE) -> None:
        """Set how far the driver's own thread gives way to others, if it has one (give_way.py)."""
        if isinstance(loop := getattr(self.driver, "loop", None), AbstractEventLoop):
            loop.call_soon_threadsafe(lambda: give_way(threading.current_thread(), nice))

    @property
    def name(self) -> str:
        """The last word of the URL."""
        return self.root.rpartition("/")[2]

    def find(self) -> dict[str, Mapping[str, object]]:
        """Return what the store says of each object, such as its `size` in bytes, by name; ""
        names the root, where it is an object.
        """
        found = self._try(lambda: self.driver.find(self.root, detail=True))
        every = {name[len(self.root) + 1 :]: about for name, about in found.items()}
        names = {name: every[name] for name in every if f"{PARTIAL}/" not in name}
        for name in names:  # all who may write to a bucket choose them
            if name.startswith("/") or ".." in name.split("/"):
                raise StoreError(self.url, f"the object {name!r} has no place in a folder.")
        return names

    def put(self, name: str, file: Path) -> None:
        """Put a file; one that grows is put as it is by then."""

        def act() -> None:
            size = file.stat().st_size
            self._make(name, lambda path: self.driver.put_file(str(file), path))
            if self.driver.info(self._path(name))["size"] < size:
                raise OSError(f"not all of the {size:,} bytes of {name} have arrived")

        self._try(act)

    def write(self, name: str, content: bytes) -> None:
        """Make an object of bytes."""
        self._try(lambda: self._make(name, lambda path: self.driver.pipe_file(path, content)))

    def read(self, name: str) -> str:
        """Return an object's text."""
        return bytes(self._try(lambda: self.driver.cat_file(self._path(name)))).decode()

    def read_ranges(self, starts: list[int], stops: list[int]) -> list[bytes]:
        """Return ranges of the root, an object; those that lie behind its end are shorter."""
        roots = [self.root] * len(starts)
        return self._try(
            lambda: [*map(bytes, self.driver.cat_ranges(roots, starts, stops, on_error="raise"))]
        )

    def get(self, name: str, file: Path) -> None:
        """Make or replace a file, whole."""

        def act() -> None:
            with replacing_files(file.parent) as made:
                self.driver.get_file(self._path(name), str(made / file.name))
                size = self.driver.info(self._path(name))["size"]
                if (made / file.name).stat().st_size != size:
                    raise OSError(f"not all of the {size:,} bytes of {name} have arrived")

        self._try(act)

    def remove(self, names: Iterable[str]) -> None:
        """Remove the objects that are there."""

        def act(name: str) -> None:
            with suppress(FileNotFoundError):
                self.driver.rm_file(self._path(name))

        each(lambda name: self._try(lambda: act(name)), names)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _make(self, name: str, write: Callable[[str], object]) -> None:
        """Write an object, at a path; a disk's driver would leave half of it, if it is killed."""
        folder, _, last = self._path(name).rpartition("/")
        if on_disk := self.url.startswith("file:"):
            drop_partial(Path(folder))  # which a process left that was killed
        with replacing_files(Path(folder)) if on_disk else nullcontext(folder) as made:
            write(f"{made}/{last}")

    def _try(self, act: Callable[[], T]) -> T:
        waits = iter(_WAITS_S)
        while True:
            try:
                with refuse_as(self._describe):
                    return act()
            except StoreError as error:
                wait_s = next(waits, None)
                if wait_s is None or type(error.__cause__).__name__ in _REFUSALS:
                    raise
            time.sleep(wait_s * random.uniform(0.5, 1.5))

    def _describe(self, error: Exception) -> FlowrunError:
        lines = str(error).splitlines() or [""]
        return StoreError(self.url, f"{type(error).__name__}: {lines[0].rstrip('.')}.")


def nothing_at(url: str, where: str) -> RecipeError:
    """Return the error of a key whose URL names no object."""
    return RecipeError(where, f"there is no object at {url}.", "Write the URL of what is read.")


def each(act: Callable[[S], T], files: Iterable[S]) -> list[T]:
    """Do the same with several files, some at once; return what comes of it.  Raises what one
    raises, after the others.
    """
    with ThreadPool(AT_ONCE) as pool:  # of daemons: a process that is to end does not wait
        return pool.map(act, files, chunksize=1)
