"""launch=slurm: the recipe as a batch job, one task a host, each task a launcher of its own.

submitit writes and submits the job (extra `slurm`).  The hosts meet at the first of them.  At
Slurm's warning before the time is up, or at launch.time_limit, the run finishes its step and saves;
then the job is put back into the queue, where it goes on from there.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from subprocess import SubprocessError
from typing import Any

from flowrun.engine.errors import FlowrunError, RecipeError, RunError
from flowrun.launcher.job.job import Job
from flowrun.launcher.platforms.platform import Platform
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.schema import AUTO
from flowrun.launcher.report.report import Report
from flowrun.launcher.run import run
from flowrun.launcher.store.checkpoint import check_new
from flowrun.launcher.store.run_files import REPORT
from flowrun.launcher.supervise.hands.signals import Preempted
from flowrun.launcher.supervise.hosts.meeting import ranks_of_a_host
from flowrun.launcher.supervise.life.verdicts import TIME_LIMIT, WARNING

_NO_GPU = "no GPU was asked for: launch.device=cuda asks for one a rank"
_WARNINGS = (WARNING, TIME_LIMIT)  # after these it is put back; a cancelled one is not


@dataclass(frozen=True)
class Agent:
    """An agent runs in each task of the job: it is the launcher of one host.  Picklable."""

    recipe: Recipe
    folder: Path

    def __call__(self) -> None:
        """Train, or go on; the run's folder is shared by all hosts."""
        from submitit import JobEnvironment

        where = JobEnvironment()
        recipe = self.on_host(where.global_rank, where.hostnames[0], where.job_id)
        warning = where._usr_sig()  # whose handler of submitit's puts the job back into the queue
        put_back = signal.getsignal(warning)
        if warning != signal.SIGUSR2:  # which a run handles
            signal.signal(warning, lambda *_: signal.raise_signal(signal.SIGUSR2))
        try:
            run(recipe, self.folder)
        except Preempted as ended:
            if ended.by.startswith(_WARNINGS) and callable(put_back):
                put_back(warning, None)
            raise

    def on_host(self, host: int, first: str, job_id: str) -> Recipe:
        """Return the recipe as host number `host` runs it.

        first: name of host 0.  job_id: of Slurm.
        """
        launch = self.recipe.launch
        here = Platform("Slurm", launch.num_hosts, host, address=first, job=job_id)
        return replace(
            self.recipe,
            train=replace(self.recipe.train, resume=AUTO),
            launch=replace(launch, name="local", node_rank=host, rdzv_endpoint=here.endpoint),
        )

    def checkpoint(self) -> Any:
        """submitit calls it when the job must go: what takes its place in the queue.

        The same: what it goes on from, it finds when it starts.
        """
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


@dataclass(frozen=True)
class Submitted:
    """A job in the queue.  job: submitit's.  waits: its end is waited for.  note: what a person
    should know.
    """

    job: Any
    folder: Path
    waits: bool = False
    note: str = ""

    def __str__(self) -> str:
        asked = f"; {self.note}" if self.note else ""
        return f"job {self.job.job_id}, log {self.job.paths.stdout}{asked}"

    def outcome(self) -> Report | FlowrunError:
        """Wait for its end: its report, or why there is none."""
        try:
            self.job.results()
        except (RuntimeError, OSError, EOFError, UnpicklingError, SubprocessError) as error:
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            log = f"The log of its first host: {self.job.paths.stderr}"
            return RunError(f"job {self.job.job_id}", " ".join(said[-1:]), log)
        return Report.from_json((self.folder / REPORT).read_text())


def submit(recipe: Recipe, folder: Path) -> Submitted:
    """Plan here, so that what cannot run is refused before it waits in a queue; then submit.

    Raises RunError for what Slurm refuses.
    """
    executor = _executor(recipe, folder / "slurm")
    plan_here(recipe, folder, resumed=False)
    try:
        job = executor.submit(Agent(recipe, folder.absolute()))
    except (OSError, RuntimeError) as error:  # submitit's own are of the latter kind
        raise RunError("launch=slurm", f"Slurm refused the job: {error}") from error
    blind = recipe.launch.device == "auto" and not recipe.launch.slurm.gpus_per_node
    return Submitted(job, folder, recipe.launch.slurm.wait, _NO_GPU if blind else "")


def plan_here(recipe: Recipe, folder: Path, resumed: bool) -> None:
    """Plan a recipe that runs elsewhere.  resumed: it may continue a run in the folder.  Raises
    FlowrunError for what cannot run.
    """
    check_new(folder, resumed)  # its hosts remove what is half written, under the lock
    here = replace(recipe.launch, name="local")
    _ = Job(replace(recipe, launch=here), values=False).training


def _executor(recipe: Recipe, folder: Path) -> Any:
    try:
        import submitit
    except ImportError as error:
        raise RecipeError(
            "launch.name", "slurm needs the package submitit.", "pip install 'flowrun[slurm]'"
        ) from error
    launch, wanted = recipe.launch, recipe.launch.slurm
    ranks = ranks_of_a_host(recipe.num_ranks, launch)
    executor = submitit.AutoExecutor(folder, wanted.cluster)
    executor.update_parameters(
        name=f"flowrun-{recipe.name}",
        timeout_min=wanted.minutes,
        gpus_per_node=wanted.gpus_per_node or (ranks if launch.device == "cuda" else None),
        cpus_per_task=wanted.cpus_per_node or ranks * (launch.threads + launch.data_workers),
        mem_gb=wanted.mem_gb,
        nodes=launch.num_hosts,
        tasks_per_node=1,
        local_nodes=1,  # whose hosts are tasks of this one
        local_tasks_per_node=launch.num_hosts,
        slurm_partition=wanted.partition,
        slurm_account=wanted.account,
        slurm_qos=wanted.qos,
        slurm_setup=list(wanted.setup) or None,
        slurm_signal_delay_s=wanted.warning_s,
        slurm_additional_parameters=dict(wanted.extra) or None,
    )
    return executor
