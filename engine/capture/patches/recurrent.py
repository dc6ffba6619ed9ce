"""recurrent: LSTM, GRU and RNN in torch's own decompositions, without two of their faults.

The decompositions leave out dropout between layers, and they take oneDNN's LSTM, as for inference,
if the input needs no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flowrun.engine.capture.patches.substitutes import replace_attribute
from flowrun.engine.torch_internals import RNN_HELPER, recurrent_decompositions


class _LayerCount(int):
    """A number of layers that compares as less than any number."""

    def __lt__(self, other: object) -> bool:
        return True


@contextmanager
def decompose_as_in_training() -> Iterator[None]:
    """Within the block, decompose recurrent layers into what they compute in training."""
    decompositions = recurrent_decompositions()
    helper = vars(decompositions)[RNN_HELPER]

    def with_dropout(
        given: Any,
        hidden: object,
        params: object,
        has_biases: object,
        num_layers: int,
        *rest: object,
    ) -> object:
        return helper(given, hidden, params, has_biases, _LayerCount(num_layers), *rest)

    select = "select_one_layer_lstm_function"
    with (
        replace_attribute(decompositions, RNN_HELPER, with_dropout),
        replace_attribute(decompositions, select, lambda *_: decompositions.one_layer_lstm),
    ):
        yield
