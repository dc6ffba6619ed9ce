"""A run's folder, kept at a URL (train.store): the folder on the disk is the working copy.

A thread puts what is new there, the newest checkpoint first; ranks never wait for it.  A
checkpoint's files come first, then metrics.jsonl and the rest of the folder, and last its
checkpoint.json: without it nothing of the checkpoint counts.  What the run removes is removed there
too.  What fails is tried again, without what has arrived.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from uuid import uuid4

from flowrun.engine.errors import FlowrunError, RecipeError, RunError, refuse_as
from flowrun.engine.ir.files import PARTIAL
from flowrun.engine.runtime.process.call_stack import in_one_chunk
from flowrun.engine.runtime.process.give_way import give_way
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.schema import STORE
from flowrun.launcher.store.checkpoint import ABOUT, FOLDER, Checkpoint, find_all
from flowrun.launcher.store.run_files import ENDED, REPORT
from flowrun.launcher.urls.object_store import AT_ONCE, ObjectStore, StoreError, each

_WRITER = ".writer"  # names the launcher that writes there: its epoch, its door, a random name
_FILE = re.compile(rf"{FOLDER}/step_(\d{{8,}})/(.+)")
_AGAIN_S = 30.0  # after a failure
_NOTE_S = 0.3


class Taken(StoreError):
    """Another launcher writes to the store now."""


class KeptRun:
    """The copy of a run's folder in a store.

    putting: step of the checkpoint that is under way, which stays on the disk until it is there;
    -1: none.  note: takes a line about what fails, in any thread.  replaced: called where another
    launcher writes there now.  before: epoch and door of who wrote there before.
    """

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self.store, self.folder, self.putting = store, folder, -1
        self.note: Callable[[str], object] = str
        self.replaced: Callable[[RunError], object] = str
        self.before = self._read_writer()[:2]
        self._name = str(uuid4())
        self._failure = ""
        self._put: dict[str, tuple[int, int]] = {}  # file -> size and time when it was put
        self._begun: tuple[int, str] | None = None  # the checkpoint that is half there
        self._writer = ""
        self._wanted, self._ends = threading.Event(), False
        self._slots = threading.Semaphore(AT_ONCE)  # of files that move
        self._thread: threading.Thread | None = None

    def claim(self, epoch: int = 0, door: str = "", follows: bool = False) -> None:
        """Write to the store, for this launcher alone; its run has the lease of the folder.

        epoch, door: of its hub.  follows: it was a host of the run, and takes the place of the
        first.  Raises RecipeError; RunError where another has.
        """
        latest, _, name = self._read_writer()
        if (follows or self._writer) and latest >= epoch and name not in ("", self._name):
            raise self._lost()
        if not self._writer and not follows:  # else hosts have agreed where they begin
            self.check_newest(find_all(self.folder))
        store, self._writer = self.store, f"{epoch} {door} {self._name}"
        self._put = dict.fromkeys((REPORT, ENDED), (-1, -1))  # of an end before, as it may be
        with store.refusing(STORE):
            store.write(_WRITER, self._writer.encode())
            there = whole_checkpoints(store.find())
            for here in filter(Checkpoint.has_files, find_all(self.folder)):
                if here.step in there and store.read(name_in(here.step, ABOUT)) == here.text():
                    files = [ABOUT, *here.about().files]
                    self._put |= self._stamps(name_in(here.step, file) for file in files)

    def check_newest(self, here: Sequence[Checkpoint]) -> None:
        """Raise RecipeError if the store has a newer checkpoint than `here`, which would be lost:
        of another run, or of this one after it has continued elsewhere.
        """
        there = max(whole_checkpoints(self.store.find()), default=-1)
        if there > max((kept.step for kept in here), default=-1):
            url = self.store.url
            raise RecipeError(
                STORE,
                f"{url} has a checkpoint of step {there}, and this run has none as new.",
                f"flowrun resume {url} continues from there; a new run needs another URL.",
            )

    def _read_writer(self) -> tuple[int, str, str]:
        """Return the epoch, the door and the name of who writes there, as far as it is known."""
        try:
            epoch, door, name = self.store.read(_WRITER).split(" ")
            return int(epoch), door, name
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
        except ValueError:
            pass  # of an earlier flowrun
        return 0, "", ""

    def _lost(self) -> Taken:
        return Taken(self.store.url, "another launcher has taken the store of this run.")

    def look(self) -> None:
        """Let the thread put what is new."""
        if self._thread is None:
            run = in_one_chunk(self._serve)
            self._thread = threading.Thread(target=run, name=STORE, daemon=True)
            self._thread.start()
        self._wanted.set()

    def rest(self) -> None:
        """Wait until no file moves, and let none begin until go_on: this process forks."""
        for _ in range(AT_ONCE):
            self._slots.acquire()

    def go_on(self) -> None:
        """End a rest, and put what is new."""
        self._slots.release(AT_ONCE)
        self.look()

    def end(self, say: Callable[[str], None], error: BaseException | None = None) -> None:
        """Wait until all is there, and say so.  Raises RunError if it fails, unless the run ends
        with an `error`.
        """
        if self._thread is None:
            return
        self._ends = True
        give_way(self._thread, 0)
        self.store.give_way(0)
        self._wanted.set()
        self._thread.join(_NOTE_S)
        if self._thread.is_alive():
            say(f"waiting until {self.store.url} has the files of the run")
            self._thread.join()
        if not self._failure:
            say(f"{self.store.url} has all files of the run")
            return
        what = f"{self.folder} has files that {self.store.url} lacks: {self._failure}"
        if error:
            say(what)
        else:
            again = f"train.resume=auto hydra.run.dir={self.folder}"
            raise RunError(STORE, what, f"The same command with {again} puts them there.")

    # ---- the thread -----------------------------------------------------------------------------

    def _serve(self) -> None:
        give_way(threading.current_thread())
        self.store.give_way()
        ends = False
        while not ends:
            self._wanted.wait(_AGAIN_S if self._failure else None)
            self._wanted.clear()
            ends = self._ends
            try:
                with refuse_as(lambda error: StoreError(self.store.url, f"{error!r}.")):
                    self.put_all()
                self._failure = ""
            except FlowrunError as error:
                if isinstance(error, Taken):
                    self.replaced(error)
                if not self._failure:
                    self.note(f"{STORE}: {self.store.url}: {error.problem} It is tried again.")
                self._failure = error.problem
            self.putting = -1

    def put_all(self) -> None:
        """Make the store what the folder is.  Raises StoreError, OSError."""
        self._check_writer()
        files = self._files()
        gone = {name for name in self._put if not _FILE.fullmatch(name)} - files
        self.store.remove(gone)
        self._put = {name: self._put[name] for name in self._put.keys() - gone}
        put = [self._put_checkpoint(kept) for kept in reversed(find_all(self.folder))]
        files = self._files()
        if not any(put):  # else they came with a checkpoint
            self._send(files - {REPORT})
        here = find_all(self.folder)
        steps = {kept.step for kept in here}
        there = self.store.find()
        missing = {kept.step for kept in here if kept.has_files()} - whole_checkpoints(there).keys()
        if not missing:  # else one is new since
            self._send(files & {REPORT})  # it says that all is there
            if steps:
                self._remove(lambda step: step not in steps, there)

    def _put_checkpoint(self, new: Checkpoint) -> bool:
        """Return whether it was not there."""
        about = name_in(new.step, ABOUT)
        try:
            if not new.has_files() or self._stamps([about])[about] == self._put.get(about):
                return False  # it is there, and of one that was fetched tensors may be there alone
            self.putting = new.step
            if self._begun != (new.step, new.text()):
                there = self.store.find()
                self._remove(lambda step: step == new.step, there)  # of a run that was gone back on
                self._begun = new.step, new.text()
            self._send(name_in(new.step, file) for file in new.about().files)
            self._send(self._files() - {REPORT})
            self._check_writer()
            self._send([about])
            return True
        except (StoreError, FileNotFoundError):
            if new.folder.is_dir():  # else the run has just removed it
                raise
            return False

    def _check_writer(self) -> None:
        if self.store.read(_WRITER) != self._writer:
            raise self._lost()

    def _files(self) -> set[str]:
        """Return the names of all visible files outside of checkpoints."""
        found = (file.relative_to(self.folder) for file in self.folder.rglob("*") if file.is_file())
        return {
            name.as_posix()
            for name in found
            if name.parts[0] != FOLDER
            and not any(part.startswith(".") or part.endswith(PARTIAL) for part in name.parts)
        }

    def _send(self, names: Iterable[str]) -> None:
        """Put the files that have changed since they were put."""
        stamps = self._stamps(names)

        def put(name: str) -> None:
            with self._slots:
                self.store.put(name, self.folder / name)
            self._put[name] = stamps[name]

        each(put, [name for name, stamp in stamps.items() if self._put.get(name) != stamp])

    def _stamps(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        about = {name: (self.folder / name).stat() for name in names}
        return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in about.items()}

    def _remove(self, goes: Callable[[int], bool], there: Iterable[str]) -> None:
        """Remove checkpoints of some steps, and halves of them; checkpoint.json first."""
        found = ((name, _FILE.fullmatch(name)) for name in there)
        names = {name for name, match in found if match and goes(int(match[1]))}
        abouts = {name for name in names if name.endswith(ABOUT)}
        self.store.remove(abouts)
        self.store.remove(names - abouts)


def open_store(url: str, folder: Path, resumed: bool, joins: bool = False) -> KeptRun | None:
    """Look at the store of a run.  url: empty, if it has none.  joins: others may be writing there,
    and this host begins where they are.  Raises RecipeError.
    """
    if not url:
        return None
    kept = KeptRun(ObjectStore.open(url, STORE), folder)
    if not joins:
        kept.check_newest(find_all(folder) if resumed else ())
    return kept


def keep_complete(recipe: Recipe, folder: Path) -> None:
    """Put what the store of a complete run of one host lacks there.  Raises FlowrunError."""
    if recipe.launch.num_hosts == 1 and (kept := open_store(recipe.train.store, folder, True)):
        kept.claim()
        kept.put_all()


def name_in(step: int, file: str) -> str:
    """Return the name of a checkpoint's file."""
    return f"{FOLDER}/step_{step:08d}/{file}"


def whole_checkpoints(names: Iterable[str]) -> dict[int, list[str]]:
    """Return the names of each checkpoint's files, by step, of those that have checkpoint.json."""
    found: dict[int, list[str]] = {}
    for name in sorted(names):
        if match := _FILE.fullmatch(name):
            found.setdefault(int(match[1]), []).append(name)
    return {step: files for step, files in found.items() if name_in(step, ABOUT) in files}
