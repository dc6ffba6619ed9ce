"""probes: single ops as in a training step, to be timed for a hardware profile.

The tensors are as large as those of a rank of a small model, about a megabyte; whether a cache
holds them depends on the loop that calls the op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from flowrun.engine.ir.signature import torch_callable
from flowrun.engine.ops.flow import sparse
from flowrun.engine.ops.math.reduce import log_sum_exp
from flowrun.engine.ops.nn.cross_entropy import gradient_of_logits
from flowrun.engine.ops.nn.loss import SUM
from flowrun.engine.runtime.kernels.overrides import kernel_of

Tensor = torch.Tensor
aten = torch.ops.aten
BATCH_NORM = "aten._native_batch_norm_legit_functional.default"

ROWS, COLUMNS = 1024, 256
SAMPLES, CHANNELS, SIDE = 16, 64, 16


@dataclass(frozen=True, slots=True)
class Probe:
    """An op to time, and a function that makes a set of its arguments.

    work: elements of the first output, or operations.  tensors: makes the arguments of `run`.
    """

    work: float
    tensors: Callable[[], tuple[Tensor, ...]]
    run: Callable[..., object]


def element_probes() -> Mapping[str, Probe]:
    """Return op target -> probe, for ops slower than their bytes (Hardware.elements_per_s)."""
    probes = {**_row_probes(), **_norm_probes(), **_image_probes(), **_table_probes()}
    return {target: probes[target] for target in sorted(probes)}


# op -> its arguments after a tensor, or after a gradient and a tensor
_OF_ROWS: Mapping[str, tuple[object, ...]] = {
    "aten._softmax.default": (-1, False),
    "aten._safe_softmax.default": (-1,),
    "aten._log_softmax.default": (-1, False),
    "aten.gelu.default": (),
    "aten.silu.default": (),
    "aten.tanh.default": (),
}
_OF_ROWS_BACKWARD: Mapping[str, tuple[object, ...]] = {
    "aten._softmax_backward_data.default": (-1, torch.float32),
    "aten._log_softmax_backward_data.default": (-1, torch.float32),
    "aten.gelu_backward.default": (),
    "aten.silu_backward.default": (),
}


def _row_probes() -> Mapping[str, Probe]:
    shape, count = (ROWS, COLUMNS), float(ROWS * COLUMNS)
    heads = (8, ROWS // 32, 32, COLUMNS // 8)  # samples, tokens, heads, width

    def two() -> tuple[Tensor, ...]:
        return torch.randn(shape), torch.randn(shape).softmax(-1)

    def targets() -> tuple[Tensor, ...]:
        return torch.randn(shape), torch.full((ROWS, 1), 6.0), torch.arange(ROWS) % COLUMNS

    def probe(target: str, inputs: int, given: tuple[object, ...]) -> Probe:
        run = torch_callable(target)
        return Probe(count, two, lambda *tensors: run(*tensors[:inputs], *given))

    return {
        **{target: probe(target, 1, given) for target, given in _OF_ROWS.items()},
        **{target: probe(target, 2, given) for target, given in _OF_ROWS_BACKWARD.items()},
        "aten.logsumexp.default": Probe(count, two, lambda x, y: log_sum_exp(x, (-1,), True)),
        "flow.cross_entropy_backward": Probe(
            count,
            targets,
            lambda x, lse, target: gradient_of_logits(
                torch.ones(()), x, lse, target, None, SUM, -100, None, None, out=x
            ),
        ),
        "aten.clone.default": Probe(  # of heads, side by side
            count,
            lambda: (torch.randn(heads).transpose(1, 2),),
            lambda x: aten.clone.default(x, memory_format=torch.contiguous_format),
        ),
    }


def _norm_probes() -> Mapping[str, Probe]:
    count, wanted = float(ROWS * COLUMNS), [True, True, True]

    def normed() -> tuple[Tensor, ...]:
        x, y = torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS)
        weight, bias = torch.randn(COLUMNS), torch.randn(COLUMNS)
        return x, y, torch.zeros(ROWS, 1), torch.ones(ROWS, 1), weight, bias

    return {
        "aten.native_layer_norm.default": Probe(
            count,
            normed,
            lambda x, y, mean, rstd, weight, bias: aten.native_layer_norm.default(
                x, [COLUMNS], weight, bias, 1e-5
            ),
        ),
        "aten.native_layer_norm_backward.default": Probe(
            count,
            normed,
            lambda x, y, mean, rstd, weight, bias: aten.native_layer_norm_backward.default(
                y, x, [COLUMNS], mean, rstd, weight, bias, wanted
            ),
        ),
    }


def _image_probes() -> Mapping[str, Probe]:
    shape = (SAMPLES, CHANNELS, SIDE, SIDE)
    count = float(SAMPLES * CHANNELS * SIDE * SIDE)

    def normed() -> tuple[Tensor, ...]:
        zeros, ones = torch.zeros(CHANNELS), torch.ones(CHANNELS)
        return torch.randn(shape), torch.randn(shape), zeros, ones

    def pooled() -> tuple[Tensor, ...]:
        x = torch.randn(shape)
        maxima, places = aten.max_pool2d_with_indices.default(x, [3, 3], [2, 2], [1, 1])
        return x, torch.randn_like(maxima), places

    return {
        BATCH_NORM: Probe(
            count,
            normed,
            lambda x, y, zeros, ones: torch_callable(BATCH_NORM)(
                x, ones, zeros, zeros, ones, True, 0.1, 1e-5
            ),
        ),
        "aten.native_batch_norm_backward.default": Probe(
            count,
            normed,
            lambda x, y, zeros, ones: aten.native_batch_norm_backward.default(
                y, x, ones, zeros, ones, zeros, ones, True, 1e-5, [True, True, True]
            ),
        ),
        "aten.max_pool2d_with_indices.default": Probe(
            count / 4,
            pooled,
            lambda x, y, places: aten.max_pool2d_with_indices.default(x, [3, 3], [2, 2], [1, 1]),
        ),
        "aten.max_pool2d_with_indices_backward.default": Probe(
            count,
            pooled,
            lambda x, y, places: aten.max_pool2d_with_indices_backward.default(
                y, x, [3, 3], [2, 2], [1, 1], [1, 1], False, places
            ),
        ),
    }


def _table_probes() -> Mapping[str, Probe]:
    looked_up, rows, width = 8192, 50_000, 16
    values = (looked_up, width)

    def ids() -> tuple[Tensor, ...]:
        """Draw ids by Zipf's law, so that few ids are frequent, and their gradients."""
        return (rows ** torch.rand(looked_up)).long(), torch.randn(*values)

    def table() -> tuple[Tensor, ...]:
        seen, grads = ids()
        return torch.randn(rows, width), torch.ones(rows, width), *_coalesce(seen, grads)

    adagrad = sparse.RowUpdate("adagrad", _adagrad)
    return {
        "flow.coalesce": Probe(float(looked_up), ids, _coalesce),
        "flow.update_rows": Probe(
            float(looked_up * width),
            table,
            lambda param, state, ids, sums: sparse.update_rows(param, ids, sums, state, by=adagrad),
        ),
    }


