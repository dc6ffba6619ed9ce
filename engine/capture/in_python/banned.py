"""banned: what forward may not call while Python runs it (watched_calls.py), and why."""

from __future__ import annotations

import datetime
import time
import traceback
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# functions of modules in C, and owners of others, of which each call may return something else
READS = {"id", "input", "open", "urandom", "getpid", "listdir", "scandir", "_getframe", "fork_exec"}
READERS = {id(each) for each in (time, datetime.datetime, datetime.date)}
VALUE = "Python asks for the value of a tensor, and capture knows shapes and dtypes alone"
TENSOR: Any = Tensor
DATA_OF = "flowrun_data_of"  # attribute of what .data returns: its tensor
ASKS = [getattr(Tensor, f"__{name}__") for name in ("repr", "format", "array")]
ASKS += [Tensor.numpy, Tensor.tolist]
# functions of tensors that forward may not call -> why
OF_TENSORS: dict[Any, str] = {
    **dict.fromkeys(ASKS, VALUE),
    **{getattr(Tensor, name): VALUE for name in ("data_ptr", "storage", "untyped_storage")},
    TENSOR.data.__set__: "forward replaces the .data of a tensor",
    TENSOR.grad.__get__: "forward reads gradients",
}
# reads of what all calls see alike, of which the first may have more: it makes a cache
FACTS = {getattr(TENSOR, name).__get__ for name in ("dtype", "shape", "device", "ndim", "layout")}
_HELD = ((name, getattr(each, "__self__", None)) for name, each in vars(np.random).items())
_DRAWS = [name for name, owner in _HELD if isinstance(owner, np.random.RandomState)]
# other functions that forward may not call: owner, names, why
LAYER = "forward makes a layer or a parameter"
BANNED: tuple[tuple[Any, str, str], ...] = (
    (torch, "manual_seed seed get_rng_state set_rng_state save load", ""),
    (torch.random, "fork_rng", ""),
    (np.random, " ".join(_DRAWS), "it calls numpy.random, which does not compute with tensors"),
    (torch.jit, "script trace", ""),
    (torch.jit.ScriptFunction, "__call__", "it calls a ScriptFunction"),
    (torch.autograd, "backward", "forward takes the gradient of what it returns"),
    (nn.Parameter, "__new__", LAYER),
    (nn.Module, "_apply", LAYER),
    (nn.Module, "requires_grad_", "forward sets requires_grad of a layer"),
)


class FrozenError(Exception):
    """Forward does what no graph can hold.  real_stack: the frames that do it, innermost last."""

    def __init__(self, reason: str, real_stack: list[traceback.FrameSummary]) -> None:
        super().__init__(reason)
        self.real_stack = real_stack


def stop_gradients(mode: torch.inference_mode) -> None:
    """Enter torch.inference_mode as torch.no_grad, of whose tensors torch knows the versions."""
    (torch.no_grad if mode.mode else torch.enable_grad).__enter__(mode)  # type: ignore[arg-type]
