"""Plan mutated recipes, and read damaged files, each in a fork of this process; count what comes
out.

    python tests/fuzz/fuzz.py --number 10000 --seed 0
    python tests/fuzz/fuzz.py --number 1 --seed 1234 --show      one case again, with what it says
    python tests/fuzz/fuzz.py --number 2000 --files              damaged files, in place of recipes

A case may use 30 s of a core and 4 GiB.  Exit status 1 if any case is a fault (judge.py).
"""

import argparse
import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flowrun.engine.errors import FlowrunError
from flowrun.launcher.cli import main as flowrun
from flowrun.launcher.command_line.app import show_errors
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe_errors import explain
from fuzz.damaged_files import MAKE, DamagedCase, damage_case, make_damaged_case, make_place
from fuzz.judge import COMPOSED, FAULTS, HANG, WELL, judge
from fuzz.mutations import FILE, Case, make_case

MOST_S, MOST_BYTES = 30, 4 * 2**30
_NAME = "mutated.yaml"
_WALL_S = 4 * MOST_S  # of a case that waits and does not compute


@dataclass(frozen=True)
class Verdict:
    """A verdict is what became of a case.  seconds: of a core."""

    case: Case | DamagedCase
    outcome: str
    text: str
    seconds: float

    def __str__(self) -> str:
        words = " ".join(word if len(word) < 200 else f"{word[:200]}…" for word in self.case.words)
        first = "\n    ".join(self.text.splitlines()[:4])
        file = self.case.file if isinstance(self.case, DamagedCase) else ""
        what = f"{self.case.seed} {self.case.kind}: {self.outcome}"
        return f"{what}\n  {words} {file}\n    {first[:600]}"


def warm_up() -> None:
    """Import here what each case would import anew; nothing is captured, as forks could not."""
    from flowrun.engine.torch_internals import import_tracer
    from flowrun.launcher.commands import verify  # noqa: F401
    from flowrun.launcher.run import plan  # noqa: F401

    import_tracer()


def warm_up_files() -> None:
    import transformers

    from flowrun.launcher.commands import evaluate, export, export_folder, write_text  # noqa: F401
    from flowrun.launcher.model.hugging_face import convert_models

    convert_models.import_transformers()
    transformers.AutoModelForCausalLM, transformers.AutoTokenizer, transformers.LlamaForCausalLM  # noqa: B018


def try_cases(seeds: Iterable[int], most_plans: int = sys.maxsize) -> Iterator[Verdict]:
    """Try the cases of some seeds, one after another, in a folder of their own.

    most_plans: of those that compose, so many are planned, each in a fork; the others are composed.
    """
    left = most_plans
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for seed in seeds:
                verdict = compose_case(make_case(seed))
                if verdict.outcome == COMPOSED and left:
                    verdict, left = plan_case(verdict.case, Path(folder)), left - 1
                yield verdict
        finally:
            os.chdir(here)


def compose_case(case: Case) -> Verdict:
    words = _words_of(case)
    begin, text = time.process_time(), ""
    if any(word.startswith("-") for word in words):  # what the command line itself has to judge
        return Verdict(case, COMPOSED, text, 0.0)
    try:
        with _limited():
            load(words)
            outcome = COMPOSED
    except FlowrunError as error:
        text = explain(error, words)
        outcome = judge(2, text, 0, MOST_BYTES)
    except Exception:
        text = traceback.format_exc()
        outcome = judge(1, text, 0, MOST_BYTES)
    except _TookTooLong:
        outcome = HANG
    return Verdict(case, outcome, text, time.process_time() - begin)


class _TookTooLong(BaseException):
    """Composing has used its seconds."""


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _words_of(case: Case) -> list[str]:
    """The command line, once the recipe is written to the working directory."""
    Path(_NAME).write_bytes(case.file)
    return [word.replace(FILE, _NAME) for word in case.words]


