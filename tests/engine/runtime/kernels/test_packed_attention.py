"""Attention within documents: what is refused, and the kernel of each document on a CPU.

What CUDA's kernels compute, tests/engine/runtime/test_cuda.py compares with the CPU's.
FlashAttention 3 has a stand-in: ops of its names and schemas, which torch's own code calls.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrun.engine import torch_internals as internals
from flowrun.engine.ops.nn import document_op as op
from flowrun.engine.runtime.kernels import packed_attention as packed

aten = torch.ops.aten
LENGTH = 20


def given(dtype: torch.dtype, width: int = 12) -> tuple[Tensor, ...]:
    """Gradient, query, key and value as heads of one product lie, and documents."""
    draws = torch.Generator().manual_seed(1)
    shape = (3, LENGTH, 2, width)
    tensors = (torch.randn(shape, generator=draws).to(dtype).transpose(1, 2) for _ in range(4))
    documents = torch.tensor([[7, 4, 9, 0], [LENGTH, 0, 0, 0], [1, 1, 0, LENGTH - 2]])
    return *tensors, documents


def test_documents_that_do_not_fill_their_sample_stop_the_device() -> None:
    *_, documents = given(torch.float32)
    for wrong in (documents - torch.tensor([1, 0, 0, 0]), documents - torch.tensor([-8, 8, 0, 0])):
        with pytest.raises(RuntimeError, match="documents do not fill their sample"):
            packed._whole(wrong, LENGTH)


def test_on_the_cpu_each_document_has_the_gradient_that_suits_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grad, *rest, documents = given(torch.float32)
    made = op.document_attention(*rest, documents, None)
    run = torch.ops.flowrun.document_attention_backward.default
    sizes, plain = [], packed.products.attention_backward

    def counted(*given: Any, **more: Any) -> Any:
        sizes.append(given[0].shape[2])
        return plain(*given, **more)

    monkeypatch.setattr(packed.products, "attention_backward", counted)
    found = run(grad, *rest, *made, documents, None)
    assert sizes == [7, 4, 9, LENGTH, 1, 1, LENGTH - 2]
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    expected = op.run_backward(kernel, (grad, *rest, *made), documents, None)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


# ---- FlashAttention 3 (hopper/flash_api.cpp of Dao-AILab/flash-attention) ------------------------

_FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None,"
    " Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None,"
    " Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None,"
    " Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None,"
    " Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None,"
    " Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None,"
    " Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None,"
    " float? softmax_scale=None, bool is_causal=False, int window_size_left=-1,"
    " int window_size_right=-1, int attention_chunk=0, float softcap=0.0,"
    " bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0,"
    " bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
_BWD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,"
    " Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None,"
    " Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None,"
    " float? softmax_scale=None, bool is_causal=False, int window_size_left=-1,"
    " int window_size_right=-1, float softcap=0.0, bool deterministic=False, int sm_margin=0)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class FlashAttention:
    """Both kernels of lists, on the CPU: that of each document; `runs` counts theirs.

    slip: what FlashAttention 3's output is off by.
    """

    def __init__(self, stack: ExitStack, slip: float) -> None:
        self.runs: Counter[str] = Counter()
        self.slip = slip
        second = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        second.impl("_flash_attention_forward", self.second, "CPU")
        second.impl("_flash_attention_backward", self.second_backward, "CPU")
        third = stack.enter_context(torch.library._scoped_library("flash_attn_3", "FRAGMENT"))
        third.define(_FWD)
        third.define(_BWD)
        third.impl("fwd", self.third, "CPU")
        third.impl("bwd", self.third_backward, "CPU")

    def second(self, q: Tensor, k: Tensor, v: Tensor, *given: Any, scale: float) -> Any:
        *starts, longest, most, dropout, causal, _ = given
        assert not dropout and longest >= int(starts[0].diff().max())
        assert most >= int(starts[1].diff().max())
        self.runs["2"] += 1
        none = q.new_empty(0)
        return *self.forward(q, k, v, *starts, causal, scale), none, none, none

    def second_backward(self, *given: Any, scale: float) -> Any:
        return self.backward(*given[:8], given[11], scale)

    def third(self, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Any:
        starts, scale, causal, *window = given[4:6], *given[20:24]
        assert window == [-1, -1] and given[10] >= int(starts[0].diff().max())
        self.runs["3"] += 1
        out, logsumexp = self.forward(q, k, v, *starts, causal, scale)
        return out + self.slip, logsumexp, q.new_empty(0), q.new_empty(0)

    def third_backward(self, *given: Any) -> Any:
        grads = self.backward(*given[:6], *given[9:11], given[16], given[15])
        for into, grad in zip(given[6:9], grads, strict=True):
            into.copy_(grad)
        return (*(given[0].new_empty(0) for _ in range(5)),)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Any:
        *starts, causal, scale = given
        out, rows = torch.full_like(q, torch.nan), q.new_full(q.shape[1::-1], torch.nan)
        for at, of in spans(*starts):
            parts = heads(q[at], k[of], v[of])
            one, row = internals.cpu_attention(*parts, 0.0, causal, scale=scale)
            out[at], rows[:, at] = one[0].transpose(0, 1), row[0].to(rows.dtype)
        return out, rows.float()

    def backward(self, *given: Any) -> tuple[Tensor, ...]:
        grad, q, k, v, out, logsumexp, *starts, causal, scale = given
        grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        for at, of in spans(*starts):
            parts = heads(grad[at], q[at], k[of], v[of], out[at])
            made = internals.cpu_attention_backward(
                *parts, logsumexp[None, :, at], 0.0, causal, scale=scale
            )
            for whole, here, part in zip(grads, (at, of, of), made, strict=True):
                whole[here] = part[0].transpose(0, 1)
        return tuple(grads)


def heads(*lists: Tensor) -> list[Tensor]:
    return [x.transpose(0, 1).unsqueeze(0) for x in lists]


def spans(*starts: Tensor) -> list[tuple[slice, slice]]:
    """Where queries meet keys; of others the kernels promise nothing."""
    both = zip(*(pairwise(each.tolist()) for each in starts), strict=True)
    return [(slice(*at), slice(*of)) for at, of in both if at[1] > at[0] and of[1] > of[0]]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
    packed.flash_kernels.cache_clear()


def attend() -> tuple[list[Tensor], list[Tensor]]:
    """What the kernels for CUDA compute, and the CPU's."""
    grad, *rest, documents = given(torch.bfloat16)
    out, logsumexp = packed._forward(*rest, documents, None)
    found = [out, logsumexp, *packed._backward(grad, *rest, out, logsumexp, documents, None)]
    made = op.document_attention(*rest, documents, None)
    run = internals.cpu_attention_backward
    return found, [*made, *op.run_backward(run, (grad, *rest, *made), documents, None)]


