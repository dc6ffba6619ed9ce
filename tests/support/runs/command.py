"""`flowrun` in a process of its own, in a folder with a recipe and data."""

import contextlib
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from support.runs.warm_start import Fork, start

FLOWRUN = (sys.executable, "-m", "flowrun.launcher.cli")

RECIPE = """\
defaults: [/model: mlp, /optim: sgd, /launch: local]
model: {inputs: 8, hidden: 16, outputs: 4}
data: {_target_: samples.Samples}
placement: {axes: {tensor: 2}}
eval: {fraction: 0.25, batches: 2}
engine: {check_capture: false}  # tests of it are elsewhere; a second of each start
train: {batch_size: 8, micro_batches: 2, steps: 4}
"""

# Rank 1 may be asked to fail, die, stop or sleep at the first sample of its 11th micro-batch (the
# process of the virtual cluster counts as rank 1); "kill once": the first rank 1 that comes to it;
# "kill always": at its first sample;
# "preempt once": the launcher gets SIGTERM, and the rank itself too.
# Where there is a FIFO `hold`, ranks get samples when somebody opens it for writing.
SAMPLES = """\
import os
import signal
import time

import torch


class Samples:
    def __init__(self, fail: str = "", talk: bool = False) -> None:
        self.fail = fail
        self.read = 0
        self.here = os.getpid()
        torch.rand(1000, 1000).exp().sum()  # enough for several threads
        if talk:
            print("data set made", flush=True)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.here != os.getpid():  # what the launcher has read does not count
            self.here, self.read = os.getpid(), 0
        self.read += 1
        if "RANK" in os.environ and os.path.exists("hold"):
            open("hold").close()
        always = self.fail == "kill always"
        this = os.environ.get("RANK", "0" if always else "1") == "1"
        if self.fail and this and (always or self.read > 40):
            break_down(self.fail)
        made = torch.Generator().manual_seed(index)
        return {"images": torch.rand(8, generator=made), "labels": torch.tensor(index % 4)}


def break_down(how: str) -> None:
    if how == "raise":
        raise ValueError("sample 40 is not there")
    if how == "exit":
        os._exit(7)
    if how.endswith("once"):
        try:
            os.close(os.open("broken_once", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
    if how == "sleep":
        print("\\nasleep", flush=True)
        time.sleep(3600)
    if how == "preempt once":
        os.kill(os.getpid(), signal.SIGTERM)  # Slurm sends it to all processes
        os.kill(os.getppid() if "RANK" in os.environ else os.getpid(), signal.SIGTERM)
        return
    os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
"""


@dataclass
class Ended:
    """How a command ended.  seconds: from the signal or the start that was asked about."""

    status: int
    out: str
    err: str
    seconds: float


class Command:
    """A running `flowrun`, in a session of its own.

    fresh: started by Python, as a user does it, and not as a fork (warm_start.py).
    namespace: of a fork's network (linked_hosts.py).  by: the command that starts it, such as srun.
    variables: of its environment.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        fresh: bool = False,
        namespace: str = "",
        by: Sequence[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        environment = {**os.environ, "COLUMNS": "160", "PYTHONUNBUFFERED": "1", **variables}
        environment.setdefault("FLOWRUN_TOKEN", "of the tests")  # hosts may have no common folder
        environment.pop("OMP_NUM_THREADS", None)
        (self._out, out), (self._err, err) = os.pipe(), os.pipe()
        self._printed = {self._out: b"", self._err: b""}
        self._asked = 0  # how many characters `until` has looked at
        self._open = selectors.DefaultSelector()
        for file in self._printed:
            self._open.register(file, selectors.EVENT_READ)
        self.process: subprocess.Popen[bytes] | Fork
        if fresh or by:
            self.process = subprocess.Popen(
                [*by, *FLOWRUN, *arguments],
                cwd=folder,
                env=environment,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        else:
            self.process = start(folder, arguments, environment, out, err, namespace)
        os.close(out)
        os.close(err)
        _running.append(self)

    @property
    def printed(self) -> str:
        return self._printed[self._out].decode()

    def _read(self, within: float) -> None:
        """Read what it has printed, or wait for it.  Raises TimeoutError."""
        if not (ready := self._open.select(within)):
            raise TimeoutError
        for key, _ in ready:
            read = os.read(key.fd, 1 << 16)
            self._printed[key.fd] += read
            if not read:
                self._open.unregister(key.fd)
                os.close(key.fd)

    def until(self, text: str) -> None:
        """Read what it prints, up to the next line with `text`."""
        while True:
            for line in self.printed[self._asked :].splitlines(keepends=True):
                if not line.endswith("\n"):
                    break
                self._asked += len(line)
                if text in line:
                    return
            if not self._open.get_map():
                raise AssertionError(f"ended without {text!r}:\n{self._everything()}")
            self._read(within=120)

    def signal(self, number: int, group: bool = False) -> Ended:
        """Send a signal to it, or to it and all its workers; then wait for the end."""
        self.send(number, group)
        return self.end(within=5)

    def send(self, number: int, group: bool = False) -> None:
        """Send a signal to it, or to it and all its workers."""
        (os.killpg if group else os.kill)(self.process.pid, number)

    def listens_at(self) -> set[str]:
        """Return the addresses at which its processes listen."""
        return {
            found.laddr.ip
            for process in _left(self.process.pid)
            for found in process.net_connections("tcp")
            if found.status == psutil.CONN_LISTEN
        }

    def end(self, within: float = 60) -> Ended:
        """Wait until it and whoever else holds its output has ended, workers included."""
        begun = time.monotonic()
        _running.remove(self)
        try:
            while self._open.get_map():
                self._read(max(0.0, begun + within - time.monotonic()))
        except TimeoutError:
            self._kill()
            what = f"still running after {within} s:\n{self._everything()}"
            raise AssertionError(what) from None
        status = self.process.wait()
        err = self._printed[self._err].decode()
        ended = Ended(status, self.printed, err, time.monotonic() - begun)
        deadline = time.monotonic() + 2  # the output is closed a moment before a process is gone
        while left := _left(self.process.pid):
            assert time.monotonic() < deadline, left
        return ended

    def _kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _everything(self) -> str:
        """Both of its outputs, as far as they were read."""
        return b"\n".join(self._printed.values()).decode()


_running: list[Command] = []  # whose end no test has waited for


def kill_running() -> None:
    """Kill the commands that a test which failed has left."""
    while _running:
        _running.pop()._kill()


def _left(session: int) -> list[psutil.Process]:
    """The processes of a session that still run; one that nobody has waited for does not."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def workplace(folder: Path) -> Path:
    """A folder with the recipe `small` and its data."""
    (folder / "recipes").mkdir(exist_ok=True)
    (folder / "recipes" / "small.yaml").write_text(RECIPE)
    (folder / "samples.py").write_text(SAMPLES)
    return folder


def run_folder(folder: Path) -> str:
    return f"hydra.run.dir={folder}"


def free_port() -> int:
    """A port of loopback that nobody listens on, below those that connections are given: else one
    of another process may have it by the time that it is used.
    """
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return int(probe.getsockname()[1])


def losses(folder: Path) -> list[float]:
    """The losses of the steps in metrics.jsonl."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "validation" not in line]
