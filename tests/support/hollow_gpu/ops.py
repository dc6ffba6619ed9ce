"""What an op computes on a hollow GPU: torch's own code for CUDA runs, with kernels that do
nothing; behind it the stream's thread runs the op of the CPU on the same memory.
"""

import ctypes
import itertools
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten

# They compute nothing, or torch's own code does it by a copy.
IDLE = frozenset(
    {
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "detach",
        "alias",
        "lift_fresh",
        "view",
        "_unsafe_view",
        "_reshape_alias",
        "set_",
        "resize_",
        "record_stream",
        "_local_scalar_dense",
    }
)
# How large their results are follows from values: the host waits, as it would on a device.
DYNAMIC = frozenset({"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"})


# ---- tensors by address --------------------------------------------------------------------------


class There:
    """A tensor of the device: where it lies, without keeping it."""

    def __init__(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        self.begin, self.size = storage.data_ptr(), storage.nbytes()
        self.dtype = x.dtype
        self.how = (x.storage_offset(), tuple(x.shape), x.stride())

    def tensor(self) -> Tensor:
        if not self.size:
            return torch.empty(self.how[1], dtype=self.dtype)
        memory = (ctypes.c_char * self.size).from_address(self.begin)
        raw = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=self.dtype).set_(raw, *self.how)


def is_there(x: object) -> bool:
    """True for a real tensor of the device."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.is_cuda  # type: ignore[attr-defined]


# ---- streams -------------------------------------------------------------------------------------


class Streams:
    """Puts functions into streams (cuda.cpp)."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(None)
        self.put_call = self.library.hollow_put_call
        self.tasks: dict[int, Callable[[], object]] = {}
        self.numbers = itertools.count(1)
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_long)(self._call)

    def put(self, device: torch.device, task: Callable[[], object]) -> None:
        number = next(self.numbers)
        self.tasks[number] = task
        self.put_call(self._current(device), self.call, ctypes.c_long(number))

    def wait(self, device: torch.device) -> None:
        """Until all is done that was put into the current stream."""
        self.library.hollow_wait(self._current(device))

    def _current(self, device: torch.device) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)

    def _call(self, number: int) -> None:
        try:
            with torch.no_grad():
                self.tasks.pop(number)()
        except BaseException:
            traceback.print_exc()
            os._exit(99)  # nobody waits for an error


# ---- kernels that the CPU has otherwise ----------------------------------------------------------

_forward = aten._scaled_dot_product_flash_attention_for_cpu
_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward


def _flash(
    q: Any, k: Any, v: Any, p: float = 0.0, causal: bool = False, *_: Any, scale: Any = None
) -> Any:
    return _forward(q, k, v, 0.0, causal, scale=scale)


def _flash_backward(*given: Any, scale: Any = None) -> Any:
    *tensors, _, _, _, _, _, causal, _, _ = given
    return _backward(*tensors, 0.0, causal, scale=scale)


def _cudnn(
    q: Any,
    k: Any,
    v: Any,
    _: Any,
    __: Any,
    p: float = 0.0,
    causal: bool = False,
    *___: Any,
    scale: Any = None,
) -> Any:
    out, logsumexp = _forward(q, k, v, 0.0, causal, scale=scale)
    return out, logsumexp.unsqueeze(-1)


def _cudnn_backward(*given: Any, scale: Any = None) -> Any:
    *tensors, logsumexp = given[:6]
    return _backward(*tensors, logsumexp.squeeze(-1), 0.0, given[-1], scale=scale)


def _efficient(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    _: Any,
    p: float = 0.0,
    causal: bool = False,
    *,
    scale: Any = None,
) -> Any:
    out, logsumexp = _forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out, pad(logsumexp, (0, -logsumexp.shape[-1] % 32), value=float("inf"))


def _efficient_backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    out: Any,
    logsumexp: Any,
    *rest: Any,
    scale: Any = None,
) -> Any:
    rows = logsumexp[..., : q.shape[2]].contiguous()
    causal = len(rest) > 4 and rest[4]  # behind seed, offset, dropout_p and grad_input_mask
    return _backward(grad, q, k, v, out, rows, 0.0, causal, attn_mask=bias, scale=scale)


