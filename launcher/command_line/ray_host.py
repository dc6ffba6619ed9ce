"""A host of launch=ray: an actor on a node of the cluster, which runs flowrun's launcher there as a
process of its own.  A node imports this file for it, and no torch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

STDOUT, STDERR = 1, 2
# of the command that a person typed; all others are those of the node, where it has them.  Ray sets
# OMP_NUM_THREADS, and launch.threads counts.
_OF_THE_COMMAND = ("COLUMNS", "FLOWRUN_TOKEN", "OMP_NUM_THREADS", "PWD")


class RayHost:
    """The launcher of one host.  Its methods run in threads of the actor."""

    def __init__(self) -> None:
        # a cluster that a shell began behind itself ignores it, and so would the launcher
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def place(self) -> tuple[str, str]:
        """Return an address of this node with a free port, and Ray's name of the node."""
        import ray

        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
        node = ray.get_runtime_context().get_node_id()
        return f"{ray.util.get_node_ip_address()}:{port}", node

    def start(self, recipe: Path, words: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start flowrun.  recipe: in the run's folder.  variables: of the command, in whose folder
        it starts.  Raises FileNotFoundError where this node does not see the recipe.
        """
        if not recipe.exists():
            shared = "start the command in a folder on a disk that all nodes share"
            raise FileNotFoundError(f"{socket.gethostname()} does not see {recipe}: {shared}.")
        # Ray blocks it in what it starts, and a process inherits what its thread blocks
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        here = {key: value for key, value in os.environ.items() if key not in _OF_THE_COMMAND}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flowrun.launcher.cli", f"recipe={recipe}", *words],
            cwd=variables["PWD"],
            env={**variables, **here},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def read(self, stream: int) -> bytes:
        """Wait for what the launcher prints; nothing comes once it has ended."""
        file = self._process.stdout if stream == STDOUT else self._process.stderr
        return os.read(file.fileno(), 1 << 16) if file else b""

    def end(self) -> int:
        """Wait for the end of the launcher; return its status."""
        return self._process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the launcher."""
        self._process.send_signal(number)
