"""The process of one rank of a peer: `python -m flowrun.launcher.bench.peers.peer_rank ORDER DIR`.

ORDER is a file with a Run; each rank writes what it measured to a file in ORDER's folder.  DIR: the
user's own groups, or empty.
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
from flowrun.launcher.bench.peers.setting import Setting, TrainStep
from flowrun.launcher.bench.suite import Run, make
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load

MODULES = {  # of each kind; only the one that is needed is imported: it takes up to a second
    **dict.fromkeys(("single", "ddp", "zero1", "fsdp2"), "data_parallel"),
    "tensor": "tensor",
    "context": "context",
    "pipeline": "torch_pipelining",
}


def layout(kind: str) -> Callable[[Setting], TrainStep]:
    """The function of a peer's kind."""
    module = import_module(f"flowrun.launcher.bench.peers.{MODULES[kind]}")
    return getattr(module, kind)  # type: ignore[no-any-return]


def main(file: Path, config_dir: str) -> None:
    run, rank = make(Run, json.loads(file.read_text()), "run"), int(os.environ["RANK"])
    assert run.peer is not None
    job = Job(load(list(run.overrides), config_dir or None), values=False)
    torch.set_num_threads(job.recipe.launch.threads)
    device, backend = torch.device("cpu"), "gloo"
    if job.device_type == "cuda":
        device, backend = torch.device("cuda", rank), "nccl"
        torch.cuda.set_device(device)
    if run.ranks > 1:
        meet = f"file://{file.with_name('meet').absolute()}"
        dist.init_process_group(backend, init_method=meet, rank=rank, world_size=run.ranks)
    train = layout(run.peer.kind)
    before = taken()  # weights are training's
    step = train(
        Setting(
            job=job,
            peer=run.peer,
            rank=rank,
            world=run.ranks,
            device=device,
            compiled=run.mode == "compiled",
        )
    )
    losses, seconds = _measure(step, job.recipe.train.steps)
    peak = most_taken() - before
    if device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(device)
    readbacks = {"losses": losses, "step_s": seconds, "peak_bytes": peak}
    file.with_name(f"rank{rank}.json").write_text(json.dumps(readbacks))
    if run.ranks > 1:
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
    main(Path(sys.argv[1]), sys.argv[2])
    # Gloo keeps tensors of the last collectives, DDP the group: tearing them down while the
    # interpreter ends aborts at random (pytorch/pytorch#179291), and nothing is left to do.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