def _documents(starts: Tensor, *tensors: Tensor) -> Any:
    """Yield where each document is, and its part of lists of tokens, as one sample."""
    places = starts.tolist()
    for start, end in itertools.pairwise(places):
        if end > start:
            yield (slice(start, end), [x[start:end].transpose(0, 1).unsqueeze(0) for x in tensors])


def _flash_list(q: Any, k: Any, v: Any, starts: Any, *_: Any, scale: Any = None) -> Any:
    out, rows = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for inside, part in _documents(starts, q, k, v):
        made, lse = _forward(*part, 0.0, True, scale=scale)
        out[inside], rows[:, inside] = made[0].transpose(0, 1), lse[0]
    return out, rows


def _flash_list_backward(*given: Any, scale: Any = None) -> Any:
    *tensors, rows, starts = given[:7]
    grads = [torch.empty_like(x) for x in tensors[1:4]]
    for inside, part in _documents(starts, *tensors):
        made = _backward(*part, rows[None, :, inside].contiguous(), 0.0, True, scale=scale)
        for grad, new in zip(grads, made, strict=True):
            grad[inside] = new[0].transpose(0, 1)
    return grads


def _efficient_list(
    q: Any, k: Any, v: Any, _: Any, starts: Any, __: Any, longest: int, *___: Any, scale: Any = None
) -> Any:
    out, rows = _flash_list(q[0], k[0], v[0], starts, scale=scale)
    padded = torch.full((len(starts) - 1, len(rows), longest + -longest % 32), float("inf"))
    for number, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        padded[number, :, : end - start] = rows[:, start:end]
    return out.unsqueeze(0), padded


def _efficient_list_backward(*given: Any, scale: Any = None) -> Any:
    grad, q, k, v, _, out, starts, _, _, _, padded = given[:11]
    spans = enumerate(itertools.pairwise(starts.tolist()))
    rows = torch.cat([padded[n, :, : end - start] for n, (start, end) in spans], 1)
    tensors = [x[0] for x in (grad, q, k, v, out)]
    return [x.unsqueeze(0) for x in _flash_list_backward(*tensors, rows, starts, scale=scale)]


_ATTENTION = "_scaled_dot_product_"
INSTEAD: dict[str, Callable[..., Any]] = {
    f"{_ATTENTION}flash_attention": _flash,
    f"{_ATTENTION}flash_attention_backward": _flash_backward,
    f"{_ATTENTION}cudnn_attention": _cudnn,
    f"{_ATTENTION}cudnn_attention_backward": _cudnn_backward,
    f"{_ATTENTION}efficient_attention": _efficient,
    f"{_ATTENTION}efficient_attention_backward": _efficient_backward,
    "_flash_attention_forward": _flash_list,
    "_flash_attention_backward": _flash_list_backward,
    "_efficient_attention_forward": _efficient_list,
    "_efficient_attention_backward": _efficient_list_backward,
}
NO_LIBRARY = frozenset(name for name in INSTEAD if "cudnn" in name)  # shapes alone


# ---- the mode ------------------------------------------------------------------------------------


