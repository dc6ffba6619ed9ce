"""probes: single ops as in a training step, to be timed for a hardware profile.

The tensors are as large as those of a rank of a small model, about a megabyte; whether a cache
holds them depends on the loop that calls the op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, randn

from flowrun.engine.ir.signature import torch_callable
from flowrun.engine.ops.flow import sparse
from flowrun.engine.ops.math.reduce import log_sum_exp
from flowrun.engine.ops.nn.cross_entropy import gradient_of_logits
from flowrun.engine.ops.nn.loss import SUM
from flowrun.engine.runtime.kernels.overrides import kernel_of

aten = torch.ops.aten

Making = Callable[[], tuple[object, ...]]

ROWS, COLUMNS = 1024, 256
SAMPLES, CHANNELS, SIDE = 16, 64, 16
LOOKED_UP, TABLE_ROWS, WIDTH = 8192, 50_000, 16


class Probe(NamedTuple):
    """An op to time.  work: elements of the first output, or operations.  arguments: makes a set of
    those of `run`.
    """

    work: float
    arguments: Making
    run: Callable[..., object]


def element_probes() -> Mapping[str, Probe]:
    """Return op target -> probe, for ops slower than their bytes (Hardware.elements_per_s)."""
    count, image = float(ROWS * COLUMNS), float(SAMPLES * CHANNELS * SIDE * SIDE)
    plain = {target: Probe(count, make, torch_callable(target)) for target, make in _ROWS.items()}
    plain |= {
        target: Probe(image, make, torch_callable(target)) for target, make in _IMAGES.items()
    }
    pool = aten.max_pool2d_with_indices.default
    adagrad = sparse.RowUpdate("adagrad", _adagrad)
    others = {
        "aten.logsumexp.default": Probe(count, lambda: (_x(), (-1,), True), log_sum_exp),
        "flow.cross_entropy_backward": Probe(count, _logits, _gradient_of_logits),
        "aten.clone.default": Probe(
            count, _heads, partial(aten.clone.default, memory_format=torch.contiguous_format)
        ),
        "aten.max_pool2d_with_indices.default": Probe(image / 4, lambda: (_image(), *_POOL), pool),
        "flow.coalesce": Probe(float(LOOKED_UP), _ids, _coalesce),
        "flow.update_rows": Probe(
            float(LOOKED_UP * WIDTH), _table, partial(sparse.update_rows, by=adagrad)
        ),
    }
    probes = {**plain, **others}
    return {target: probes[target] for target in sorted(probes)}


_x, _row = partial(randn, ROWS, COLUMNS), partial(randn, COLUMNS)
_image = partial(randn, SAMPLES, CHANNELS, SIDE, SIDE)
_mean, _scale = partial(torch.zeros, CHANNELS), partial(torch.ones, CHANNELS)


def _softmax() -> Tensor:
    return _x().softmax(-1)


_POOL = [3, 3], [2, 2], [1, 1]  # kernel, stride, padding
_ROWS: Mapping[str, Making] = {
    "aten._softmax.default": lambda: (_x(), -1, False),
    "aten._safe_softmax.default": lambda: (_x(), -1),
    "aten._log_softmax.default": lambda: (_x(), -1, False),
    "aten.gelu.default": lambda: (_x(),),
    "aten.silu.default": lambda: (_x(),),
    "aten.tanh.default": lambda: (_x(),),
    "aten._softmax_backward_data.default": lambda: (_x(), _softmax(), -1, torch.float32),
    "aten._log_softmax_backward_data.default": lambda: (_x(), _softmax(), -1, torch.float32),
    "aten.gelu_backward.default": lambda: (_x(), _softmax()),
    "aten.silu_backward.default": lambda: (_x(), _softmax()),
    "aten.native_layer_norm.default": lambda: (_x(), [COLUMNS], _row(), _row(), 1e-5),
    "aten.native_layer_norm_backward.default": lambda: (
        *(_x(), _x(), [COLUMNS], torch.zeros(ROWS, 1), torch.ones(ROWS, 1)),
        *(_row(), _row(), [True] * 3),
    ),
}
_IMAGES: Mapping[str, Making] = {
    "aten._native_batch_norm_legit_functional.default": lambda: (
        *(_image(), _scale(), _mean(), _mean(), _scale(), True, 0.1, 1e-5),
    ),
    "aten.native_batch_norm_backward.default": lambda: (
        *(_image(), _image(), _scale(), _mean(), _scale(), _mean(), _scale()),
        *(True, 1e-5, [True] * 3),
    ),
    "aten.max_pool2d_with_indices_backward.default": lambda: _pool_pieces(),
}


def _pool_pieces() -> tuple[object, ...]:
    x = _image()
    maxima, places = aten.max_pool2d_with_indices.default(x, *_POOL)
    return torch.randn_like(maxima), x, *_POOL, [1, 1], False, places


def _heads() -> tuple[object, ...]:
    """(samples, heads, tokens, width), which are to lie side by side."""
    return (_head(8, ROWS // 32, 32, COLUMNS // 8),)


def _logits() -> tuple[object, ...]:
    return _x(), torch.full((ROWS, 1), 6.0), torch.arange(ROWS) % COLUMNS


def _gradient_of_logits(x: Tensor, lse: Tensor, target: Tensor) -> Tensor:
    return gradient_of_logits(torch.ones(()), x, lse, target, None, SUM, -100, None, None, out=x)


def _ids() -> tuple[Tensor, Tensor]:
    """Draw ids by Zipf's law, so that few ids are frequent, and their gradients."""
    return (TABLE_ROWS ** torch.rand(LOOKED_UP)).long(), randn(LOOKED_UP, WIDTH)


