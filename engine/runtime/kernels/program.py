"""Program: the calls that a rank runs for a region, on numbered values.

A program has no names of the logical graph, so that equal blocks of a model, and ranks that hold
equal parts, have equal programs.  region_program.py writes programs, kernels.py runs them op after
op, inductor.py builds them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, is_dataclass
from types import BuiltinFunctionType, FunctionType

import torch

from flowrun.engine.ir.graph import map_refs
from flowrun.engine.ir.signature import LocalCall


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """A line of a program: outputs = function(*args, **kwargs).

    call: its Refs are numbers of values; "0" is the first that the program reads.
    outputs: the number of each output; None if it is not used, or is a value changed in place.
    single: the function returns one tensor, not a tuple.
    changes: the values that it changes in place.
    plain: the line is never built (Trait.PLAIN).
    into: the value in whose memory the result is written (reuse_buffers.py).
    any_stride: the result may have any strides, as it is only added to others, or sent.
    """

    call: LocalCall
    outputs: tuple[int | None, ...]
    single: bool
    changes: tuple[int, ...] = ()
    _: KW_ONLY
    plain: bool = False
    into: int | None = None
    any_stride: bool = False

    @property
    def reads(self) -> tuple[int, ...]:
        numbers: list[int] = []
        map_refs((self.call.args, self.call.kwargs), lambda ref: numbers.append(int(ref.name)))
        return tuple(numbers)


@dataclass(frozen=True)
class Program:
    """The calls of a region in order.

    reads: number of values that it takes.  results: numbers of the values that it returns.
    """

    reads: int
    lines: tuple[ProgramCall, ...]
    results: tuple[int, ...]

    def __str__(self) -> str:
        """Return a text that is equal for equal programs."""
        rows = [
            f"{x.outputs}{x.single}{x.changes}{x.into}{x.any_stride} = {describe(x.call)}"
            for x in self.lines
        ]
        return "\n".join([str(self.reads), *rows, str(self.results)])


# ---- text ----------------------------------------------------------------------------------------


def describe(value: object) -> str:
    """Return a text that is equal for equal parts of a call; functions appear by name, closures
    with what they hold.  An object whose content is not known appears by its identity, and equals
    nothing else.
    """
    if isinstance(value, functools.partial):
        return f"partial{describe((value.func, value.args, value.keywords))}"
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        held = (*cells, *(value.__defaults__ or ()))
        return f"{value.__module__}.{value.__qualname__}{describe(held) if held else ''}"
    if isinstance(value, BuiltinFunctionType):
        return f"builtin {value.__qualname__}"
    if is_dataclass(value) and not isinstance(value, type):
        inside = {f.name: getattr(value, f.name) for f in fields(value)}
        return f"{type(value).__qualname__}{describe(inside)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(describe, value)) + ")"
    if isinstance(value, torch.Tensor):
        return f"tensor {id(value)}"
    return repr(value)  # an object without a repr of its own shows its address
