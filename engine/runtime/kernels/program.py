"""Program: what one rank runs for a region, as calls on numbered values.

Names of the logical graph are gone, so equal blocks of a model, and ranks that hold equal parts,
have equal programs.  region_program.py writes one, kernels.py runs it as it is, inductor.py
compiles it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, is_dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from flowrun.engine.ir.graph import map_refs
from flowrun.engine.ops.signature import LocalCall


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """made = function(*args, **kwargs).  Refs are numbers of values: "0" is the first that the
    program reads.

    made: a number for each output, None where it is not used, or is a value that the function
    changed in place.  single: the function returns one tensor, not a tuple.  changes: the values
    that it changes.  plain: never compiled (Trait.PLAIN).  into: the value in whose memory the
    result is written (overwrite.py).  loose: the result is only added to those of other
    acts, or sent, so that it may lie in any order.
    """

    call: LocalCall
    made: tuple[int | None, ...]
    single: bool
    changes: tuple[int, ...] = ()
    _: KW_ONLY
    plain: bool = False
    into: int | None = None
    loose: bool = False

    @property
    def reads(self) -> tuple[int, ...]:
        """The values among the arguments."""
        found: list[int] = []
        map_refs((self.call.args, self.call.kwargs), lambda ref: found.append(int(ref.name)))
        return tuple(found)


@dataclass(frozen=True)
class Program:
    """reads: how many values it is given.  results: those that it returns."""

    reads: int
    lines: tuple[ProgramCall, ...]
    results: tuple[int, ...]

    def __str__(self) -> str:
        """Equal text, equal program.  Functions appear by name, closures with what they hold."""
        rows = [
            f"{x.made}{x.single}{x.changes}{x.into}{x.loose} = {described(x.call)}"
            for x in self.lines
        ]
        return "\n".join([str(self.reads), *rows, str(self.results)])


# ---- text ----------------------------------------------------------------------------------------


def described(value: Any) -> str:
    """A call's parts as text that is equal where they are.  What it cannot tell apart it names by
    its identity, so that it is equal to nothing else.
    """
    if isinstance(value, functools.partial):
        return f"partial{described((value.func, value.args, value.keywords))}"
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        held = (*cells, *(value.__defaults__ or ()))
        return f"{value.__module__}.{value.__qualname__}{described(held) if held else ''}"
    if isinstance(value, BuiltinFunctionType):
        return f"builtin {value.__qualname__}"
    if is_dataclass(value) and not isinstance(value, type):
        inside = {f.name: getattr(value, f.name) for f in fields(value)}
        return f"{type(value).__qualname__}{described(inside)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {described(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(described, value)) + ")"
    if isinstance(value, torch.Tensor):
        return f"tensor {id(value)}"
    return repr(value)  # an object without a repr of its own shows its address
