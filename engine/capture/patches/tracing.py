"""tracing: the state of torch in which a module is captured, restored afterwards."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowrun.engine.capture.patches.routed_experts import replace_experts
from flowrun.engine.capture.patches.substitutes import (
    narrow_residual,
    replace_attribute,
    replace_functions,
)
from flowrun.engine.torch_internals import (
    BUFFER_MARK,
    buffers_of,
    dynamo_settings,
    forget_triton,
    leaf_check,
    parameters_of,
    random_generators,
    random_support,
)


@contextlib.contextmanager
def prepare_tracing(
    roots: Iterable[nn.Module],
    *,
    narrow: bool,
    decomposed_attention: bool,
    low_precision_attention: bool,
) -> Iterator[None]:
    """Within the block, torch captures the modules below `roots` as flowrun needs them.

    narrow, decomposed_attention, low_precision_attention: as in capture.Task.
    """
    modules = [module for root in roots for module in root.modules()]
    settings = {  # for print, recurrent layers, and autograd.grad in forward (not of torch 2.11)
        "ignore_logger_methods": _logging_functions(),
        "allow_rnn": True,
        "trace_autograd_ops": True,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(_hide_gpus())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if decomposed_attention:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if low_precision_attention:
            stack.enter_context(_multiply_attention_in_low_precision())
        stack.enter_context(dynamo_settings(settings))
        stack.enter_context(silence_logs())
        stack.enter_context(_restore_tensors(modules))
        stack.enter_context(_unmark_buffers(modules))
        stack.enter_context(_allow_leaves_within_forward())
        stack.enter_context(replace_attribute(*random_support(), staticmethod(set)))  # constants
        stack.enter_context(replace_attribute(*random_generators(), staticmethod(_refuse)))
        stack.enter_context(replace_functions())
        stack.enter_context(narrow_residual(narrow))
        stack.enter_context(replace_experts(modules))
        yield


def _refuse(_generator: object) -> bool:
    """Numbers of a generator would be constants, as those of `random` itself."""
    return False


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
        each for module in modules for each in (parameters_of(module), buffers_of(module))
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

    Dynamo's export cannot read the mark that nn.Buffer sets if forward assigns the buffer
    (`self.steps += 1`).
    """
    held = (tensor for module in modules for tensor in buffers_of(module).values())
    marked = [tensor for tensor in held if hasattr(tensor, BUFFER_MARK)]
    buffers: list[object] = list({id(tensor): tensor for tensor in marked}.values())
    for buffer in buffers:
        delattr(buffer, BUFFER_MARK)
    try:
        yield
    finally:
        for buffer in buffers:
            setattr(buffer, BUFFER_MARK, True)


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
        forget_triton()


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
    check = leaf_check()
    with replace_attribute(*check, lambda *_: None) if check else contextlib.nullcontext():
        yield


def _logging_functions() -> set[Callable[..., object]]:
    """Return the calls that capture leaves out: print, warn, and a logger's methods.

    Libraries add methods of their own to logging.Logger, such as warning_once.
    """
    words = ("debug", "info", "warn", "error", "exception", "critical", "fatal", "log")
    methods = vars(logging.Logger).items()
    functions = {method for name, method in methods if name.startswith(words) and callable(method)}
    return functions | {print, warnings.warn}
