"""Plant faults that leave a run hanging, and see that each is named in time.

    python tests/hangs/plant.py [FAULT ...]

One line a fault: the seconds from the fault to the end of the run, and what the run says.  The exit
status is the number of faults that are not named, or not within `launch.hang_s` + 5 s.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.runs.command import RECIPE, Command, free_port, run_folder
from support.runs.linked_hosts import LinkedHosts, find_obstacle

HANG_S, LATE_S = 4.0, 5.0
# fault -> what the error must say
NAMED = {
    "sleeps": "rank 1 has begun actor",
    "spins": "rank 1 has begun actor",
    "stops": "rank 1 is stopped by a signal; it owes actor",
    "skips": "nothing is under way. rank 1 could begin actor",
    "loses": "from rank 1 has not come to rank 0",
    "shape": "one has another shape than the plan says",
    "dies": "rank 1\n  the process was killed by SIGKILL",
    "between": "rank 1 has ended actor",
    "reads": "a reader of rank 1 has begun actor",
    "meets": "rank 1 meets the other ranks",
    "makes": "rank 1 makes its weights",
    "evaluates": "rank 1 has begun actor",
    "disk": "rank 1 saves a checkpoint",
    "completes": "the launcher, completing the checkpoint of step 8",
    "saves": "rank 1 has ended its steps",
    "slow": "rank 1 is slower than its peers",
    "frozen": "host 1",
    "cut": "host 1",
}
RUN = (
    "recipe=planted",
    "train.steps=100000",
    "train.save_every=8",
    "eval.every=40",
    f"launch.hang_s={HANG_S}",
)


def plant(fault: str, place: Path) -> tuple[float, str]:
    """Run with a fault; return the seconds that it took to end, and the first host's error."""
    recipe = RECIPE.replace("samples.Samples", f"planted.Samples, plant: {fault}")
    (place / "recipes").mkdir()
    (place / "recipes" / "planted.yaml").write_text(recipe)
    shutil.copy(Path(__file__).with_name("planted.py"), place)
    if fault == "frozen":
        hosts = _start_hosts(place, f"127.0.0.1:{free_port()}")
        _note_strike(place)
        os.killpg(hosts[1].process.pid, signal.SIGSTOP)
        ended = hosts[0].end(within=60)
        os.killpg(hosts[1].process.pid, signal.SIGKILL)
    elif fault == "cut":
        assert not find_obstacle(), find_obstacle()
        with closing(LinkedHosts()) as linked:
            hosts = _start_hosts(place, linked.endpoint, linked.namespaces)
            _note_strike(place)
            linked.cut(1)
            ended, other = [host.end(within=60) for host in hosts]
        assert "host 0" in other.err, other.err
    elif fault == "slow":
        command = Command(place, *RUN, run_folder(place / "run0"))
        command.until("is slower than its peers")
        _note_strike(place)
        said = command.printed.splitlines()[-1]
        command.signal(signal.SIGINT, group=True)
        return 0.0, said
    else:
        ended = Command(place, *RUN, run_folder(place / "run0")).end(within=120)
    now = time.time()
    return now - float((place / "struck").read_text()), ended.err


def _start_hosts(place: Path, endpoint: str, namespaces: Sequence[str] = ("", "")) -> list[Command]:
    """Start two hosts, and wait until both train.

    place: their folder.  endpoint: where they meet.  namespaces: of their networks.
    """
    meet = (*RUN, "launch.nnodes=2", f"launch.rdzv_endpoint={endpoint}")
    hosts = [
        Command(place, *meet, f"launch.node_rank={k}", run_folder(place / f"run{k}"), namespace=n)
        for k, n in enumerate(namespaces)
    ]
    for host in hosts:
        host.until("step 0")
    return hosts


def _note_strike(place: Path) -> None:
    (place / "struck").write_text(str(time.time()))


def main(faults: list[str]) -> int:
    """Plant each fault in turn; return how many are not named in time."""
    missed = 0
    for fault in faults or list(NAMED):
        with tempfile.TemporaryDirectory() as folder:
            try:
                seconds, said = plant(fault, Path(folder))
            except (AssertionError, FileNotFoundError) as error:
                seconds, said = float("nan"), str(error)
            good = NAMED[fault] in said and seconds < HANG_S + LATE_S
            missed += not good
            print(
                f"{'named' if good else 'MISSED':7}{fault:10}{seconds:6.1f} s  {said.strip()}\n",
                flush=True,
            )
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
