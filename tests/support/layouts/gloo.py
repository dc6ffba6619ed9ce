"""Real processes: forks of one that has imported torch; and such as train plan after plan."""

import multiprocessing
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from flowrun.engine.actors.plan import Plan
from flowrun.engine.runtime.drivers.distributed import DistributedRank
from flowrun.engine.runtime.transport.links import Links
from support.layouts.grids import Run, initial, logical_weights
from support.layouts.plain_loop import Training

Jobs = Mapping[str, tuple[Training, Plan]]


def start_ranks(process: Callable[..., None], world: int, *arguments: Any) -> None:
    """Call process(rank, *arguments) in `world` processes, and wait for their end.

    They have the environment of the first that was started, and no thread of this process.
    """
    multiprocessing.set_forkserver_preload([DistributedRank.__module__])
    start_processes(process, arguments, nprocs=world, start_method="forkserver")  # type: ignore[no-untyped-call]


def run_on_gloo(
    jobs: Jobs, world: int, steps: int, folder: Path, own_groups: bool = False
) -> dict[str, Run]:
    """Train each plan for some steps on `world` processes; a plan may leave ranks idle.

    own_groups: all messages go through torch, those of each channel in a group of its own.
    """
    (folder / "jobs").write_bytes(pickle.dumps((dict(jobs), steps, own_groups)))
    start_ranks(_process, world, world, str(folder))
    left = [torch.load(folder / f"{rank}.pt") for rank in range(world)]
    return {name: _joined(plan, [r[name] for r in left]) for name, (_, plan) in jobs.items()}


def _process(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    jobs, steps, own_groups = pickle.loads(Path(folder, "jobs").read_bytes())
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=world
    )
    links = Links(rank, torch.device("cpu"), shared=not own_groups, own_groups=own_groups)
    out = {}
    for name, (training, plan) in jobs.items():
        links.join(plan)  # every process joins every plan
        out[name] = _train(rank, training, plan, steps, links)
    torch.save(out, f"{folder}/{rank}.pt")
    dist.barrier()
    links.close()
    dist.destroy_process_group()


def _train(rank: int, training: Training, plan: Plan, steps: int, links: Links) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if any(rank in placement for placement in plan.placements):
        device = torch.device("cpu")
        body = DistributedRank(plan, rank, training.rows, initial(training), device, links)
        losses = [result["loss"] for result in body.run(steps)]
        out = {
            "losses": losses if body.reports else [],
            "shards": body.body.variables,
            "sent": body.sent_bytes,
            "live": body.body.most_live,
        }
    dist.barrier()  # plan after plan: the next one uses the same tags
    return out


def _joined(plan: Plan, left: list[dict[str, Any]]) -> Run:
    ranks = {rank: made for rank, made in enumerate(left) if made}
    sent: Counter[int] = Counter()
    for made in ranks.values():
        sent.update(made["sent"])
    (losses,) = (made["losses"] for made in ranks.values() if made["losses"])
    weights = logical_weights(plan, {rank: made["shards"] for rank, made in ranks.items()})
    live = {(rank, r): most for rank, made in ranks.items() for r, most in made["live"].items()}
    return Run(plan, tuple(losses), weights, sent, live)
