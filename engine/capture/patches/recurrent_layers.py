"""recurrent_layers: LSTM, GRU and RNN over sequences, one op a layer while a model is captured.

torch decomposes them into ops of every step, 1,700 for an LSTM over 64 steps.  The op and its
kernels: ops/flow/recurrent.py.  Cells (nn.LSTMCell …) are ordinary ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrun.engine.ops.flow.recurrent import KINDS

OVER_SEQUENCES = {getattr(torch, kind): kind for kind in KINDS}  # torch's function -> its name


def run_layers(
    kind: str,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Compute torch.lstm, gru, rnn_tanh or rnn_relu (`kind`), whose arguments these are.

    Raise TypeError for a PackedSequence, whose data and lengths these functions take, too.
    """
    if not isinstance(has_biases, bool):
        raise TypeError("the samples of a PackedSequence have different lengths")
    x = input.transpose(0, 1) if batch_first else input
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    ways, each = 1 + bidirectional, len(params) // num_layers
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    how = kind, bidirectional, torch.is_grad_enabled(), autocast
    last = []
    for k in range(num_layers):
        before = [h[k * ways : (k + 1) * ways] for h in states] if num_layers > 1 else states
        weights = params[k * each : (k + 1) * each]
        x, *after, _ = torch.ops.flowrun.recurrent_layer([x, *before, *weights], *how)
        last.append(after)
        if k < num_layers - 1:
            x = F.dropout(x, dropout, train)
    ends = [torch.cat(h) if num_layers > 1 else h[0] for h in zip(*last, strict=True)]
    return x.transpose(0, 1) if batch_first else x, *ends
