"""Strike runs at random moments, and judge how they end and go on.

    python tests/chaos/chaos.py --runs 200 --seed 0
    python tests/chaos/chaos.py --seed 17 --show                 one of them again
    python tests/chaos/chaos.py --runs 50 --only "launcher SIGTERM" --ranks 2

Each run trains a small GPT on 4 ranks, or an MLP on 2, with checkpoints; a blow hits it (blows.py).
It must end, or go on by itself, within a bound, name who was struck, leave nothing behind, and,
started again, end with the weights and losses of an undisturbed run.  Status 1 if one does not.
"""

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos.blows import BLOWS, BOUND_S, LINKED, ONE, SAME_COMMAND, STOP, Blow, Strike, make_strike
from chaos.hosts_of_run import StruckRun
from chaos.verdicts import Observed, faults, table
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import find_all
from support.runs.command import free_port, losses, workplace
from support.runs.linked_hosts import LinkedHosts, find_obstacle

_LINGER_S = 2  # a worker whose launcher was killed ends a moment after it
_EARLY = 0.25  # share of the moments before workers are there
_EDGE, _EDGE_S = 0.1, 1.0  # share of the moments before the first step, and after the last
UNDISTURBED_S = 180  # a machine with other work


@dataclass(frozen=True)
class Subject:
    """A subject is what chaos strikes: the words of a command line, and its number of ranks."""

    words: tuple[str, ...]
    ranks: int


SMALL2 = ("recipe=small", "train.steps=60", "train.save_every=8", "eval.batches=0", "optim=adamw")
SMALL4 = (
    *("recipe=gpt_hybrid", "model.width=32", "model.depth=2", "data.max_bytes=100000"),
    *("train.batch_size=8", "train.micro_batches=4", "train.steps=40", "train.save_every=4"),
    *("eval.batches=0", "engine.check_capture=false"),
)
SUBJECTS = {2: Subject(SMALL2, 2), 4: Subject(SMALL4, 4)}


@dataclass(frozen=True)
class Undisturbed:
    """What a run of one shape is if nobody strikes it.

    seconds: from the start to the end.  start_s: to the moment that its workers are there.
    """

    digest: str
    losses: tuple[float, ...]
    seconds: float
    start_s: float


class Chaos:
    """Runs one subject, again and again, in folders of its own."""

    def __init__(self, subject: Subject, place: Path) -> None:
        self.subject = subject
        self.place = place
        self.undisturbed: dict[str, Undisturbed] = {}

    def strike(self, strike: Strike) -> Observed:
        blow = strike.blow
        known = self._undisturbed_of(blow)
        folder = self._new_folder(f"seed{strike.seed}")
        run = self._start(blow, folder, "struck", (*self.subject.words, *blow.words))
        try:
            return self._judge(run, strike, known, folder)
        finally:
            run.kill()

    def _judge(self, run: StruckRun, strike: Strike, known: Undisturbed, folder: Path) -> Observed:
        """Strike a run that has started, and see how it ends and goes on."""
        blow = strike.blow
        missed = not self._wait_for_moment(run, strike, known, folder)
        run.strike(strike)
        begin = time.monotonic()
        run.follow(blow)
        end = begin + blow.within_s
        if blow.goes_on or blow.number == STOP:  # a frozen host ends when it wakes, not before
            end = time.monotonic() + BOUND_S + known.seconds * blow.goes_on
        run.wait(end - time.monotonic())
        seconds = time.monotonic() - begin
        ends = [host.ended() for host in run.hosts]
        left = _processes_left(run)
        run.kill()
        over = (folder / "run" / "report.json").exists()
        began_again = (folder / "run" / "restarts.jsonl").exists()
        waited = blow.back_s is not None and seconds > blow.back_s
        lost = _steps_lost(folder / "run")
        resumed = "" if over else self._go_on(strike, folder, len(known.losses))
        return Observed(
            strike=strike,
            ends=ends,
            seconds=seconds,
            missed=missed or (over and not (began_again or waited)),
            lost=lost,
            left=[*left, *_files_left(folder)],
            resumed=resumed,
            differs="" if resumed else _difference(folder, known),
        )

    def _wait_for_moment(
        self, run: StruckRun, strike: Strike, known: Undisturbed, folder: Path
    ) -> bool:
        """Wait for the moment of a strike; False if the run is over by then.

        It is a share of the time until workers are there, or else of the steps that they do, with
        some time before the first and after the last.
        """
        early = 0.0 if strike.blow.comes_late else _EARLY
        if strike.moment < early:
            return not run.wait(strike.moment / early * known.start_s)
        within_s = 5 * known.seconds
        run.wait_for_workers(folder / "run" / "plan.txt", self._ranks(strike.blow), within_s)
        share = (1 + 2 * _EDGE) * (strike.moment - early) / (1 - early) - _EDGE
        if share < 0:
            return not run.wait((1 + share / _EDGE) * _EDGE_S)
        steps = round(min(1.0, share) * len(known.losses))
        run.wait_for_steps(folder / "run" / "metrics.jsonl", steps)
        return not run.wait(max(0.0, share - 1) / _EDGE * _EDGE_S)

    def _go_on(self, strike: Strike, folder: Path, steps: int) -> str:
        """Go on with a run of so many steps that has ended, by `flowrun resume` or by the same
        command; return what it says if it fails.
        """
        words = (*self.subject.words, *SAME_COMMAND)
        may_change = strike.blow.words != SAME_COMMAND
        saved = max((checkpoint.step for checkpoint in find_all(folder / "run")), default=0)
        if 0 < saved < steps and may_change and strike.seed % 2:
            words = ("resume", str(folder / "run"))
        run = self._start(strike.blow, folder, "resumed", words)
        in_time = run.wait(UNDISTURBED_S)
        ends = [host.ended() for host in run.hosts]
        run.kill()
        if in_time and all(end.status == 0 for end in ends):
            return ""
        return ends[0].printed[-2000:] or "it says nothing"

    def _undisturbed_of(self, blow: Blow) -> Undisturbed:
        if blow.shape not in self.undisturbed:
            folder = self._new_folder(f"undisturbed {blow.shape}")
            run = self._start(blow, folder, "run", self.subject.words)
            begin = time.monotonic()  # the first start takes long (support/runs/warm_start.py)
            plan = folder / "run" / "plan.txt"
            run.wait_for_workers(plan, self._ranks(blow), UNDISTURBED_S)
            there = time.monotonic()
            run.wait(UNDISTURBED_S)
            end = time.monotonic()
            said = [host.ended() for host in run.hosts]
            run.kill()
            assert [each.status for each in said] == [0] * len(said), said
            self.undisturbed[blow.shape] = Undisturbed(
                _digest(folder), tuple(losses(folder / "run")), end - begin, there - begin
            )
        return self.undisturbed[blow.shape]

    def _start(self, blow: Blow, folder: Path, name: str, words: Sequence[str]) -> StruckRun:
        if words[0] != "resume":
            words = [*words, f"hydra.run.dir={folder / 'run'}"]
        if blow.shape == ONE:
            return StruckRun(folder, name, [words])
        linked = LinkedHosts() if blow.shape == LINKED else None
        endpoint = linked.endpoint if linked else f"127.0.0.1:{free_port()}"
        meet = ("launch.nnodes=2", f"launch.rdzv_endpoint={endpoint}")
        each = [[*words, *meet, f"launch.node_rank={host}"] for host in range(2)]
        return StruckRun(folder, name, each, linked)

    def _ranks(self, blow: Blow) -> int:
        return self.subject.ranks // (1 if blow.shape == ONE else 2)

    def _new_folder(self, name: str) -> Path:
        folder = self.place / name.replace(" ", "_").replace(",", "")
        folder.mkdir()
        return workplace(folder)


