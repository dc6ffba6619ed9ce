"""The process of one rank of a peer: `python -m flowrun.launcher.bench.peers.peer_rank ORDER`.

ORDER is a file with a PeerOrder; each rank writes what it measured to a file in ORDER's folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from flowrun.engine.runtime.process.process_memory import most_taken, taken
from flowrun.engine.runtime.rank.readback import HostReadback
from flowrun.launcher.bench.peer_order import PeerOrder
from flowrun.launcher.bench.peers.setting import Setting, TrainStep
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load

MODULES = {  # of each kind; only the one that is needed is imported: it takes up to a second
    "single": "data_parallel",
    "ddp": "data_parallel",
    "zero1": "sharded",
    "fsdp2": "sharded",
    "tensor": "tensor",
    "pipeline": "torch_pipelining",
}


def layout(kind: str) -> Callable[[Setting], TrainStep]:
    """The function of a peer's kind."""
    module = import_module(f"flowrun.launcher.bench.peers.{MODULES[kind]}")
    return getattr(module, kind)  # type: ignore[no-any-return]


def main(file: Path) -> None:
    """Train, and write what was measured."""
    order = PeerOrder.from_json(file.read_text())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    job = Job(load(list(order.overrides), order.config_dir), values=False)
    torch.set_num_threads(job.recipe.launch.threads)
    device = torch.device("cpu")
    if job.device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    if world > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{order.meet}", rank=rank, world_size=world
        )
    make = layout(order.peer.kind)
    before = taken()  # weights are training's
    step = make(
        Setting(
            job=job, peer=order.peer, rank=rank, world=world, device=device, compiled=order.compiled
        )
    )
    losses, seconds = _measure(step, job.recipe.train.steps)
    readbacks: dict[str, object] = {"losses": losses, "step_s": seconds}
    readbacks["peak_bytes"] = most_taken() - before
    if device.type == "cuda":
        readbacks["peak_bytes"] = torch.cuda.max_memory_reserved(device)
    file.with_name(f"rank{rank}.json").write_text(json.dumps(readbacks))
    if world > 1:
        dist.barrier()  # otherwise a rank that has gone is an error of one that still listens


def _measure(step: TrainStep, steps: int) -> tuple[list[float | None], list[float]]:
    """Measure losses, and seconds from the end of one step to the end of the next.

    On CUDA a step ends, as flowrun's do, when its loss is on the host, which has enqueued the next
    by then.
    """
    readbacks: deque[HostReadback | None] = deque()
    losses: list[float | None] = []
    seconds: list[float] = []
    ended = time.perf_counter()
    for k in range(steps):
        loss = step()
        behind = loss is not None and loss.is_cuda
        readbacks.append(None if loss is None else HostReadback([loss]))
        while len(readbacks) > (behind and k + 1 < steps):
            first = readbacks.popleft()
            losses.append(None if first is None else first.read()[0])
            now = time.perf_counter()
            seconds.append(now - ended)
            ended = now
    return losses, seconds


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # Gloo keeps tensors of the last collectives, DDP the group: tearing them down while the
    # interpreter ends aborts at random (pytorch/pytorch#179291), and nothing is left to do.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
