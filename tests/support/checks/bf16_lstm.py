"""Processors with an LSTM in bf16: on others oneDNN makes none, and torch's own module fails."""

from functools import cache

import pytest
import torch
from torch import nn


@cache
def _runs() -> bool:
    with torch.autocast("cpu", torch.bfloat16):
        try:
            nn.LSTM(4, 4)(torch.randn(2, 2, 4).requires_grad_())
        except RuntimeError:
            return False
    return True


def need_lstm(kind: str, autocast: torch.dtype | None) -> None:
    """Skip a test of an LSTM in bf16 where plain torch has none."""
    if autocast and kind.lower() == "lstm" and not _runs():
        pytest.skip("this processor has no LSTM in bf16")
