"""recurrent: LSTM, GRU and RNN as torch decomposes them, but for two faults of its decompositions:
they leave out dropout between layers, and take oneDNN's LSTM, as for inference, where the input
needs no gradient.

Relied upon of torch (tests/engine/capture/rewrites/test_recurrent.py): `_rnn_helper` is what all of
them call; up to 2.13 it asks `num_layers < i - 1` before layer i, so that nothing is ever dropped;
`select_one_layer_lstm_function` takes oneDNN's or `one_layer_lstm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Layers(int):
    """A number of layers that is less than any number."""

    def __lt__(self, other: object) -> bool:
        return True


@contextmanager
def decomposed_for_training() -> Iterator[None]:
    """Within, what torch makes of a recurrent layer is what the layer does in training."""
    from torch._decomp import decompositions

    helper: Any = decompositions._rnn_helper
    select = decompositions.select_one_layer_lstm_function

    def drops(
        given: Any, hidden: Any, params: Any, has_biases: Any, num_layers: int, *rest: Any
    ) -> Any:
        return helper(given, hidden, params, has_biases, _Layers(num_layers), *rest)

    decompositions._rnn_helper = drops
    decompositions.select_one_layer_lstm_function = lambda *given: decompositions.one_layer_lstm
    try:
        yield
    finally:
        decompositions._rnn_helper = helper
        decompositions.select_one_layer_lstm_function = select