class Computed(TorchDispatchMode):
    """Ops on a hollow GPU in this thread are computed."""

    streams: Streams | None = None

    def __init__(self) -> None:
        super().__init__()
        Computed.streams = Computed.streams or Streams()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = {id(x): There(x) for x in given if is_there(x)}
        if any(type(x) not in (Tensor, torch.nn.Parameter) for x in given):
            return func(*args, **kwargs)  # shapes alone, or functions that are traced
        name = func._schema.name.split("::")[1]
        if func.namespace == "flowrun":
            return self._own(name, there, func, args, kwargs)
        if func.namespace not in ("aten", "prims"):
            return func(*args, **kwargs)
        if there and func._can_decompose():  # below autograd, such as a copy that may be a view
            with self:
                return func.decompose(*args, **kwargs)
        if name in DYNAMIC and there:
            return self._at_once(func, args, kwargs, there)
        made = self._hollow(name, func, args, kwargs, given)
        results = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        if name in IDLE or func.is_view or not any(map(is_there, (*given, *results))):
            return made
        if name in ("copy_", "_to_copy") and not all(map(is_there, (*given, *results))):
            self._moved(made, args[1 if name == "copy_" else 0], there)
        else:
            self._behind(name, INSTEAD.get(name, func), args, kwargs, there, results)
        return made

    def _own(self, name: str, there: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """The engine's own ops are functions of others."""
        from flowrun.engine.runtime.kernels import fused_attention as attention
        from flowrun.engine.runtime.kernels import packed_attention as packed

        functions = {
            "attention": attention._attention,
            "attention_backward": attention._attention_backward,
            "document_attention": packed._forward,
            "document_attention_backward": packed._backward,
        }
        if not there:
            return func(*args, **kwargs)
        with self:
            return functions[name](*args, **kwargs)

    def _at_once(self, func: Any, args: Any, kwargs: Any, there: Any) -> Any:
        assert self.streams is not None
        device = next(x for x in tree_leaves((args, kwargs)) if is_there(x)).device
        self.streams.wait(device)
        here = tree_map(lambda x: _here(x, there), (args, kwargs))
        made = func(*here[0], **here[1])
        return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, made)

    def _hollow(self, name: str, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        """Torch's own code for the device, which makes results and does not fill them."""
        assert self.streams is not None
        if name in NO_LIBRARY:
            shapes = tree_map(
                lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, kwargs)
            )
            made = func(*shapes[0], **shapes[1])
            like = lambda x: torch.empty_strided(  # noqa: E731
                x.shape, x.stride(), dtype=x.dtype, device=given[0].device
            )
            return tree_map(lambda x: like(x) if isinstance(x, Tensor) else x, made)
        # it may copy what a kernel should have made over what is read yet
        mutes = name not in IDLE and all(map(is_there, given))
        self.streams.library.hollow_mute(mutes)
        try:
            return func(*args, **kwargs)
        finally:
            self.streams.library.hollow_mute(False)

    def _moved(self, made: Tensor, source: Tensor, there: Any) -> None:
        """Between host and device torch copies bytes; all else would be a kernel."""
        assert self.streams is not None
        same = made.dtype == source.dtype
        if same and made.is_contiguous() and source.is_contiguous():
            return
        if is_there(made):
            value, target = source.detach().clone(), There(made)
            self.streams.put(made.device, lambda: target.tensor().copy_(value))
            return
        begin, target_here = there[id(source)], made.detach()
        self.streams.put(source.device, lambda: target_here.copy_(begin.tensor()))
        if not target_here.is_pinned():
            self.streams.wait(source.device)

    def _behind(
        self,
        name: str,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        there: dict[int, There],
        results: list[Tensor],
    ) -> None:
        """Put into the stream what computes it."""
        assert self.streams is not None
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        others = [x for x in given if not is_there(x)]
        assert not any(x.dim() for x in others), f"{run}: a tensor of the host among its arguments"
        read = {x.begin for x in there.values()}
        fresh = [
            (k, There(x))
            for k, x in enumerate(results)
            if is_there(x) and x.untyped_storage().data_ptr() not in read
        ]
        kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        places = tree_map(lambda x: there[id(x)] if is_there(x) else x, (args, kwargs))

        def compute() -> None:
            here = tree_map(lambda x: _here(x, {}), places)
            found = [x for x in tree_leaves(run(*here[0], **here[1])) if isinstance(x, Tensor)]
            for k, result in fresh:
                if k >= len(found) or found[k].numel() != result.tensor().numel():
                    continue  # what one of the two devices has no use for
                assert found[k].dtype == result.dtype, f"{run}: {found[k].dtype}, {result.dtype}"
                result.tensor().copy_(found[k])

        device = next(x.device for x in (*results, *given) if is_there(x))
        self.streams.put(device, compute)


def _here(x: Any, there: dict[int, There]) -> Any:
    """For an op of the CPU."""
    if isinstance(x, There):
        return x.tensor()
    if is_there(x):
        return there[id(x)].tensor()
    if isinstance(x, torch.device):
        return torch.device("cpu")
    if isinstance(x, torch.Generator):
        return torch.Generator().manual_seed(0)
    return x


def in_other_threads() -> None:
    """What readers put onto the device is computed, too."""
    from flowrun.engine.runtime.rank import readers

    def computed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*given: Any) -> Tensor:
            with Computed():
                return function(*given)

        return run

    readers.copy_to_device = computed(readers.copy_to_device)
    readers.make_scalar = computed(readers.make_scalar)
