"""The mirrored view is torch's DistributedDataParallel: two real processes run both.

Losses within 1e-5 relative, weights and statistics within 1e-5: float32 sums in another order.
DDP hands rank 0's buffers to all before each forward; in training nobody reads them.
"""

import pickle
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flowrun.engine.actors.plan import Plan
from flowrun.engine.compile import Compilation
from flowrun.engine.runtime.drivers.distributed import DistributedRank
from flowrun.engine.runtime.transport.links import Links
from support.layouts.gloo import start_ranks
from support.layouts.grids import Layout, example, initial, strategy, task
from support.layouts.plain_loop import torch_optimizer
from support.nets.normed_net import NORMED

pytestmark = pytest.mark.processes

STEPS, RANKS = 3, 2  # of more steps rounding, which differs by CPU, comes near the bounds


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    plan: Plan = pickle.loads(Path(folder, "plan").read_bytes())
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=RANKS
    )
    torch.save({"ddp": _ddp(rank), "flowrun": _flowrun(rank, plan)}, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _ddp(rank: int) -> dict[str, Any]:
    """losses: of this rank.  state: parameters and buffers."""
    model = NORMED.model().train()
    wrapped = DistributedDataParallel(model)
    optimizer = torch_optimizer(NORMED.optimizer, model)
    rows = NORMED.micro_batch // RANKS
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for k in range(NORMED.micro_batches):
            last = k == NORMED.micro_batches - 1
            batch = NORMED.rows(step, k, slice(rank * rows, (rank + 1) * rows))
            with nullcontext() if last else wrapped.no_sync():
                loss = NORMED.output_loss(wrapped, batch)[1] / NORMED.micro_batches
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return {"losses": losses, "state": model.state_dict()}


def _flowrun(rank: int, plan: Plan) -> dict[str, Any]:
    device = torch.device("cpu")
    links = Links(rank, device)
    body = DistributedRank(plan, rank, NORMED.rows, initial(NORMED), device, links)
    losses = [result["loss_by_rank"] for result in body.run(STEPS)]
    links.close()
    state = {v.name: body.body.variables[v.tensor] for v in plan.graph.variables}
    return {"losses": losses, "state": state}


def test_mirrored_trains_as_distributed_data_parallel(tmp_path: Path) -> None:
    view = replace(strategy(NORMED, Layout(data=RANKS)), mirrored=True)
    plan = Compilation(task(NORMED), example(NORMED), view).training.plan
    (tmp_path / "plan").write_bytes(pickle.dumps(plan))
    start_ranks(_process, RANKS, str(tmp_path))
    left = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    by_rank = zip(*(made["ddp"]["losses"] for made in left), strict=True)
    for found, losses in zip(left[0]["flowrun"]["losses"], by_rank, strict=True):
        assert found == pytest.approx(losses, rel=1e-5)
    for rank, made in enumerate(left):
        parameters = dict(NORMED.model().named_parameters())
        for name, value in made["ddp"]["state"].items():
            if rank == 0 or name in parameters:
                here = made["flowrun"]["state"][name]
                torch.testing.assert_close(here, value, rtol=1e-5, atol=1e-5)
    ours = [made["flowrun"]["state"]["norm1.running_mean"] for made in left]
    assert not torch.equal(*ours), "each rank has statistics of its own"