def _difference(folder: Path, known: Undisturbed) -> str:
    """What of the run's results is unlike those of an undisturbed run; empty if nothing is."""
    found = losses(folder / "run")
    first = next(
        (k for k, two in enumerate(zip(found, known.losses, strict=False)) if two[0] != two[1]),
        None,
    )
    unlike = {
        f"{len(found)} losses": len(found) != len(known.losses),
        f"the loss of step {first}": first is not None,
        "weights": (digest := _digest(folder)) != known.digest,
    }
    said = ", ".join(what for what, differs in unlike.items() if differs)
    return f"{said} ({digest})" if said and digest.startswith("none") else said


def _steps_lost(run: Path) -> int:
    """Steps in metrics.jsonl that the newest checkpoint does not have."""
    done = len(losses(run)) if (run / "metrics.jsonl").exists() else 0
    return max(0, done - max((saved.step for saved in find_all(run)), default=0))


def _digest(folder: Path) -> str:
    """Of the weights; empty if there are none."""
    try:
        found = weights.load(folder / "run")
    except Exception as error:
        return f"none: {error}"
    text = hashlib.sha256()
    for name in sorted(found):
        text.update(name.encode() + found[name].contiguous().numpy().tobytes())
    return text.hexdigest()


def _processes_left(run: StruckRun) -> list[str]:
    """What still runs a moment after the launchers have ended."""
    until = time.monotonic() + _LINGER_S
    while (left := run.left()) and time.monotonic() < until:
        time.sleep(0.05)
    return [f"process {pid}" for pid in left]


def _files_left(folder: Path) -> list[str]:
    """Files that only a run under way may have; torch keeps an empty folder of its own."""
    found = (*folder.glob("tmp/*"), *folder.rglob("*.partial"))
    names = [str(file.relative_to(folder)) for file in found]
    return [name for name in names if "torchinductor" not in name]


def main() -> int:
    """Strike as many runs as the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--only", default="", help="blows whose names begin so")
    parser.add_argument("--ranks", type=int, choices=SUBJECTS, default=4)
    parser.add_argument("--minutes", type=float, default=600, help="begin no run after")
    parser.add_argument("--show", action="store_true", help="what each run printed")
    given = parser.parse_args()
    blows = [blow for blow in BLOWS if blow.name.startswith(given.only)]
    if obstacle := find_obstacle():
        print(f"no link is cut: {obstacle}")
        blows = [blow for blow in blows if blow.shape != LINKED]
    until = time.monotonic() + 60 * given.minutes
    seen: list[Observed] = []
    with tempfile.TemporaryDirectory() as place:
        chaos = Chaos(SUBJECTS[given.ranks], Path(place))
        for seed in range(given.seed, given.seed + given.runs):
            if time.monotonic() > until:
                break
            seen.append(chaos.strike(make_strike(seed, given.ranks, blows)))
            _print(seen[-1], given.show)
    print(table(seen))
    return int(any(faults(each) for each in seen))


def _print(seen: Observed, show: bool) -> None:
    found, strike = faults(seen), seen.strike
    line = f"seed {strike.seed}: {strike.blow.name} at {strike.moment:.0%}"
    print(f"{line}, ended in {seen.seconds:.1f} s: {'; '.join(found) or 'well'}", flush=True)
    if show or found:
        for host, ended in enumerate(seen.ends):
            printed = "\n    ".join(ended.printed.splitlines()[-40 if show else -8 :])
            print(f"  host {host}, status {ended.status}\n    {printed}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
