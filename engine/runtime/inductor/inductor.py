"""Programs compiled by torch's Inductor.  The only file that knows its internals
(tests/engine/runtime/inductor/test_inductor.py names what is relied on).

A program is traced into ATen ops by make_fx, local programs of flow.* ops too, made functional, and
handed to compile_fx_inner.  What changes variables in place is written back at the end of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flowrun.engine.errors import RecipeError
from flowrun.engine.runtime.kernels.kernels import emit
from flowrun.engine.runtime.kernels.program import Program

Boxed = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Spec:
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Spec:
        """That of a tensor, fake ones too."""
        return Spec(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @staticmethod
    def row_major(shape: tuple[int, ...], dtype: torch.dtype) -> Spec:
        """Dense, the last dim innermost."""
        return Spec.of(torch.empty(shape, dtype=dtype, device="meta"))


def made_specs(program: Program, specs: Sequence[Spec], device: str) -> tuple[Spec, ...]:
    """How the results lie, found on tensors without memory."""
    with FakeTensorMode(), torch.no_grad(), torch.device(device):
        return tuple(map(Spec.of, emit(program)(_examples(specs, device))))


@dataclass(frozen=True, slots=True)
class Code:
    """A compiled program.  It takes a list, and empties it as it goes.

    strides: of the results; on CUDA Inductor pads rows that are not aligned.
    """

    run: Boxed
    strides: tuple[tuple[int, ...], ...]

    def __call__(self, values: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.run(values)


def compiled(program: Program, specs: Sequence[Spec], device: str, threads: int) -> Code:
    """The program as compiled code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of what torch imports
        from torch._guards import TracingContext, tracing
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes
        from torch._inductor.virtualized import V
        from torch.func import functionalize
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

    settings = {
        "compile_threads": 1,  # no pool of processes, which a fork would not take along
        "size_asserts": False,  # the kernel has looked
        "cpp.vec_isa_ok": True,  # what the CPU has is not tried with the compiler: 10 s a process
        "fx_graph_cache": True,
        "cpp.threads": threads,
    }
    run = emit(program)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        examples = _examples(specs, device)
    flat = functionalize(lambda *values: run(list(values)), remove="mutations")
    table = {**select_decomp_table(), **_products()}
    trace = make_fx(flat, decomposition_table=table, tracing_mode="fake")
    with torch.no_grad(), config.patch(settings), _no_monitor():
        with torch.device(device):  # not around the rest: Inductor makes tensors for itself
            module = trace(*examples)
        with (
            V.set_fake_mode(mode),
            tracing(TracingContext(mode)),  # the cache on disk asks for it
            TracingContext.report_output_strides() as reported,
        ):
            module = joint_graph_passes(module)
            code: Any = compile_fx_inner(module, examples, is_inference=True)
    strides = [stride for stride in reported or () if stride is not None]
    return Code(_seen(code.current_callable), tuple(strides))


# ---- oneDNN's product (products.py) --------------------------------------------------------------

# Inductor takes torch's own op for it with constant weights alone; one that it does not know it
# calls as it is.
_OPS = torch.library.Library("flowrun", "FRAGMENT")
_OPS.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    made = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], None)
    return made  # type: ignore[no-any-return]


def _linear_shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_OPS.impl("linear", _linear, "CPU")
_OPS.impl("linear", _linear_shape, "Meta")


def _products() -> dict[Any, Callable[..., torch.Tensor]]:
    if not torch.backends.mkldnn.is_available():
        return {}
    own = torch.ops.flowrun.linear.default
    return {torch.ops.mkldnn._linear_pointwise.default: lambda x, w, bias, *how: own(x, w, bias)}


# ---- around it -----------------------------------------------------------------------------------


@contextmanager
def _no_monitor() -> Iterator[None]:
    """A progress bar that nobody sees starts a thread, which a fork would lose."""
    bars: Any = vars(torch.hub)["tqdm"]
    before, bars.monitor_interval = getattr(bars, "monitor_interval", 0), 0
    try:
        yield
    finally:
        bars.monitor_interval = before


def require_compiler() -> None:
    """Raises RecipeError (engine.compiler) where Inductor has no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise RecipeError(
            "engine.compiler",
            f"inductor makes C++ code, and this host has no compiler: {error}",
            "Install g++ (or name one: CXX=clang++), or write engine.compiler=eager.",
        ) from error


def cache_folder() -> Path:
    """Where Inductor keeps what it compiled; TORCHINDUCTOR_CACHE_DIR moves it."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def _seen(code: Any) -> Boxed:
    """The code, which allocates behind torch's back unless a dispatch mode is looking."""
    names = getattr(code, "__func__", code).__globals__
    allocate = "empty_strided_cpu"

    def run(values: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not torch._C._len_torch_dispatch_stack() or allocate not in names:
            return code(values)  # type: ignore[no-any-return]
        quick = names[allocate]
        names[allocate] = _allocated
        try:
            return code(values)  # type: ignore[no-any-return]
        finally:
            names[allocate] = quick

    return run


def _allocated(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _examples(specs: Sequence[Spec], device: str) -> list[torch.Tensor]:
    return [torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=device) for s in specs]
