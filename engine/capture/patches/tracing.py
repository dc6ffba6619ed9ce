"""tracing: the state of torch in which a module is captured, restored afterwards.

Relied upon of torch (tests/engine/capture/test_capture.py): the keys of `torch._dynamo.config` and
the method of Dynamo's OutputGraph that are named below; keys that a release lacks are left out.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils._triton
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowrun.engine.capture.patches.recurrent import decompose_as_in_training
from flowrun.engine.capture.patches.substitutes import replace_attribute, replace_functions


@contextlib.contextmanager
def prepare_tracing(
    roots: Iterable[nn.Module], *, decomposed_attention: bool, low_precision_attention: bool
) -> Iterator[None]:
    """Within the block, torch captures the modules below `roots` as flowrun needs them.

    decomposed_attention, low_precision_attention: as in capture.Task.
    """
    modules = [module for root in roots for module in root.modules()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_hide_gpus())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if decomposed_attention:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if low_precision_attention:
            stack.enter_context(_multiply_attention_in_low_precision())
        stack.enter_context(torch._dynamo.config.patch(_dynamo_settings()))
        stack.enter_context(silence_logs())
        stack.enter_context(_restore_tensors(modules))
        stack.enter_context(_unmark_buffers(modules))
        stack.enter_context(_allow_leaves_within_forward())
        stack.enter_context(decompose_as_in_training())
        stack.enter_context(replace_functions())
        yield


@contextlib.contextmanager
def silence_logs() -> Iterator[None]:
    """Within the block, disable logging: torch's logs are for its developers; failures raise."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _restore_tensors(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give modules, after the block, the tensors that they held before it.

    While torch captures it puts its own in their place, and leaves those where a module has two
    names.
    """
    held: list[dict[str, Any]] = [
        each for module in modules for each in (module._parameters, module._buffers)
    ]
    before = [dict(each) for each in held]
    try:
        yield
    finally:
        for each, tensors in zip(held, before, strict=True):
            each.update(tensors)


@contextlib.contextmanager
def _unmark_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within the block, an `nn.Buffer` is a buffer only because a module holds it as one.

    Dynamo's export cannot read the mark that nn.Buffer sets if forward assigns the buffer anew
    (`self.steps += 1`).
    """
    held = (tensor for module in modules for tensor in module._buffers.values())
    marked = [tensor for tensor in held if hasattr(tensor, "_is_buffer")]
    buffers: list[Any] = list({id(tensor): tensor for tensor in marked}.values())
    for buffer in buffers:
        del buffer._is_buffer
    try:
        yield
    finally:
        for buffer in buffers:
            buffer._is_buffer = True


@contextlib.contextmanager
def _hide_gpus() -> Iterator[None]:
    """Within the block, torch sees no GPU: capture runs on the CPU.

    Dynamo would open CUDA to save the state of its random numbers.  It also asks whether Triton is
    there and caches the answer, which is cleared.
    """
    try:
        with replace_attribute(torch.cuda, "is_available", lambda: False):
            yield
    finally:
        for cached in vars(torch.utils._triton).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()


@contextlib.contextmanager
def _multiply_attention_in_low_precision() -> Iterator[None]:
    """Within the block, decomposed attention multiplies in the dtype of its inputs."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


@contextlib.contextmanager
def _allow_leaves_within_forward() -> Iterator[None]:
    """Within the block, forward may call requires_grad_() on a tensor that the loss depends on.

    Dynamo refuses this because compiled code would return a tensor without that mark; here no
    tensor is returned to Python.
    """
    owner, name = (
        torch._dynamo.output_graph.OutputGraph,
        "_check_requires_grad_intermediate_outputs",
    )
    if not hasattr(owner, name):
        yield
        return
    with replace_attribute(owner, name, lambda *_: None):
        yield


def _dynamo_settings() -> dict[str, Any]:
    """Return settings that let Dynamo trace recurrent layers and torch.autograd.grad in forward.

    Keys that this release does not know are left out (2.11 lacks `trace_autograd_ops`).
    """
    wanted = {
        "ignore_logger_methods": _logging_functions(),
        "allow_rnn": True,
        "trace_autograd_ops": True,
    }
    return {key: value for key, value in wanted.items() if hasattr(torch._dynamo.config, key)}


def _logging_functions() -> set[Callable[..., Any]]:
    """Return the calls that capture leaves out: print, warn, and a logger's methods.

    Libraries add methods of their own to logging.Logger, such as warning_once.
    """
    words = ("debug", "info", "warn", "error", "exception", "critical", "fatal", "log")
    methods = vars(logging.Logger).items()
    found = {method for name, method in methods if name.startswith(words) and callable(method)}
    return found | {print, warnings.warn}
