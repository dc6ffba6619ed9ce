"""KeptKeys: a forward of flowrun's GPT or Llama over the newest tokens alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class KeptKeys(TorchFunctionMode):
    """While it is on, which is for one forward, each causal attention also sees the keys and values
    that it had in the forwards before.

    The module is not changed; its attentions run in one order, and take (B, H, T, C).
    """

    def __init__(self, before: object = None) -> None:
        """before: KeptKeys of the forward before; None: this is the first."""
        super().__init__()
        self.kept: list[list[Tensor]] = []  # of each attention
        self._before = before.kept if isinstance(before, KeptKeys) else []

    def __torch_function__(  # type: ignore[no-untyped-def]  # as torch has it
        self, func, types, args=(), kwargs=None
    ):
        given = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **given)
        query, *new = args
        if self._before:
            old = self._before[len(self.kept)]
            new = [torch.cat(pair, 2) for pair in zip(old, new, strict=True)]
            shape = query.shape[2], new[0].shape[2]
            mask = torch.ones(shape, dtype=torch.bool, device=query.device)
            given |= {"attn_mask": mask.tril(shape[1] - shape[0]), "is_causal": False}
        self.kept.append(new)
        return func(query, *new, **given)
