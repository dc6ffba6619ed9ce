"""Torch's ring attention with torch's kernel for CPUs: each rank has head and tail."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from flowrun.launcher.bench.peers import context


def _rank(rank: int, parts: int, folder: str) -> None:
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=parts)
    whole = _whole()
    mine = [context.cut(x.detach(), rank, parts, 2).requires_grad_() for x in whole]
    out = context.attend(*mine, is_causal=True)
    (out * out).sum().backward()
    torch.save((out.detach(), [x.grad for x in mine]), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _whole() -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    make = partial(torch.randn, 2, 3, 16, 8, generator=draws)
    return [make().requires_grad_() for _ in range(3)]


@pytest.mark.thorough
@pytest.mark.processes
def test_the_ring_gives_each_rank_its_part_of_whole_attention(tmp_path: Path) -> None:
    mp.spawn(_rank, (2, str(tmp_path)), nprocs=2)
    whole = _whole()
    out = F.scaled_dot_product_attention(*whole, is_causal=True)
    (out * out).sum().backward()
    for rank in range(2):
        ours, grads = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(ours, context.cut(out.detach(), rank, 2, 2))
        for x, grad in zip(whole, grads, strict=True):
            torch.testing.assert_close(grad, context.cut(x.grad, rank, 2, 2), rtol=1e-5, atol=1e-5)


def test_pieces_divide_the_length() -> None:
    with pytest.raises(ValueError, match="4 pieces do not divide 6 tokens"):
        context.cut(torch.zeros(1, 6), 0, 2, 1)
