"""launch=ray: the recipe on the nodes of a Ray cluster, an actor for each host (ray_host.py).

The hosts meet at the node of the first, whose lines come back to this command.  A thread runs an
event loop for all jobs of the command: one, or those of a sweep, which begin as nodes are free.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from asyncio import FIRST_COMPLETED, AbstractEventLoop
from concurrent.futures import CancelledError
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from flowrun.engine.errors import FlowrunError, RecipeError, RunError, refuse_as
from flowrun.launcher.command_line.ray_host import STDERR, STDOUT, RayHost
from flowrun.launcher.command_line.slurm import plan_here
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.schema import AUTO, nodes_of
from flowrun.launcher.report.report import Report
from flowrun.launcher.store.run_files import REPORT
from flowrun.launcher.supervise.hands.signals import SIGNALS, Preempted
from flowrun.launcher.supervise.hosts.hub_link import Patience
from flowrun.launcher.supervise.hosts.meeting import ranks_of_a_host
from flowrun.launcher.supervise.hosts.token import TOKEN
from flowrun.launcher.terminal import doing, exit_status
from flowrun.launcher.terminal.console import output_width, say, wide_console

_CONNECT_S, _LOOK_S, _PART_S = 5.0, 1.0, 30.0
_MOST_ERRORS = 1 << 16  # bytes of what a job writes to stderr, the last
_MOST_LOST = 3  # first hosts in a row that ended before they began
_jobs: list[RayJob] = []


class RayJob:
    """A run on the cluster, from now on.

    job: its number in a sweep; None: the only one, which shows what its first host prints.
    status: of that host, at the end.  waits: its end is waited for, as that of a job in a queue.
    """

    waits = True

    def __init__(self, recipe: Recipe, folder: Path, job: int | None) -> None:
        """folder: absolute; all nodes have to see it."""
        self.job, self.status = job, exit_status.OK
        self._join_s, self._nodes = recipe.launch.join_s, nodes_of(recipe.launch)
        self._need = _need(recipe)
        self._folder, self._logs = folder, folder / "ray"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._recipe = self._logs / "recipe.yaml"
        self._recipe.write_text(recipe.to_yaml(), encoding="utf-8")
        own = {"COLUMNS": str(output_width()), "PWD": os.getcwd()}
        self._variables = {TOKEN: secrets.token_hex(16), **os.environ, **own}
        self._groups: list[Any] = []  # Ray's placement groups of this round
        self._began: dict[int, Any] = {}  # actors of this round whose launchers have begun
        self._used = set[str]()  # nodes that have a host, or had one that has ended
        self._asked = 0  # the signal that ends the run
        self._errors = b""
        self._end = asyncio.run_coroutine_threadsafe(self._run(), _loop())
        _jobs.append(self)

    def __str__(self) -> str:
        return f"logs in {self._logs}"

    def outcome(self) -> Report | FlowrunError:
        """Wait for its end: its report, or why there is none.  A job of a sweep that was asked to
        end has a status that ends the sweep, however it ends itself.
        """
        outcome = self._wait()
        if self._asked and self.job is not None:
            self.status = self._stopped
        return outcome

    def _wait(self) -> Report | FlowrunError:
        while True:
            try:
                self.status = self._end.result()
                break
            except (KeyboardInterrupt, Preempted):  # the hosts have it, too: they save, and end
                continue
            except CancelledError:
                self.status = self._stopped
                return RunError("launch=ray", "stopped before a host began.")
            except FlowrunError as error:
                return error
        if self.status == exit_status.OK:
            return Report.from_json((self._folder / REPORT).read_text())
        said = self._errors.decode(errors="replace").splitlines()
        last = max((k for k, line in enumerate(said) if line[:1].strip()), default=len(said))
        where, *problem = map(str.strip, said[last:] or ["host 0"])
        kind = RecipeError if self.status == exit_status.RECIPE_WRONG else RunError
        ended = f"ended with status {self.status}: see {self._logs}"
        return kind(where, "\n".join(problem) or ended)

    @property
    def _stopped(self) -> int:
        return exit_status.INTERRUPTED if self._asked == signal.SIGINT else exit_status.PREEMPTED

    def ask(self, number: int) -> None:
        """Pass a signal on to the hosts; where none has begun, the job ends at once."""
        for actor in self._began.values():
            actor.signal.remote(number)
        if SIGNALS[number].ends:
            self._asked = self._asked or number
            if not self._began and self._end.cancel():
                self._say("stopped")

    async def _run(self) -> int:
        """Return the status of the first host.  Where hosts join and leave, and the first is lost,
        all begin again at another first host, from the newest checkpoint.
        """
        from ray.exceptions import RayError
        from ray.util import remove_placement_group

        lost, logs = 0, f"Logs: {self._logs}"
        while True:
            status, why = None, "its node, or the process of Ray on it, has ended."
            with refuse_as(
                lambda e: RunError("launch=ray", f"{type(e).__name__}: {_reason(e)}", logs)
            ):
                try:
                    status = await self._round()
                except RayError as error:
                    why = _reason(error)
                finally:
                    for group in self._groups:  # with its actors, and what they have started
                        remove_placement_group(group)
            if status is not None and status < 0:  # killed, or asked before it could listen
                if not self._asked:
                    by = signal.Signals(-status).name
                    self._say(f"host 0 was killed by {by}; logs in {self._logs}")
                status = self._stopped if self._asked else exit_status.RUN_FAILED
            if status is not None:
                if self.job is not None:
                    self._say(
                        "complete" if status == exit_status.OK else f"ended with status {status}"
                    )
                return status
            lost = 0 if self._began else lost + 1
            if not self._nodes.may_change or self._asked or lost >= _MOST_LOST:
                raise RunError("host 0", why, logs)
            self._say(f"note: host 0 is lost: {why} The hosts meet again at another one.")
            await asyncio.sleep(_LOOK_S)

    async def _round(self) -> int | None:
        """Run launchers on the fewest hosts, and on more as nodes come.  Return the status of the
        first; None if it is lost.
        """
        self._groups, self._began = [], {}
        gang = self._ask_hosts(self._nodes.fewest)
        endpoint = await self._meeting_place(gang)
        hosts = [asyncio.create_task(self._host(k, each, endpoint)) for k, each in enumerate(gang)]
        try:
            while not hosts[0].done():
                running = {k: host for k, host in enumerate(hosts) if not host.done()}
                all_began = running.keys() <= self._began.keys()
                may_grow = self._nodes.may_change and all_began and not self._asked
                if may_grow and len(running) < self._nodes.most:
                    (actor,) = self._ask_hosts(1)
                    hosts.append(asyncio.create_task(self._host(len(hosts), actor, endpoint)))
                done, _ = await asyncio.wait(
                    running.values(), timeout=_LOOK_S, return_when=FIRST_COMPLETED
                )
                for host in done:
                    host.result()  # raises where it could not start
            for number, host in enumerate(hosts):
                if number not in self._began:
                    host.cancel()
            if hosts[0].result() is not None:
                await asyncio.wait(hosts, timeout=_PART_S)
            return hosts[0].result()
        finally:
            for host in hosts:
                host.cancel()

    def _ask_hosts(self, count: int) -> list[Any]:
        """Ask for hosts on nodes of their own; return their actors."""
        import ray
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        others = {"ray.io/node-id": f"!in({','.join(self._used)})"} if self._used else {}
        group = placement_group(
            [self._need] * count, "STRICT_SPREAD", bundle_label_selector=[others] * count
        )
        self._groups.append(group)
        return [
            ray.remote(RayHost)
            .options(
                num_cpus=self._need["CPU"],
                num_gpus=self._need.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, k),
                max_concurrency=4,  # it reads twice, and gets signals
            )
            .remote()
            for k in range(count)
        ]

    async def _meeting_place(self, gang: list[Any]) -> str:
        """Wait for a node for each host; return an endpoint of the first.  Raises RunError."""
        import ray

        need, join_s = self._need, self._join_s
        asked = asyncio.gather(*(actor.place.remote() for actor in gang))
        patience = Patience(join_s, self._say)
        free = "free nodes of Ray with " + ", ".join(f"{key} {need[key]:g}" for key in need)
        while not (await asyncio.wait([asked], timeout=_LOOK_S))[0]:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            large = sum(all(node.get(key, 0) >= need[key] for key in need) for node in nodes)
            if self.job is not None and large >= len(gang):
                continue  # it is the turn of other jobs
            count = f"{len(gang)} needed, {large} of {len(nodes)} large enough"
            patience.say(f"waiting for {free}: {count}")
            if patience.is_over:
                over = f"no {free} in launch.join_s={join_s:g} s: {count}."
                raise RunError("launch.ray", over, "Add nodes, or ask for less.")
        return str(asked.result()[0][0])

    async def _host(self, number: int, actor: Any, endpoint: str) -> int | None:
        """Run the launcher of one host; return its status, or None if it is lost."""
        from ray.exceptions import RayActorError, RayTaskError

        node = ""
        try:
            _, node = await actor.place.remote()
            self._used.add(node)
            words = self._words(number, endpoint)
            await actor.start.remote(self._recipe, words, self._variables)
            self._began[number] = actor
            if number == 0:
                self._say(f"host 0 begins at {endpoint}; logs in {self._logs}")
            await asyncio.gather(*(self._copy(actor, number, k) for k in (STDOUT, STDERR)))
            if (status := int(await _call(actor.end))) and number and not self._asked:
                self._say(f"note: host {number} ended with status {status}: see its log")
            return status
        except RayActorError:
            return None
        except RayTaskError as error:
            if number < self._nodes.fewest:
                raise
            self._say(f"note: host {number}: {_reason(error)}")
            return None
        except asyncio.CancelledError:
            self._used.discard(node)  # the next round may have it
            raise

    def _words(self, number: int, endpoint: str) -> list[str]:
        """Return the command of a host."""
        words = ["launch.name=local", f"hydra.run.dir='{self._folder}'"]
        if self._nodes.most > 1:
            words.append(f"launch.rdzv_endpoint='{endpoint}'")
        if not self._nodes.may_change:
            words.append(f"launch.node_rank={number}")
        return [*words, "launch.device=cpu"] if "GPU" not in self._need else words

    async def _copy(self, actor: Any, number: int, stream: int) -> None:
        """Write what a host prints to its log; that of the first to this command's, too."""
        file = sys.stderr if stream == STDERR else sys.stdout
        while printed := await _call(actor.read, stream):
            with open(self._logs / f"host_{number}.log", "ab") as log:
                log.write(printed)
            if number == 0 and self.job is None:
                doing.clear()
                file.buffer.write(printed)
                file.flush()
            elif number == 0 and stream == STDERR:
                self._errors = (self._errors + printed)[-_MOST_ERRORS:]

    def _say(self, text: str) -> None:
        doing.clear()
        say(wide_console(), text if self.job is None else f"job {self.job}: {text}")


