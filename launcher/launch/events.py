"""Events that a worker sends to its launcher, through a pipe of its own.

A message is a tuple, first a word: step, evaluated, saved, note, weights, end, not_finite, halts,
error.
What is about the whole run the launcher sends to the other hosts, too (hosts/), for their folders.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flowrun.engine.runtime.rank.rank import Results
from flowrun.engine.runtime.rank.shard_file import Written


def concerns_all(message: tuple[Any, ...]) -> bool:
    """Return whether other hosts get an event: all but notes, a rank's own weights, and an error
    that is another rank's fault.
    """
    match message:
        case ("error", _, _, _, lost_peer):
            return not lost_peer
        case ("weights" | "note" | "halts", *_):
            return False
    return True


class EventSender:
    """Sends to the launcher what happens on a rank."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.writing = threading.Lock()  # a thread that saves sends, too

    def step(
        self, step: int, results: Results, seconds: float, gauges: Mapping[str, float]
    ) -> None:
        """Send the results of a step; one rank of the run does.

        step, results: of it.  seconds: since the last.  gauges: of the ranks of this host, by tag.
        """
        self._send("step", step, results, seconds, dict(gauges))

    def send_evaluation(self, step: int, results: dict[str, float]) -> None:
        """Send the means over the held-out samples, with the weights after `step`."""
        self._send("evaluated", step, results)

    def send_file(self, folder: Path, step: int, name: str, written: Written) -> None:
        """Say that this rank has written its file of a checkpoint.

        folder, step: the checkpoint.  name: of the file.  written: its size and checksum.
        """
        self._send("saved", str(folder), step, name, list(written))

    def note(self, text: str) -> None:
        """Say what a person should know."""
        self._send("note", text)

    def weights(self, rank: int, seen: dict[str, Any]) -> None:
        """A rank of one of several hosts has saved its shards."""
        self._send("weights", rank, seen)

    def end(self, rank: int, measured: dict[str, Any]) -> None:
        """A rank has ended well."""
        self._send("end", rank, measured)

    def not_finite(self, steps: int) -> None:
        """Say that the last of `steps` steps is why this rank ends."""
        self._send("not_finite", steps)

    def halt(self) -> None:
        """Ask the launchers to let all ranks come to rest after the step under way, and end."""
        self._send("halts")

    def error(self, where: str, problem: str, story: str, lost_peer: bool) -> None:
        """Say that a rank ends with an error.

        where, problem: the facts.  story: the traceback.  lost_peer: the fault is another rank's;
        only otherwise do other hosts get the event.
        """
        self._send("error", where, problem, story, lost_peer)

    def _send(self, *message: Any) -> None:
        with self.writing:
            self.pipe.send(message)