def plan_case(case: Case, folder: Path) -> Verdict:
    """`flowrun plan` a case in a fork of this process, in `folder`, the working directory."""
    words = _words_of(case)
    code, text, usage = _run_bounded(lambda: flowrun(["plan", *words]), folder)
    outcome = judge(code, text, usage.ru_maxrss * 1024, MOST_BYTES)
    return Verdict(case, outcome, text, usage.ru_utime + usage.ru_stime)


def try_damaged(seeds: Iterable[int]) -> Iterator[Verdict]:
    """Try the cases of damaged files of some seeds, each in a copy of one place."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place = folder / "whole"
        place.mkdir()
        code, text, _ = _run_bounded(lambda: make_place(place), folder, place)
        if code:
            raise RuntimeError(f"the place of whole files cannot be made: {text}")
        for seed in seeds:
            case, here = make_damaged_case(seed, place), folder / str(seed)
            damage_case(case, place, here)
            code, text, usage = _run_bounded(partial(_command, case.words), folder, here)
            outcome = judge(code, text, usage.ru_maxrss * 1024, MOST_BYTES)
            yield Verdict(case, outcome, text, usage.ru_utime + usage.ru_stime)
            shutil.rmtree(here)


def _command(words: Sequence[str]) -> None:
    """Run a command, or make the model and the data of a recipe, as all commands do."""
    if words[0] != MAKE:
        flowrun(list(words))
    from flowrun.launcher.job.materials import make_materials

    with show_errors(list(words[1:]), None):
        make_materials(load(list(words[1:])), values=False)


def _run_bounded(
    work: Callable[[], object], folder: Path, place: Path | None = None
) -> tuple[int, str, resource.struct_rusage]:
    """Run a command in a fork of this process; return its status, stderr, and what it used.

    folder: for what it prints.  place: its working directory, with a cache of its own; None: this
    one's.
    """
    out, err = folder / "out.txt", folder / "err.txt"
    sys.stdout.flush()
    child = os.fork()
    if not child:
        if place:
            os.chdir(place)
            os.environ["XDG_CACHE_HOME"] = str(place / "cache")
        _work(work, out, err)
    _, status, usage = os.wait4(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it forked itself, if it was killed
    return os.waitstatus_to_exitcode(status), err.read_text(errors="replace"), usage


def _work(work: Callable[[], object], out: Path, err: Path) -> NoReturn:
    """Do the work within bounds, and end this process."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_S, MOST_S + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_WALL_S)
    for descriptor, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    status = 1
    try:
        work()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except typer.Exit as ended:
        status = ended.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def table(verdicts: Iterable[Verdict]) -> str:
    """Count outcomes by kind of mutation."""
    counts = Counter((verdict.outcome, verdict.case.kind) for verdict in verdicts)
    kinds = sorted({kind for _, kind in counts})
    rows = [("outcome", *kinds, "all")]
    for outcome in (*WELL, *FAULTS):
        numbers = [counts[outcome, kind] for kind in kinds]
        rows.append((outcome, *map(str, numbers), str(sum(numbers))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> int:
    """Try the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--number", type=int, default=500, help="of cases")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--plans", type=int, default=sys.maxsize, help="at most; 0: compose alone")
    parser.add_argument("--files", action="store_true", help="damaged files, not recipes")
    parser.add_argument("--show", action="store_true", help="what each case is and says")
    given = parser.parse_args()
    (warm_up_files if given.files else warm_up)()
    verdicts: list[Verdict] = []
    with contextlib.suppress(KeyboardInterrupt):
        seeds = range(given.seed, given.seed + given.number)
        for verdict in try_damaged(seeds) if given.files else try_cases(seeds, given.plans):
            verdicts.append(verdict)
            if given.show:
                print(verdict.case.file, verdict.text, sep="\n----\n")
            if given.show or verdict.outcome in FAULTS:
                print(verdict, flush=True)
    print(table(verdicts))
    print(f"{sum(verdict.seconds for verdict in verdicts):.0f} s of a core")
    return int(any(verdict.outcome in FAULTS for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
