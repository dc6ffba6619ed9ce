"""inductor: programs built by torch's Inductor.

make_fx traces a program, including local programs of flow.* ops, into functional ATen ops, and
Inductor builds these (torch_internals.py).  The new values of variables that change in place are
copied back at the end.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowrun.engine.errors import RecipeError
from flowrun.engine.runtime.kernels.kernels import emit
from flowrun.engine.runtime.kernels.program import Program
from flowrun.engine.torch_internals import (
    FakeTensorMode,
    OpOverload,
    build_graph,
    inductor_cache,
    inductor_config,
    inductor_decompositions,
    is_dispatched,
    missing_compiler,
    onednn_linear,
)

TEMPLATES = ("max_autotune", "max_autotune_gemm")  # settings that let Inductor build products
InductorKeys = Iterable[tuple[str, object]]  # names of torch._inductor.config, and values
Boxed = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Spec:
        return Spec(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @staticmethod
    def row_major(shape: tuple[int, ...], dtype: torch.dtype) -> Spec:
        return Spec.of(torch.empty(shape, dtype=dtype, device="meta"))


def infer_specs(program: Program, specs: Sequence[Spec], device: str) -> tuple[Spec, ...]:
    """Return the specs of a program's results, by running it on fake tensors.  specs: of its
    inputs.
    """
    with FakeTensorMode(), torch.no_grad(), torch.device(device):
        return tuple(map(Spec.of, emit(program)(_examples(specs, device))))


@dataclass(frozen=True, slots=True)
class Code:
    """A built program, which takes a list and empties it.

    strides: of the results; on CUDA Inductor pads rows that are not aligned.
    """

    run: Boxed
    strides: tuple[tuple[int, ...], ...]

    def __call__(self, values: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.run(values)


def settings_of(threads: int, options: InductorKeys = ()) -> Mapping[str, object]:
    """Return what Inductor is set to.  threads: compute threads of a rank.  options: a recipe's."""
    return {
        **dict(options),
        "compile_threads": 1,  # no pool of processes, which a fork would lose
        "size_asserts": False,  # Chain checks strides
        "cpp.vec_isa_ok": True,  # trying vector instructions with the compiler takes 10 s a process
        "fx_graph_cache": True,
        "triton.cudagraphs": False,  # a replay would write over results that registers hold
        "cpp.threads": threads,
    }


def build_program(
    program: Program, specs: Sequence[Spec], device: str, settings: Mapping[str, object]
) -> Code:
    """Build a program.  specs: of its inputs.  settings: Inductor's."""
    from torch.func import functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # A torch for GPUs on a host without one warns in each process that builds.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    run = emit(program)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        examples = _examples(specs, device)
    flat = functionalize(lambda *values: run(list(values)), remove="mutations")
    table = {**inductor_decompositions(), **_products()}
    trace = make_fx(flat, decomposition_table=table, tracing_mode="fake")
    with (
        torch.no_grad(),
        inductor_config().patch(dict(settings)),
        _no_monitor(),
        warnings.catch_warnings(),
    ):
        # Products of fp32 stay fp32 on purpose.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores for float32")
        with torch.device(device):  # not around the rest: Inductor makes tensors for itself
            module = trace(*examples)
        built, strides = build_graph(module, examples, mode)
    return Code(_report_allocations(built), strides)


# ---- oneDNN's product (products.py) --------------------------------------------------------------

# Inductor builds torch's own op for it with constant weights only; an op that it does not know is
# called unchanged.
_OPS = torch.library.Library("flowrun", "FRAGMENT")
_OPS.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return onednn_linear()(x, weight, bias, "none", [], None)  # type: ignore[no-any-return]


def _linear_shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_OPS.impl("linear", _linear, "CPU")
_OPS.impl("linear", _linear_shape, "Meta")


def _products() -> dict[OpOverload, Callable[..., torch.Tensor]]:
    if not torch.backends.mkldnn.is_available():
        return {}
    own = torch.ops.flowrun.linear.default
    return {onednn_linear(): lambda x, w, bias, *how: own(x, w, bias)}


# ---- around it -----------------------------------------------------------------------------------


@contextmanager
def _no_monitor() -> Iterator[None]:
    """Within the block, let tqdm start no monitor thread, which a fork would lose."""
    bars = vars(torch.hub)["tqdm"]
    before, bars.monitor_interval = getattr(bars, "monitor_interval", 0), 0
    try:
        yield
    finally:
        bars.monitor_interval = before


def require_compiler() -> None:
    """Raise RecipeError (engine.compiler) if Inductor finds no C++ compiler."""
    if error := missing_compiler():
        raise RecipeError(
            "engine.compiler",
            f"inductor needs a C++ compiler, and this host has none: {error}",
            "Install g++ (or name another: CXX=clang++), or set engine.compiler=eager.",
        ) from error


def cache_folder() -> Path:
    """Return the folder of Inductor's cache; TORCHINDUCTOR_CACHE_DIR moves it."""
    return Path(inductor_cache())


def _report_allocations(code: Any) -> Boxed:
    """Return the code, which allocates through torch while a dispatch mode is active.

    Otherwise it uses Inductor's faster allocator, which dispatch modes do not see.
    """
    names = getattr(code, "__func__", code).__globals__
    allocate = "empty_strided_cpu"

    def run(values: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not is_dispatched() or allocate not in names:
            return code(values)  # type: ignore[no-any-return]
        quick = names[allocate]
        names[allocate] = _allocate
        try:
            return code(values)  # type: ignore[no-any-return]
        finally:
            names[allocate] = quick

    return run


def _allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _examples(specs: Sequence[Spec], device: str) -> list[torch.Tensor]:
    return [torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=device) for s in specs]
