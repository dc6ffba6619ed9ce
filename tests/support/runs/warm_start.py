"""`flowrun` as forks of one process that has imported what it imports: five of the seven seconds of
CPU that a small run takes are imports.

    python tests/support/runs/warm_start.py FD   serves what comes by the socket FD, until it closes

Each fork is what the command would be: a session, arguments, an environment, a folder, both outputs
of its own.  Only the seed of hashes and whether a module is there already are not.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

IMPORTED = (
    "torch._dynamo.functional_export",
    "torch._functorch.aot_autograd",
    "torch._dynamo.backends.common",
    "flowrun.launcher.command_line.hydra_jobs",
    "flowrun.launcher.run",
    "flowrun.launcher.ranks.worker",
    "flowrun.launcher.commands.resume",
    "flowrun.launcher.commands.verify",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
)
# as `flowrun` starts itself anew to have it: a fork can't
SET_BEFORE = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "PYTHONUNBUFFERED": "1"}
MOST_BYTES = 1 << 17  # of an order
NAMESPACES = "/run/netns"  # of `ip netns`
_NEW_NET = 0x40000000  # CLONE_NEWNET of Linux


class Fork:
    def __init__(self, answers: socket.socket) -> None:
        self._answers = answers.makefile("r")
        self.pid = int(self._answers.readline())

    def wait(self) -> int:
        """How it ended; as subprocess.Popen says it."""
        with self._answers:
            return int(self._answers.readline())


def start(
    folder: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    out: int,
    err: int,
    namespace: str = "",
) -> Fork:
    """Begin `flowrun` with arguments in a folder.

    environment: all of its variables.  out, err: files that it prints to.  namespace: its network,
    by the name that `ip netns` gave it; empty: that of this process.
    """
    order = json.dumps([str(folder), list(arguments), {**environment, **SET_BEFORE}, namespace])
    mine, its = socket.socketpair()
    with mine, its:
        socket.send_fds(_server(), [order.encode()], [out, err, its.fileno()])
        its.close()  # so that an answer that never comes ends as an empty line
        return Fork(mine)


@cache
def _server() -> socket.socket:
    """Where orders go to: one process for all tests of this one, which ends with it."""
    mine, its = socket.socketpair(type=socket.SOCK_SEQPACKET)
    environment = {**os.environ, **SET_BEFORE}
    environment.pop("OMP_NUM_THREADS", None)
    with its:
        its.set_inheritable(True)
        command = [sys.executable, __file__, str(its.fileno())]
        os.posix_spawn(sys.executable, command, environment, setpgroup=0)
    return mine


def _serve(orders: socket.socket) -> None:
    """Fork for each order; return in the fork when its command has ended."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait
    while True:
        order, files, *_ = socket.recv_fds(orders, MOST_BYTES, 3)
        if not order:
            return
        if os.fork() == 0:
            orders.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _attend(*json.loads(order), *files)
        for file in files:
            os.close(file)


def _attend(
    folder: str,
    arguments: list[str],
    environment: dict[str, str],
    namespace: str,
    out: int,
    err: int,
    answers: int,
) -> None:
    """Tell who runs the command, and how that ended; in the command itself, return at its end."""
    pid = os.fork()
    if pid == 0:
        os.close(answers)
        if namespace:
            _enter(namespace)
        return _run(folder, arguments, environment, out, err)
    os.close(out)
    os.close(err)
    os.write(answers, f"{pid}\n".encode())
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(answers, f"{status}\n".encode())
    os._exit(0)


def _enter(namespace: str) -> None:
    """Move this thread, and those that it will start, to another network."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"{NAMESPACES}/{namespace}") as file:
        if libc.setns(file.fileno(), _NEW_NET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def _run(
    folder: str, arguments: list[str], environment: dict[str, str], out: int, err: int
) -> None:
    """Become the command."""
    from flowrun.launcher.cli import main

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    for file, standard in ((out, 1), (err, 2)):
        os.dup2(file, standard)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["flowrun", *arguments]
    sys.path[0] = folder  # of `python -m`
    main()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
