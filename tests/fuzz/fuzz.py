"""Plan mutated recipes, each in a fork of this process, and count what comes out.

    python tests/fuzz/fuzz.py --number 10000 --seed 0
    python tests/fuzz/fuzz.py --number 1 --seed 1234 --show      one case again, with what it says

A case may use 30 s of a core and 4 GiB.  Exit status 1 if any case is a fault (judge.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flowrun.engine.errors import FlowrunError
from flowrun.launcher.cli import main as flowrun
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe_errors import explain
from fuzz.judge import COMPOSED, FAULTS, HANG, WELL, judge
from fuzz.mutations import FILE, KINDS, Case, make_case

MOST_S, MOST_BYTES = 30, 4 * 2**30
_NAME = "mutated.yaml"
_WALL_S = 4 * MOST_S  # of a case that waits and does not compute


@dataclass(frozen=True)
class Verdict:
    """A verdict is what became of a case.  seconds: of a core."""

    case: Case
    outcome: str
    text: str
    seconds: float

    def __str__(self) -> str:
        words = " ".join(word if len(word) < 200 else f"{word[:200]}…" for word in self.case.words)
        first = "\n    ".join(self.text.splitlines()[:4])
        return f"{self.case.seed} {self.case.kind}: {self.outcome}\n  {words}\n    {first[:600]}"


def warm_up() -> None:
    """Import here what each case would import anew; nothing is captured, as forks could not."""
    from flowrun.engine.capture.capture import import_tracer
    from flowrun.launcher.commands import verify  # noqa: F401
    from flowrun.launcher.run import plan  # noqa: F401

    import_tracer()


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
    """Compose a case in this process and the working directory."""
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
    words, out, err = _words_of(case), folder / "out.txt", folder / "err.txt"
    sys.stdout.flush()
    child = os.fork()
    if not child:
        _plan(words, out, err)
    _, status, usage = os.wait4(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it forked itself, if it was killed
    text = err.read_text(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    outcome = judge(code, text, usage.ru_maxrss * 1024, MOST_BYTES)
    return Verdict(case, outcome, text, usage.ru_utime + usage.ru_stime)


def _plan(words: list[str], out: Path, err: Path) -> None:
    """`flowrun plan WORDS` in this process, which ends."""
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
        flowrun(["plan", *words])
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
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
    rows = [("outcome", *KINDS, "all")]
    for outcome in (*WELL, *FAULTS):
        numbers = [counts[outcome, kind] for kind in KINDS]
        rows.append((outcome, *map(str, numbers), str(sum(numbers))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> int:
    """Try the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--number", type=int, default=500, help="of cases")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--plans", type=int, default=sys.maxsize, help="at most; 0: compose alone")
    parser.add_argument("--show", action="store_true", help="what each case is and says")
    given = parser.parse_args()
    warm_up()
    verdicts: list[Verdict] = []
    with contextlib.suppress(KeyboardInterrupt):
        for verdict in try_cases(range(given.seed, given.seed + given.number), given.plans):
            verdicts.append(verdict)
            if given.show:
                print(verdict.case.file.decode(errors="replace"), verdict.text, sep="\n----\n")
            if given.show or verdict.outcome in FAULTS:
                print(verdict, flush=True)
    print(table(verdicts))
    print(f"{sum(verdict.seconds for verdict in verdicts):.0f} s of a core")
    return int(any(verdict.outcome in FAULTS for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