def _table() -> tuple[object, ...]:
    ids, sums = _coalesce(*_ids())
    return randn(TABLE_ROWS, WIDTH), ids, sums, torch.ones(TABLE_ROWS, WIDTH)


def _coalesce(ids: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    return sparse.coalesce([ids], [grads], [-1])


def _adagrad(param: Tensor, grad: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    total = total + grad * grad
    return param - 0.01 * grad / total.sqrt(), total


# channels in and out, side, kernel, stride: of the first layer of a small residual net, and of two
# bottlenecks
_LAYERS = (
    (3, 64, 32, 3, 1),
    (64, 64, 32, 1, 1),
    (64, 64, 32, 3, 1),
    (64, 256, 32, 1, 1),
    (256, 128, 32, 1, 1),
    (128, 128, 32, 3, 2),
    (128, 512, 16, 1, 1),
    (256, 512, 32, 1, 2),
)


def convolution_probes() -> Iterator[tuple[Probe, Probe]]:
    """Yield (forward, both gradients) of layers; work is in operations."""
    for layer in _LAYERS:
        yield _probe_layer(SAMPLES, *layer)


def few_convolution_probes() -> Iterator[tuple[Probe, Probe]]:
    """Yield those of one layer on few samples."""
    yield _probe_layer(SAMPLES // 8, *_LAYERS[2])


def _probe_layer(
    samples: int, channels: int, out: int, side: int, kernel: int, stride: int
) -> tuple[Probe, Probe]:
    run, back = map(kernel_of, (aten.convolution.default, aten.convolution_backward.default))
    work = 2.0 * samples * (side // stride) ** 2 * channels * out * kernel * kernel
    how = [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1

    def given() -> tuple[Tensor, Tensor]:
        return randn(samples, channels, side, side), randn(out, channels, kernel, kernel)

    def grad() -> Tensor:
        return randn(samples, out, side // stride, side // stride)

    return (
        Probe(work, lambda: (*given(), None, *how), run),
        Probe(2 * work, lambda: (grad(), *given(), None, *how, [True, True, False]), back),
    )


def batched_probes() -> Iterator[Probe]:
    """Yield products of attention's heads, with the strides of views of all heads."""
    for samples, tokens, heads, width in ((16, 64, 4, 32), (8, 128, 4, 64)):
        work = 2.0 * samples * heads * tokens * tokens * width
        head = partial(_head, samples, tokens, heads, width)
        scores = partial(randn, samples, heads, tokens, tokens)
        for make in (
            lambda head=head: (head(), head().transpose(2, 3)),
            lambda head=head, scores=scores: (scores(), head()),
        ):
            yield Probe(work, make, aten.matmul.default)


def _head(*shape: int) -> Tensor:
    return randn(shape).transpose(1, 2)