def submit(recipe: Recipe, folder: Path, job: int | None) -> RayJob:
    """Plan here, so that what cannot run is refused at once; then ask Ray for the hosts.

    job: its number in a sweep.  Raises RecipeError where there is no cluster.
    """
    _connect(recipe.launch.ray.address)
    plan_here(recipe, folder, recipe.train.resume == AUTO or nodes_of(recipe.launch).may_change)
    return RayJob(recipe, folder.absolute(), job)


def _connect(address: str) -> None:
    """Raises RecipeError."""
    try:
        import ray
        from ray._private.ray_logging import global_worker_stdstream_dispatcher
    except ImportError as error:
        problem, instead = "ray needs the package ray.", "pip install 'flowrun[ray]'"
        raise RecipeError("launch.name", problem, instead) from error
    if ray.is_initialized():
        return
    doing.doing("connecting to Ray")
    known = os.environ.get("RAY_ADDRESS", "") if address == AUTO else address
    host, _, port = known.rpartition(":")
    own: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        if port.isdigit():  # Ray itself tries for a minute
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (OSError, ValueError, RuntimeError) as error:
        raise RecipeError(
            "launch.ray.address",
            f"no Ray cluster at {known or 'this machine'}: {str(error).partition('. ')[0]}.",
            "`ray start --head` starts one, launch.ray.address=HOST:PORT names another, and"
            " launch.ray.address=local makes one of this machine for this command.",
        ) from error
    # a page for each raylet that is lost, amid the run's own lines
    global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _pass_on)


def _pass_on(number: int, _: FrameType | None) -> None:
    """Pass a signal on to all jobs, and leave what this command does: one may be planned."""
    for job in _jobs:
        _loop().call_soon_threadsafe(job.ask, number)
    if (asked := SIGNALS[number]).ends:
        raise KeyboardInterrupt if number == signal.SIGINT else Preempted(asked.by)


def _need(recipe: Recipe) -> dict[str, float]:
    """Return what a host needs of its node, by Ray's names."""
    launch, ranks = recipe.launch, ranks_of_a_host(recipe.num_ranks, recipe.launch)
    gpus = {"GPU": ranks} if launch.device == "cuda" else {}
    return {"CPU": ranks * (launch.threads + launch.data_workers), **gpus, **launch.ray.resources}


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


async def _call(method: Any, *arguments: object) -> Any:
    """Call a method of an actor, again where its node does not answer for a while."""
    from ray.exceptions import ActorUnavailableError

    while True:
        try:
            return await method.remote(*arguments)
        except ActorUnavailableError:
            await asyncio.sleep(_LOOK_S)


@cache
def _loop() -> AbstractEventLoop:
    """Return the loop of all jobs, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="ray jobs", daemon=True).start()
    return loop
