"""Run in processes of its own -> Sample: what was measured, or the reason why there is nothing.

A run that fails is a Sample with its reason.  Its processes are gone when `execute` returns or
raises, after Ctrl-C too.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import IO

from flowrun.launcher.bench.suite import Run
from flowrun.launcher.job.forked import delay_interrupts

_LOOK_S = 0.05  # between two looks at the processes
_END_S = 5.0  # from a request to end to the end
_RANK = re.compile(r"^\[rank\d+\]: ?")  # what torch puts before the lines of a traceback
_ERROR = re.compile(r"\s*[\w.]+(Error|Exception): ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sample: what one run measured.

    step_s: of every step.  losses: of every step, over all samples of it.  peak_bytes: of the
    process that took most, without what it had before training began.  sent_bytes: of all ranks, a
    step; None where nothing counts them.  work: units of a step, such as "tokens".
    at_peak_s: what the model's products take at the peak of all ranks' devices, if that is known;
    foreseen_s: of a step, by the plan.  All three of flowrun alone.
    problem: why there is none of it; empty if there is.
    """

    step_s: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    peak_bytes: int = 0
    sent_bytes: float | None = None
    work: float | None = None
    unit: str = ""
    at_peak_s: float | None = None
    foreseen_s: float | None = None
    problem: str = ""


def execute(run: Run, folder: Path, timeout_s: float, config_dir: str | None = None) -> Sample:
    """Train a run in `folder`, which keeps what the processes print.

    timeout_s: seconds after which the run has failed.  config_dir: the user's own groups.
    """
    folder.mkdir(parents=True, exist_ok=True)
    train = _train_flowrun if run.peer is None else _train_peer
    try:
        return train(run, folder, timeout_s, config_dir)
    except _Failed as error:
        return Sample(problem=str(error))


class _Failed(Exception):
    """Why a run measured nothing, in a line."""


def _train_flowrun(run: Run, folder: Path, timeout_s: float, config_dir: str | None) -> Sample:
    """The command that a user would type.  Of copies, each step's mean, and the work of all."""
    given = ["--config-dir", config_dir] if config_dir else []
    command = [*_module("flowrun.launcher.cli"), "run", *run.overrides, *given]
    folders = [folder] if run.copies == 1 else [folder / f"copy{k}" for k in range(run.copies)]
    _run([([*command, f"hydra.run.dir={each}"], {}) for each in folders], run, folder, timeout_s)
    found = [_read_sample(each) for each in folders]
    return replace(
        found[0],
        step_s=tuple(map(fmean, zip(*(each.step_s for each in found), strict=True))),
        peak_bytes=max(each.peak_bytes for each in found),
        work=sum(each.work or 0.0 for each in found),
    )


def _read_sample(folder: Path) -> Sample:
    """Read what a run of flowrun wrote: a loss is null in a step without one, and a list in the
    mirrored view.
    """
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    report = json.loads((folder / "report.json").read_text())
    measured = report["measured"]
    share = measured.get("utilisation")
    losses = [math.nan if step["loss"] is None else step["loss"] for step in steps]
    return Sample(
        step_s=tuple(step["step_s"] for step in steps),
        losses=tuple(fmean(each) if isinstance(each, list) else each for each in losses),
        peak_bytes=max(measured["process_bytes"].values()),
        sent_bytes=measured["sent_bytes"],
        work=round(steps[-1]["tokens_per_s"] * steps[-1]["step_s"]),
        unit=report["unit"],
        at_peak_s=None if share is None else share * measured["step_s"],
        foreseen_s=report["foreseen"]["step_s"],
    )


def _train_peer(run: Run, folder: Path, timeout_s: float, config_dir: str | None) -> Sample:
    """A process a rank (peers/peer_rank.py); a step's loss is the mean over ranks that have one."""
    order = folder / "order.json"
    order.write_text(json.dumps(asdict(run)))
    (folder / "meet").unlink(missing_ok=True)
    command = [*_module("flowrun.launcher.bench.peers.peer_rank"), str(order), config_dir or ""]
    ranks = range(run.ranks)
    _run([(command, {"RANK": str(rank)}) for rank in ranks], run, folder, timeout_s)
    measured = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in ranks]
    with_loss = [each for each in measured if each["losses"][0] is not None]
    return Sample(
        step_s=tuple(with_loss[-1]["step_s"]),  # on CUDA the others' host runs ahead
        losses=tuple(map(fmean, zip(*(each["losses"] for each in with_loss), strict=True))),
        peak_bytes=max(each["peak_bytes"] for each in measured),
    )


def _module(name: str) -> list[str]:
    return [sys.executable, "-m", name]


# ---- processes -----------------------------------------------------------------------------------


def _run(
    commands: Sequence[tuple[list[str], Mapping[str, str]]],
    run: Run,
    folder: Path,
    timeout_s: float,
) -> None:
    """Start them all and wait for all.  Raises _Failed, by the one that failed first."""
    until = time.monotonic() + timeout_s
    started: list[tuple[subprocess.Popen[bytes], Path]] = []
    try:
        for k, (command, variables) in enumerate(commands):
            log = folder / f"process{k}.log"
            with log.open("wb") as stream, delay_interrupts():
                started.append((_start(command, {**run.environment, **variables}, stream), log))
        left = list(started)
        while left:
            for process, log in list(left):
                status = process.poll()
                if status:
                    raise _Failed(_reason(log, status))
                if status == 0:
                    left.remove((process, log))
            if time.monotonic() > until:
                raise _Failed(f"no end within {timeout_s:.0f} s (suite.timeout_s)")
            time.sleep(_LOOK_S)
    finally:
        _end([process for process, _ in started])


def _start(
    command: list[str], variables: Mapping[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that Ctrl-C on the terminal comes to us alone,
    and all of the session can be ended at once.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **variables}
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_begin,
    )


def _begin() -> None:
    """Let the new process receive signals, and be killed if we are killed (Linux)."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask those that still run to end; those that do not are ended, with all that they started,
    which else ends by itself: workers of flowrun and of a DataLoader see that their parent is gone.
    """
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    until = time.monotonic() + _END_S
    for process in running:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _reason(log: Path, status: int) -> str:
    """The last error that the process names; else the last that it says, from its first line."""
    text = [_RANK.sub("", line) for line in log.read_text(errors="replace").splitlines()]
    lines = [line.rstrip() for line in text if line.strip()]
    if named := [line.strip() for line in lines if _ERROR.match(line)]:
        return f"{named[-1]} ({log})"
    if status < 0:
        last = f" after {lines[-1].strip()!r}" if lines else ""
        return f"was killed by {signal.Signals(-status).name}{last} ({log})"
    begins = max((k for k, line in enumerate(lines) if line[0] != " "), default=0)
    said = " ".join(line.strip() for line in lines[begins:])
    return f"{said or f'exit status {status}'} ({log})"
