"""Torch's ring attention: each rank has two pieces of every sample, one of the head and one of the
tail, as torch's experimental context_parallel divides causal attention.

That routes kernels of GPUs alone.  Here the ring that it routes to is called with torch's kernel
for CPUs, which is flowrun's too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flowrun.engine.torch_internals import cpu_attention, cpu_attention_backward, ring_attention
from flowrun.launcher.bench.peers.setting import PeerBatch, Setting, TrainStep, chosen, train_loop

_LENGTH = 2  # of (samples, heads, length, width)


def context(setting: Setting) -> TrainStep:
    """Ring attention in place of F.scaled_dot_product_attention, gradients by DDP.

    The peer's units are modules that take the places of their tokens as `positions_BT`.  Raises
    ValueError on a GPU, of which this has no kernel.
    """
    if setting.device.type != "cpu":
        raise ValueError("a peer of kind context runs on CPUs: hardware=cpu")
    model = setting.model().to(setting.device).train()

    def mine(whole: Tensor) -> Tensor:
        return cut(whole, setting.rank, setting.world, 1)

    def place(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        places = torch.arange(given[0].shape[1] * setting.world, device=setting.device)
        return given[:1], {**named, "positions_BT": mine(places[None])[0]}

    for module in chosen(model, setting.peer.units).values():
        module.register_forward_pre_hook(place, with_kwargs=True)
    F.scaled_dot_product_attention = attend  # type: ignore[assignment]
    if setting.compiled:
        model.compile()
    whole = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def cut_all(batch: PeerBatch) -> PeerBatch:
        return {name: mine(value) for name, value in batch.items()}

    return train_loop(setting, whole, parts=1, cut=cut_all)


def cut(whole: Tensor, rank: int, world: int, dim: int) -> Tensor:
    """Return the two pieces of a rank.  Raises ValueError if pieces do not divide the length."""
    count = 2 * world
    if whole.shape[dim] % count:
        raise ValueError(f"{count} pieces do not divide {whole.shape[dim]} tokens")
    pieces = whole.chunk(count, dim)
    return torch.cat([pieces[rank], pieces[count - 1 - rank]], dim)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Stand in for F.scaled_dot_product_attention, whose arguments these are, on all ranks."""
    assert is_causal and attn_mask is None and not dropout_p, "the ring knows a causal mask alone"
    scale = scale or 1 / math.sqrt(query.shape[-1])
    return _RingAttention.apply(query, key, value, scale)  # type: ignore[no-any-return, no-untyped-call]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        attend_around, _ = ring_attention(balanced=True)
        out, rows, *_ = attend_around(
            dist.group.WORLD, _LENGTH, cpu_attention, query, key, value, True, scale=scale
        )
        ctx.save_for_backward(query, key, value, out, rows)
        ctx.scale = scale
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        _, attend_around_backward = ring_attention(balanced=True)
        query, key, value, out, rows = ctx.saved_tensors
        given = grad, "grad_out", query, key, value, out, rows, True
        of_query, of_key, of_value, *_ = attend_around_backward(
            dist.group.WORLD,
            _LENGTH,
            cpu_attention_backward,
            *given,
            dropout_p=0.0,
            scale=ctx.scale,
        )
        return of_query, of_key, of_value, None
