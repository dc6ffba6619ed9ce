"""The ranks that compute the logits of the next token, each a process of this host.

They run the evaluation plan of window.py, one step a token.  They are forked once the plan is made;
each reads its own pieces of the weights from the run's files, so no process holds them all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrun.engine.compile import Rehearsed
from flowrun.engine.errors import RunError
from flowrun.engine.runtime.drivers import logical_checkpoint
from flowrun.engine.runtime.drivers.distributed import DistributedRank, LostPeer
from flowrun.engine.runtime.process.core import pin_to_core
from flowrun.engine.runtime.process.lifetime import end_with
from flowrun.engine.runtime.transport.links import Links
from flowrun.launcher.data.open_files import reopen_files
from flowrun.launcher.job.job import Job
from flowrun.launcher.launch.failure import describe, describe_exit
from flowrun.launcher.launch.hosts.alone import Alone
from flowrun.launcher.launch.limits import check_limits
from flowrun.launcher.launch.worker import device_of_rank, join_process_group
from flowrun.launcher.sampling.window import NEXT, WindowBatches

_SILENCE_S = 1800.0  # after which a rank gives up what another owes it
_BORN_S = 300.0  # until all ranks are forked
_LINGER_S = 2.0  # of a rank that merely lost another, so that the other is blamed


@dataclass(frozen=True, kw_only=True)
class RanksModel:
    """The logits of the next token, by ranks.

    window: the most tokens that they read at once.  name: of the model, for errors.  pipes: to each
    rank.  processes: torch's context of the ranks.
    """

    window: int
    name: str
    pipes: Sequence[Connection]
    processes: Any

    @property
    def cost(self) -> str:
        """What a token costs, for a person."""
        ranks = f"{len(self.pipes)} rank{'s' * (len(self.pipes) > 1)}"
        return (
            f"{ranks}: each token is a forward over {self.window} tokens, as no keys and values are"
            " kept"
        )

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Return logits (V,) of the token after `ids`, of which the last `window` are read.

        Raises RunError for the rank that failed.
        """
        with suppress(BrokenPipeError):  # of a rank that has ended, which is seen below
            for pipe in self.pipes:
                pipe.send(list(ids[-self.window :]))
        ready = wait([*self.pipes, *self.processes.sentinels])
        for pipe in self.pipes:
            if pipe in ready:
                with suppress(EOFError):
                    return _read(pipe)
        rank = next(k for k, each in enumerate(self.processes.sentinels) if each in ready)
        process = self.processes.processes[rank]
        process.join()
        raise RunError(f"rank {rank}", describe_exit(process.exitcode))


@contextmanager
def start_ranks(
    job: Job, found: Rehearsed, checkpoint: Path | None, window: int, name: str
) -> Iterator[RanksModel]:
    """Start the ranks of a plan, and end them at the end of the block.

    job, found: of the recipe of a window, and its evaluation plan.  checkpoint: a folder that
    weights are read from; None: the job's.  window: its tokens.  name: of the model, for errors.
    """
    ranks = found.plan.num_ranks
    check_limits(job, job.training, ranks)
    pipes = [Pipe() for _ in range(ranks)]
    place = Alone()  # whose store is open until the ranks have ended
    meeting = place.meet(lambda: None, lambda *_: None)  # type: ignore[arg-type, return-value]
    worker = _RankOfWindow(
        job=job,
        found=found,
        checkpoint=checkpoint,
        window=window,
        pipes=[there for _, there in pipes],
        port=meeting.port,
        address=meeting.address,
        interface=meeting.interface,
        parent=os.getpid(),
        born=get_context("fork").Barrier(ranks),
    )
    from torch.multiprocessing import start_processes  # type: ignore[attr-defined]

    processes = start_processes(
        worker.live, nprocs=ranks, join=False, daemon=True, start_method="fork"
    )
    for _, there in pipes:
        there.close()
    model = RanksModel(
        window=window, name=name, pipes=[here for here, _ in pipes], processes=processes
    )
    try:
        yield model
        for pipe in model.pipes:
            with suppress(BrokenPipeError):
                pipe.send(None)
        for process in processes.processes:
            process.join(timeout=5)
    finally:
        for process in processes.processes:
            process.kill()
        place.close()


@dataclass(frozen=True, kw_only=True)
class _RankOfWindow:
    """What each forked process runs; see start_ranks."""

    job: Job
    found: Rehearsed
    checkpoint: Path | None
    window: int
    pipes: Sequence[Connection]
    address: str
    port: int
    interface: str
    parent: int
    born: Barrier  # for all, before any talks to the parent's store: see launch/worker.py

    def live(self, rank: int) -> None:
        """Run from the fork to the exit, as `rank`."""
        end_with(self.parent)
        reopen_files()
        try:
            self._run(rank)
        except BaseException as error:
            if isinstance(error, LostPeer):
                time.sleep(_LINGER_S)
            where, problem, _ = describe(error, rank)
            with suppress(OSError):
                self.pipes[rank].send((where, problem))
            os._exit(1)

    def _run(self, rank: int) -> None:
        import torch.distributed as dist

        self.born.wait(_BORN_S)
        plan, pipe = self.found.plan, self.pipes[rank]
        launch, ranks = self.job.recipe.launch, plan.num_ranks
        of_group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "GROUP_RANK": 0}
        of_store = {"MASTER_ADDR": self.address, "MASTER_PORT": self.port}
        os.environ.update({key: str(value) for key, value in (of_group | of_store).items()})
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the parent has it
        torch.set_num_threads(launch.threads)
        pin_to_core(rank, ranks)
        device = device_of_rank(self.job.device_type)
        join_process_group(device, _SILENCE_S, self.interface)
        links = Links(rank, device, "0", launch.transport != "gloo")
        batches = WindowBatches(self.job.recipe.micro_batch_size, self.window)
        initial = None if self.checkpoint else self.job.initial
        body = DistributedRank(plan, rank, batches, initial, device, links)
        if self.checkpoint:
            logical_checkpoint.restore(self.checkpoint, plan, rank, body.body.variables)
        while ids := pipe.recv():
            batches.ids = ids
            results = body.run(1)
            if body.reports:
                pipe.send(results[0][NEXT])
        dist.barrier()
        links.close()
        dist.destroy_process_group()


def _read(pipe: Connection) -> Tensor:
    """Return the logits that a rank sends.  Raises RunError for one that has failed."""
    message = pipe.recv()
    if isinstance(message, tuple):
        raise RunError(*message)
    return torch.tensor(message)
