"""launch=local: one process a rank, started by torch.distributed.elastic, on one host or several.

This process has composed, captured and planned; its workers are forked and inherit the result.  They tell it what happens over
one pipe: steps, the end of each rank, or the one error that matters.  The same command on each host (launch.nnodes,
launch.rdzv_endpoint) makes one run; the hosts find each other by elastic's c10d rendezvous.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from flowrun.engine.compile import Rehearsed
from flowrun.engine.errors import PlanError, RecipeError, RunError
from flowrun.launcher import weights
from flowrun.launcher.job import Job
from flowrun.launcher.record import Record
from flowrun.launcher.report import Log
from flowrun.launcher.virtual import acts_by_name, mean_results, most_stashed

_SHUTDOWN_S = 3  # after that, workers that do not end are killed


def execute_local(job: Job, training: Rehearsed, evaluation: Rehearsed | None, record: Record) -> Log:
    """Start this host's ranks, and stay until all have ended.

    Raises RunError for the first rank that failed, KeyboardInterrupt on Ctrl-C.
    """
    launch, num_ranks = job.recipe.launch, training.plan.num_ranks
    if num_ranks % launch.nnodes:
        raise RecipeError("launch.nnodes", f"{num_ranks} ranks cannot be divided over {launch.nnodes} hosts.")
    fork = multiprocessing.get_context("fork")
    pipe = fork.SimpleQueue()
    heard = _Heard(record)
    listener = threading.Thread(target=heard.listen, args=(pipe,), daemon=True)
    listener.start()
    worker = _Worker(job, training, evaluation, record.folder, pipe)
    try:
        _launch(worker, num_ranks // launch.nnodes, job)
    except _Failed as failed:
        pipe.put(None)
        listener.join()
        raise heard.error or failed.error from None
    finally:
        pipe.put(None)
        listener.join(timeout=10)
        pipe.close()
    if job.recipe.train.save:
        weights.join_shards(record.folder, training.plan)
    return heard.log()


class _Failed(Exception):
    """Some worker ended badly; `error` says what elastic knows."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _entry(worker: _Worker) -> None:
    worker.live()


def _launch(worker: _Worker, local_ranks: int, job: Job) -> None:
    """Run elastic's agent in this process."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    launch = job.recipe.launch
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_SHUTDOWN_S)
    os.environ.setdefault("OMP_NUM_THREADS", str(launch.threads))
    config = LaunchConfig(
        min_nodes=launch.nnodes, max_nodes=launch.nnodes, nproc_per_node=local_ranks,
        run_id=f"flowrun-{job.recipe.name}", rdzv_backend="c10d",
        rdzv_endpoint=launch.rdzv_endpoint or "localhost:0",
        rdzv_configs={"timeout": 120},
        local_addr="localhost" if launch.nnodes == 1 else None,
        max_restarts=0, monitor_interval=0.1, start_method="fork",
    )
    try:
        elastic_launch(config, _entry)(worker)
    except ChildFailedError as error:
        raise _Failed(_what_elastic_saw(error)) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise _Failed(RunError("the launcher", f"stopped by {signal.Signals(error.sigval).name}")) from None


def _what_elastic_saw(error: Any) -> RunError:
    """Blame a rank that was killed before one that noticed."""
    failures = sorted(error.failures.items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp))
    rank, failure = failures[0]
    code = failure.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
    return RunError(f"rank {rank}", f"the process {how}.")


# ------------------------------------------------------------------------------------------ what the launcher hears


@dataclass
class _Heard:
    """Collects what the workers tell, in a thread of the launcher."""

    record: Record
    error: RunError | None = None
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)

    def listen(self, pipe: Any) -> None:
        """Until None."""
        while (message := pipe.get()) is not None:
            match message:
                case ("step", step, results, seconds):
                    self.record.step(step, results, seconds)
                case ("end", rank, measured):
                    self.ends[rank] = measured
                case ("error", where, problem, story):
                    if self.error is None:
                        self.error = RunError(where, problem)
                        self.error.add_note(story)

    def log(self) -> Log:
        """Everything measured on this host's ranks."""
        validation: dict[str, float] = {}
        for measured in self.ends.values():
            validation = validation or measured["validation"]
        by_rank = {key: {rank: m[key] for rank, m in self.ends.items()} for key in ("peak", "sent", "acts", "stashed")}
        return Log(tuple(self.record.steps), validation, by_rank["peak"], by_rank["sent"], by_rank["acts"], by_rank["stashed"])


