"""hollow: a module whose parameters have shapes and dtypes, and no memory.

What a plan is made from: 175 billion weights are planned on a laptop.  Parameters lose their memory
as they are registered (PyTorch's `empty` has not touched it by then), so that a constructor may
compute with anything but a parameter's values; buffers are made as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def on_meta() -> Iterator[None]:
    """Within, parameters that are registered go to the meta device, where to initialise does
    nothing.
    """
    register: Callable[..., None] = nn.Module.register_parameter
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # id -> (as given, without memory)

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            if id(param) not in made:
                bare = type(param)(param.detach().to("meta"), requires_grad=param.requires_grad)
                made[id(param)] = (param, bare)
            param = made[id(param)][1]
        register(self, name, param)

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def hollow(module: nn.Module) -> None:
    """Parameters on the meta device become tensors of the CPU without memory: what capture reads is
    as for ones that have it.  A tied one stays one.
    """
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None and param.is_meta:
                if id(param) not in made:
                    made[id(param)] = _bare(param)
                part._parameters[name] = made[id(param)]


def _bare(param: nn.Parameter) -> nn.Parameter:
    """Of the same kind, shape and dtype; reading its values fails."""
    value: Any = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype)
    value.untyped_storage().resize_(0)
    return type(param)(value, requires_grad=param.requires_grad)
