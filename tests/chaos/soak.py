"""Train for a long time, and look whether memory, descriptors and threads stay as they are.

    python tests/chaos/soak.py --minutes 30

The launcher and 4 ranks of a small GPT, with checkpoints and evaluations.  The first third is for
warming up.  Exit status 1 if a process has grown since by more than 2 MB and a hundredth, or has
more descriptors or threads.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos.hosts_of_run import StruckRun
from support.runs.command import losses

WORDS = (
    "recipe=gpt_hybrid",
    "model.width=64",
    "model.depth=2",
    "train.batch_size=8",
    "train.micro_batches=4",
    "train.steps=1000000",
    "train.save_every=100",
    "eval.every=100",
    "eval.batches=1",
    "data.max_bytes=100000",
)
RANKS = 4
GROWTH_BYTES, GROWTH_SHARE = 2 * 2**20, 0.01
_EVERY_S = 5.0


@dataclass(frozen=True)
class Usage:
    """What a process uses.  own_bytes: of memory that no other process shares."""

    own_bytes: float
    descriptors: float
    threads: float


def usage_of(pid: int) -> Usage:
    process = psutil.Process(pid)
    own = process.memory_full_info().uss
    return Usage(own, process.num_fds(), process.num_threads())


def median_usage(samples: Sequence[Usage]) -> Usage:
    return Usage(
        *(statistics.median(column) for column in zip(*map(astuple, samples), strict=True))
    )


def growth(samples: Sequence[Usage]) -> tuple[Usage, Usage, str]:
    """Compare the last sixth of the samples with the sixth after the first third.

    Returns both, and what has grown; empty if nothing has.
    """
    sixth = max(1, len(samples) // 6)
    before, after = median_usage(samples[2 * sixth : 3 * sixth]), median_usage(samples[-sixth:])
    most = before.own_bytes * (1 + GROWTH_SHARE) + GROWTH_BYTES
    grown = {
        "memory": after.own_bytes > most,
        "descriptors": after.descriptors > before.descriptors,
        "threads": after.threads > before.threads,
    }
    return before, after, ", ".join(name for name, grows in grown.items() if grows)


def soak(place: Path, minutes: float) -> list[list[Usage]]:
    """Run for so many minutes in `place`; return the samples of launcher and ranks."""
    run = StruckRun(place, "soak", [[*WORDS, f"hydra.run.dir={place / 'run'}"]])
    try:
        there = run.wait_for_workers(place / "run" / "plan.txt", RANKS, 300)
        assert there, run.hosts[0].ended()
        pids = run.hosts[0].everything()
        samples: list[list[Usage]] = [[] for _ in pids]
        until = time.monotonic() + 60 * minutes
        while not run.wait(_EVERY_S) and time.monotonic() < until:
            for k, pid in enumerate(pids):
                samples[k].append(usage_of(pid))
        assert not run.is_over(), run.hosts[0].ended()
        os.kill(pids[0], signal.SIGINT)
        run.wait(60)
    finally:
        run.kill()
    return samples


def main() -> int:
    """Soak, and print a line for each process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        samples = soak(Path(place), given.minutes)
        assert (Path(place) / "run" / "metrics.jsonl").exists(), "no step was done"
        steps = len(losses(Path(place) / "run"))
        print(f"{steps} steps, {len(samples[0])} samples of each process")
    grown = False
    for name, each in zip(("launcher", *map("rank {}".format, range(RANKS))), samples, strict=True):
        before, after, what = growth(each)
        grown = grown or bool(what)
        print(
            f"{name}: {before.own_bytes / 2**20:.1f} -> {after.own_bytes / 2**20:.1f} MB,"
            f" descriptors {before.descriptors:.0f} -> {after.descriptors:.0f},"
            f" threads {before.threads:.0f} -> {after.threads:.0f}"
            f"{f'; grown: {what}' if what else ''}"
        )
    return int(grown)


if __name__ == "__main__":
    sys.exit(main())