# ------------------------------------------------------------------------------------------ one worker


@dataclass
class _Worker:
    """What each forked process runs."""

    job: Job
    training: Rehearsed
    evaluation: Rehearsed | None
    folder: Path
    pipe: Any

    def live(self) -> None:
        """From fork to exit."""
        _die_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        rank = int(os.environ["RANK"])
        try:
            self._run(rank)
        except BaseException as error:
            known = isinstance(error, RunError | PlanError)
            where = error.where if isinstance(error, RunError | PlanError) else f"rank {rank}"
            problem = error.problem if known else f"{type(error).__name__}: {error}"  # type: ignore[attr-defined]
            self.pipe.put(("error", where, problem, traceback.format_exc()))
            sys.stdout.flush()
            os._exit(1)  # peers are stopped by the agent; a regular exit would wait for them

    def _run(self, rank: int) -> None:
        import torch.distributed as dist

        from flowrun.engine.runtime.collectives import close_channels
        from flowrun.engine.runtime.distributed import DistributedRank

        base = _resident_bytes()
        recipe = self.job.recipe
        torch.set_num_threads(recipe.launch.threads)
        device = _device(recipe.launch.device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=10))
        body = DistributedRank(self.training.plan, rank, self.job.sampler, self.job.initial, device)
        teller = _Teller(self.pipe, recipe.launch.nnodes, body.reports)
        teller.start(recipe.train.steps)
        body.run(recipe.train.steps, teller.step if body.reports else None)
        if recipe.train.save:
            weights.save_shards(self.folder, self.training.plan, rank, body.body.variables)
        validation = self._evaluate(rank, body, device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - base
        self.pipe.put(("end", rank, {
            "validation": validation, "peak": peak, "sent": sum(body.sent_bytes.values()),
            "acts": acts_by_name(self.training, body.body.acts), "stashed": most_stashed(self.training, body.body.most_live),
        }))
        teller.join()
        dist.barrier()  # gloo aborts at random if a peer has gone when groups are destroyed
        close_channels()
        dist.destroy_process_group()

    def _evaluate(self, rank: int, trained: Any, device: torch.device) -> dict[str, float]:
        from flowrun.engine.runtime.distributed import DistributedRank

        steps = self.job.evaluation_sampler.eval_steps(self.job.recipe.eval.batches)
        if self.evaluation is None or not steps:
            return {}
        body = DistributedRank(self.evaluation.plan, rank, self.job.evaluation_sampler, self.job.initial, device)
        body.body.variables.update({k: v for k, v in trained.body.variables.items() if k in body.body.variables})
        return mean_results(body.run(steps))


class _Teller:
    """Tells this host's launcher each step; with several hosts, through the rendezvous store to the other launchers too."""

    def __init__(self, pipe: Any, nnodes: int, reports: bool) -> None:
        self.pipe = pipe
        self.nnodes = nnodes
        self.reports = reports
        self.thread: threading.Thread | None = None

    def start(self, steps: int) -> None:
        """On a host without the reporting rank, its first rank forwards what the store holds."""
        if self.nnodes == 1:
            return
        here = int(os.environ["GROUP_RANK"])
        if self.reports:
            self._store().set("flowrun/reporting_host", str(here))
        elif int(os.environ["LOCAL_RANK"]) == 0:
            self.thread = threading.Thread(target=self._forward, args=(here, steps), daemon=True)
            self.thread.start()

    def step(self, step: int, results: dict[str, float], seconds: float) -> None:
        """From the reporting rank."""
        self.pipe.put(("step", step, results, seconds))
        if self.nnodes > 1:
            self._store().set(f"flowrun/step/{step}", json.dumps([results, seconds]))

    def join(self) -> None:
        """Until everything is forwarded."""
        if self.thread is not None:
            self.thread.join()

    def _forward(self, here: int, steps: int) -> None:
        store = self._store()
        if int(store.get("flowrun/reporting_host")) == here:
            return
        for step in range(steps):
            results, seconds = json.loads(store.get(f"flowrun/step/{step}"))
            self.pipe.put(("step", step, results, seconds))

    @staticmethod
    def _store() -> Any:
        """A connection of its own to the store that elastic opened (a shared one is not for several threads)."""
        from torch.distributed import TCPStore

        return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def _device(wanted: str) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _resident_bytes() -> int:
    """Resident memory of this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _die_with_parent() -> None:
    """If the launcher is killed, its workers must not stay (Linux: PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