@pytest.mark.skipif(
    not hasattr(getattr(torch.nn.attention, "_fa3", None), "_fa3_run_backward"),
    reason="torch before 2.13",
)
@pytest.mark.parametrize(
    ("installed", "capability", "slip", "runs"),
    [
        (False, 9, 0.0, {"2": 1}),
        (True, 8, 0.0, {"2": 1}),
        (True, 9, 0.0, {"2": 1, "3": 2}),  # both once on draws, then it
        (True, 9, 0.5, {"2": 2, "3": 1}),
    ],
    ids=["not installed", "no Hopper", "agrees", "does not agree"],
)
def test_flash_attention_3_runs_on_hopper_where_it_is_and_agrees(
    installed: bool,
    capability: int,
    slip: float,
    runs: dict[str, int],
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flash = FlashAttention(stack, slip)
    if installed:
        module = ModuleType(internals.FLASH_3)
        module.__spec__ = ModuleSpec(internals.FLASH_3, None)
        monkeypatch.setitem(sys.modules, internals.FLASH_3, module)
    capable = (capability, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capable)
    if slip:
        stack.enter_context(pytest.warns(UserWarning, match="2 runs instead of 3, on documents"))
    found, expected = attend()
    assert flash.runs == runs
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        assert one.stride() == other.stride()


@pytest.mark.parametrize(("start", "first"), [(8, 3), (15, 5), (10, 0), (4, 0)])
def test_earlier_keys_are_a_span_a_sample(
    start: int, first: int, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernels leave undefined of tokens without partners is 0, or -inf."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    flash = FlashAttention(stack, 0.0)
    grad, query, key, value, documents = given(torch.bfloat16)
    grad, query = (x[:, :, start : start + 5] for x in (grad, query))
    keys = [x[:, :, first : min(start, first + 5)] for x in (key, value)]
    rest = documents, start, first, None
    made = op.earlier_attention(query, *keys, *rest)
    found = packed._earlier(query, *keys, *rest)
    of_all = made[0], made[1].clamp(min=-9)  # as if they had seen their own
    found += packed._earlier_backward(grad, query, *keys, *of_all, *rest)
    assert flash.runs == {"2": 1}
    made += op.earlier_attention_backward(grad, query, *keys, *of_all, *rest)
    for one, other in zip(found, made, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        assert one.stride() == other.stride()
