"""Events that a worker sends to its launcher, and that hosts send to each other.

A message is a tuple, first a word: meeting, step, evaluated, saved, note, weights, end,
error.  It goes
through the pipe of the worker; what is about the whole run also goes to the other hosts, through
queues in the store that elastic opened, so that every host's run folder has the whole run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flowrun.engine.errors import RecipeError, RunError
from flowrun.engine.runtime.rank.rank import Results
from flowrun.engine.runtime.rank.shard_file import Written
from flowrun.launcher.recipe.schema import Launch

_PATIENCE = timedelta(days=7)  # for the next step
_CONNECT = timedelta(seconds=30)  # to a store that is there: elastic's ranks have met by it


@dataclass(frozen=True)
class HostStore:
    """The store that elastic opened, as seen from one of the hosts."""

    address: str
    port: int
    host: int
    num_hosts: int

    @staticmethod
    def of_worker() -> HostStore:
        """Return the store that elastic describes to its workers."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        host, num_hosts = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
        return HostStore(address, port, host, num_hosts)

    def connect(self) -> Any:
        """A connection of its own (one is not for several threads)."""
        import torch.distributed as dist

        made: Any = dist.TCPStore  # type: ignore[attr-defined]
        store = made(self.address, self.port, is_master=False, timeout=_CONNECT)
        store.set_timeout(_PATIENCE)
        return store

    def notify_other_hosts(self, *message: Any, store: Any = None) -> None:
        """Put a message into the queue of every other host; if the store has gone, so have they."""
        with contextlib.suppress(RuntimeError):
            to = store or self.connect()
            for host in range(self.num_hosts):
                if host != self.host:
                    to.queue_push(_queue(host), json.dumps(message))


def _queue(host: int) -> str:
    return f"flowrun/to/{host}"


def ranks_of_a_host(num_ranks: int, launch: Launch) -> int:
    """Raises RecipeError where hosts would have unlike numbers."""
    if num_ranks % launch.nnodes:
        raise RecipeError(
            "launch.nnodes", f"{num_ranks} ranks cannot be divided over {launch.nnodes} hosts."
        )
    return num_ranks // launch.nnodes


class EventSender:
    """Sends to the launcher what happens on a rank.  num_ranks: of the whole run."""

    def __init__(self, pipe: Connection, num_ranks: int) -> None:
        self.pipe = pipe
        self.num_ranks = num_ranks
        self.hosts = HostStore.of_worker()
        self.store: Any = None
        self.writing = threading.Lock()
        self.forwarder: threading.Thread | None = None

    def start(self, fingerprint: str, folder: Path) -> None:
        """Check, before the ranks meet, that all hosts run the same; one rank of each listens.

        folder: of this host's run; another host may have the same.
        """
        hosts = self.hosts
        if hosts.num_hosts == 1:
            return
        self.store = hosts.connect()
        if int(os.environ["LOCAL_RANK"]):
            return
        if hosts.host == 0:
            self.store.set("flowrun/folder", str(folder.absolute()))
        shared = self.store.get("flowrun/folder").decode() == str(folder.absolute())
        address, port = hosts.address, hosts.port
        self._send("meeting", address, port, hosts.host, hosts.num_hosts, shared)
        self.forwarder = threading.Thread(target=self._forward, daemon=True)
        self.forwarder.start()
        mine = hashlib.sha256(fingerprint.encode()).hexdigest()
        if hosts.host == 0:
            self.store.set("flowrun/plan", mine)
        elif self.store.get("flowrun/plan").decode() != mine:
            raise RunError(
                f"host {hosts.host}",
                "its recipe or its plan differs from that of the first host.",
                "Give the same command on each host, with the same versions installed.",
            )

    def step(self, step: int, results: Results, seconds: float) -> None:
        """Send the results of a step, and the seconds since the last; one rank of the run does."""
        self._send("step", step, results, seconds, everywhere=True)

    def send_evaluation(self, step: int, results: dict[str, float]) -> None:
        """Send the means over the held-out samples, with the weights after `step`."""
        self._send("evaluated", step, results, everywhere=True)

    def send_file(self, folder: Path, step: int, name: str, written: Written) -> None:
        """Say that this rank has written its file of a checkpoint.

        folder, step: the checkpoint.  name: of the file.  written: its size and checksum.
        """
        self._send("saved", str(folder), step, name, list(written), everywhere=True)

    def note(self, text: str) -> None:
        """Say what a person should know."""
        self._send("note", text)

    def weights(self, rank: int, seen: dict[str, Any]) -> None:
        """A rank of one of several hosts has saved its shards."""
        self._send("weights", rank, seen)

    def end(self, rank: int, measured: dict[str, Any]) -> None:
        """A rank has ended well.  Returns when this host has all events of the others."""
        self._send("end", rank, measured, everywhere=True)
        if self.forwarder is not None:
            self.forwarder.join()

    def error(self, where: str, problem: str, story: str, lost_peer: bool) -> None:
        """Say that a rank ends with an error.

        where, problem: the facts.  story: the traceback.  lost_peer: the fault is another rank's;
        only otherwise do other hosts get the event.
        """
        self._send("error", where, problem, story, lost_peer, everywhere=not lost_peer)

    def _send(self, *message: Any, everywhere: bool = False) -> None:
        with self.writing:  # a thread that saves sends, too
            self.pipe.send(message)
            if everywhere and self.store is not None:
                self.hosts.notify_other_hosts(*message, store=self.store)

    def _forward(self) -> None:
        """Forward the events of other hosts until their ranks have ended."""
        expected = self.num_ranks - int(os.environ["LOCAL_WORLD_SIZE"])
        with contextlib.suppress(RuntimeError):  # the store's host has gone: every rank notices
            store = self.hosts.connect()
            while expected:
                message = json.loads(store.queue_pop(_queue(self.hosts.host)))
                with self.writing:
                    self.pipe.send(tuple(message))
                expected -= message[0] == "end"