def _coalesce(ids: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    return sparse.coalesce([ids], [grads], [-1])


def _adagrad(param: Tensor, grad: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    total = total + grad * grad
    return param - 0.01 * grad / total.sqrt(), total


def convolution_probes() -> Iterator[tuple[Probe, Probe]]:
    """Yield (forward, both gradients) of layers of a small residual net; work is in operations.

    The layers are the first one and those of two bottlenecks.
    """
    run = kernel_of(aten.convolution.default)
    run_back = kernel_of(aten.convolution_backward.default)
    for channels, out, side, kernel, stride in (
        (3, 64, 32, 3, 1),
        (64, 64, 32, 1, 1),
        (64, 64, 32, 3, 1),
        (64, 256, 32, 1, 1),
        (256, 128, 32, 1, 1),
        (128, 128, 32, 3, 2),
        (128, 512, 16, 1, 1),
        (256, 512, 32, 1, 2),
    ):
        work = 2.0 * SAMPLES * (side // stride) ** 2 * channels * out * kernel * kernel
        given = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1)

        def tensors(
            taken: tuple[int, ...] = (SAMPLES, channels, side, side),
            weight: tuple[int, ...] = (out, channels, kernel, kernel),
            result: tuple[int, ...] = (SAMPLES, out, side // stride, side // stride),
        ) -> tuple[Tensor, ...]:
            return torch.randn(taken), torch.randn(weight), torch.randn(result)

        yield (
            Probe(work, tensors, lambda x, w, y, g=given: run(x, w, None, *g)),
            Probe(
                2 * work,
                tensors,
                lambda x, w, y, g=given: run_back(y, x, w, None, *g, [True, True, False]),
            ),
        )


def batched_probes() -> Iterator[Probe]:
    """Yield products of attention's heads, with the strides of views of all heads."""
    for samples, tokens, heads, width in ((16, 64, 4, 32), (8, 128, 4, 64)):
        work = 2.0 * samples * heads * tokens * tokens * width

        def tensors(
            shape: tuple[int, ...] = (samples, tokens, heads, width),
            scores: tuple[int, ...] = (samples, heads, tokens, tokens),
        ) -> tuple[Tensor, ...]:
            q, k = (torch.randn(shape).transpose(1, 2) for _ in "qk")
            return q, k, torch.randn(scores)

        yield Probe(work, tensors, lambda q, k, s: aten.matmul.default(q, k.transpose(2, 3)))
        yield Probe(work, tensors, lambda q, k, s: aten.matmul.default(s, k))
