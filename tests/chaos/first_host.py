"""Kill the first host of a run at a random moment, again and again: the other ends the run.

python tests/chaos/first_host.py 30 prints a table of the moments and of what came of them.
"""

import json
import random
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flowrun.launcher.report.metric_lines import read_losses
from support.runs.command import Command, free_port, losses, run_folder, workplace
from support.runs.linked_hosts import LinkedHosts, find_obstacle

SHARED, STORE, NOTHING = "a shared folder", "a store", "nothing"
STEPS = 300
RUN = (
    *("recipe=small", f"train.steps={STEPS}", "optim=adamw", "train.batch_size=32"),
    *("train.log_every=5", "train.save_every=10"),
)
WELL = "complete, losses as undisturbed"


@dataclass(frozen=True)
class Kill:
    """A moment and what came of it.  step: steps done by then; -1: none yet."""

    shares: str
    after_s: float
    step: int
    outcome: str
    seconds: float

    def __str__(self) -> str:
        step = "before" if self.step < 0 else f"step {self.step:4d}"
        figures = f"{self.after_s:6.2f} s  {step:9s} {self.seconds:5.1f} s"
        return f"{self.shares:15s} {figures}  {self.outcome}"


def undisturbed(place: Path) -> Path:
    """A folder with the recipe `small`, and in it a run that nothing has disturbed."""
    found = workplace(place)
    command = Command(found, *RUN, "launch=virtual", run_folder(found / "whole"))
    assert command.end().status == 0
    return found


def kill_first(place: Path, name: str, shares: str, after_s: float, at_step: int = -1) -> Kill:
    """Let two hosts train, kill the first, and wait for the end of the other.

    place: see `undisturbed`.  name: of this run.  shares: what the hosts have in common.  after_s:
    seconds from the start of the second host to the moment.  at_step: not before this step.
    """
    with ExitStack() as stack:
        if find_obstacle():
            endpoint, networks = f"127.0.0.1:{free_port()} 127.0.0.1:{free_port()}", ("", "")
        else:
            linked = stack.enter_context(closing(LinkedHosts()))
            networks = linked.namespaces
            endpoint = f"{linked.endpoint} 10.77.0.2:29500"
        here = place / name
        folders = [here / ("run" if shares == SHARED else host) for host in "ab"]
        keys = ["launch.nnodes=1:2", f"launch.rdzv_endpoint='{endpoint}'"]
        if shares == STORE:
            keys.append(f"train.store='file://{here}/store'")
        hosts = []
        for host, network in enumerate(networks):
            home = here / f"home{host}"
            home.mkdir(parents=True)
            own = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
            words = (*RUN, *keys, run_folder(folders[host]))
            hosts.append(Command(place, *words, namespace=network, variables=own))
            if not host:
                hosts[0].until("waiting for")
        time.sleep(after_s)
        if at_step >= 0:
            hosts[0].until(f"step {at_step}/")
        step = max((s for s, _ in read_losses(folders[0] / "metrics.jsonl")["loss"]), default=-1)
        with suppress(ProcessLookupError):
            hosts[0].send(signal.SIGKILL)
        status = hosts[0].end().status
        began_s = time.monotonic()
        ended = hosts[1].end(within=180)
        seconds = time.monotonic() - began_s
        outcome = WELL if status == -signal.SIGKILL else f"{WELL}; the first had ended"
        if (ended.status, ended.err) != (0, ""):
            outcome = f"status {ended.status}: {ended.err or ended.out[-500:]}"
        elif wrong := what_differs(folders[1], place / "whole"):
            outcome = wrong
        return Kill(shares, after_s, step, outcome, seconds)


def what_differs(run: Path, whole: Path) -> str:
    """What is wrong with a run that has ended."""
    here, there = losses(run), losses(whole)
    if not (run / "report.json").exists() or not (run / "weights.safetensors").exists():
        return "no report, or no weights"
    if len(here) != len(there):
        return f"{len(here)} losses of {len(there)}: {json.dumps(here)[:80]}"
    far = [k for k, (a, b) in enumerate(zip(here, there, strict=True)) if abs(a - b) > 1e-4 * b]
    return f"other losses from step {far[0]} on" if far else ""


def main(times: int, seed: int = 0) -> int:
    order = random.Random(seed)
    with tempfile.TemporaryDirectory() as made:
        place = undisturbed(Path(made))
        print(f"{'in common':15s} {'killed':>8s}  {'at':9s} {'end':>6s}   outcome", flush=True)
        kills = []
        for number in range(times):
            shares = (SHARED, STORE)[number % 2]
            early, step = number % 4 == 3, order.randrange(0, STEPS - 20, 5)
            moment = (order.uniform(0.0, 6.0), -1) if early else (0.0, step)
            kills.append(kill_first(place, f"run{number}", shares, *moment))
            print(f"{number + 1:2d} {kills[-1]}", flush=True)
    well = sum(kill.outcome.startswith(WELL) for kill in kills)
    print(f"{well} of {times} continued to the end")
    return int(well < times)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
