"""What a worker tells its launcher, and what hosts tell each other.

A message is a tuple, first a word: step, end, weights, error.  It goes through the worker's pipe;
steps, ends and errors also go to the other hosts, through queues in the store that elastic opened,
so that every host's run folder tells the whole run.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from flowrun.engine.errors import RunError

_PATIENCE = timedelta(days=7)  # for the next step


class Teller:
    """Tells what happens on a rank.  num_ranks: of the whole run."""

    def __init__(self, pipe: Connection, num_ranks: int) -> None:
        self.pipe = pipe
        self.num_ranks = num_ranks
        self.host = int(os.environ["GROUP_RANK"])
        self.num_hosts = int(os.environ["GROUP_WORLD_SIZE"])
        self.first_here = int(os.environ["LOCAL_RANK"]) == 0
        self.store = _store() if self.num_hosts > 1 else None
        self.writing = threading.Lock()
        self.forwarder: threading.Thread | None = None

    def start(self, fingerprint: str) -> None:
        """Before the first step: all hosts must run the same; one rank of each listens."""
        if self.store is None or not self.first_here:
            return
        mine = hashlib.sha256(fingerprint.encode()).hexdigest()
        if self.host == 0:
            self.store.set("flowrun/plan", mine)
        elif self.store.get("flowrun/plan").decode() != mine:
            raise RunError(
                f"host {self.host}",
                "its recipe or its plan differs from that of the first host.",
                "Give the same command on each host, with the same versions installed.",
            )
        self.forwarder = threading.Thread(target=self._forward, daemon=True)
        self.forwarder.start()

    def step(self, step: int, results: dict[str, float], seconds: float) -> None:
        """A step has reported; told by one rank of the run."""
        self._tell("step", step, results, seconds, everywhere=True)

    def weights(self, rank: int, seen: dict[str, Any]) -> None:
        """A rank has saved its shards."""
        self._tell("weights", rank, seen)

    def end(self, rank: int, measured: dict[str, Any]) -> None:
        """A rank has ended well.  Returns when this host has heard all that it must."""
        self._tell("end", rank, measured, everywhere=True)
        if self.forwarder is not None:
            self.forwarder.join()

    def error(self, where: str, problem: str, story: str, lost_peer: bool) -> None:
        """A rank ends badly; other hosts hear of it only if it is its own fault."""
        self._tell("error", where, problem, story, lost_peer, everywhere=not lost_peer)

    def _tell(self, *message: Any, everywhere: bool = False) -> None:
        with self.writing:
            self.pipe.send(message)
        if everywhere and self.store is not None:
            try:
                for host in range(self.num_hosts):
                    if host != self.host:
                        self.store.queue_push(f"flowrun/to/{host}", json.dumps(message))
            except RuntimeError:
                if message[0] != "error":
                    raise  # an error must not hide behind a store that has gone

    def _forward(self) -> None:
        """Hand on what other hosts tell, until their ranks have ended."""
        expected = self.num_ranks - int(os.environ["LOCAL_WORLD_SIZE"])
        try:
            store = _store()
            while expected:
                message = json.loads(store.queue_pop(f"flowrun/to/{self.host}"))
                with self.writing:
                    self.pipe.send(tuple(message))
                expected -= message[0] == "end"
        except RuntimeError:
            pass  # the host of the store has gone: every rank notices by itself


def _store() -> Any:
    """A connection of its own (one is not for several threads)."""
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=_PATIENCE)
