"""Program: what one rank runs for a region, as calls on numbered values.

Names of the logical graph are gone, so equal blocks of a model, and ranks that hold equal parts,
have equal programs.  kernels.py runs one as it is, inductor.py compiles it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from flowrun.engine.graph import Op, Ref, map_refs
from flowrun.engine.ops import registry
from flowrun.engine.ops.signature import Call, LocalView, torch_callable
from flowrun.engine.ops.traits import Trait, has
from flowrun.engine.placement import Shape, Slices, local_slices
from flowrun.engine.plan import Plan, RegionWork
from flowrun.engine.runtime.transport import local_step


@dataclass(frozen=True, slots=True)
class Line:
    """made = function(*args, **kwargs).  Refs are numbers of values: "0" is the first that the
    program reads.

    made: a number for each output, None where it is not used, or is a value that the function
    changed in place.  single: the function returns one tensor, not a tuple.  changes: the values
    that it changes.  plain: never compiled (Trait.PLAIN).  over: the argument of a torch op that
    its result is written over (overwrite.py).
    """

    call: Call
    made: tuple[int | None, ...]
    single: bool
    changes: tuple[int, ...] = ()
    plain: bool = False
    over: int | None = None

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
    lines: tuple[Line, ...]
    results: tuple[int, ...]

    def __str__(self) -> str:
        """Equal text, equal program.  Functions appear by name, closures with what they hold."""
        rows = [f"{x.made}{x.single}{x.changes}{x.over} = {described(x.call)}" for x in self.lines]
        return "\n".join([str(self.reads), *rows, str(self.results)])


def region_program(
    plan: Plan, work: RegionWork, stage: int, coordinate: tuple[int, ...]
) -> Program:
    """reads -> makes, then the new values of `updates`; for the rank at a coordinate of a stage.

    An output that is summed over micro-batches comes out as this act's addend.
    """
    numbers = {name: k for k, name in enumerate(work.reads)}
    before = {new: old for old, new in work.updates}
    written = dict(work.overwrites)
    count = len(work.reads)
    lines = []
    for op in work.ops:
        call = _local(plan, op, plan.placements[stage].shape, coordinate)
        if call is None:  # the op hands its input on
            numbers[op.makes[0]] = numbers[op.inputs[0]]
            continue
        function = call.function
        lookup = lambda ref: Ref(str(numbers[ref.name]))  # noqa: E731
        kwargs = tuple((k, map_refs(v, lookup)) for k, v in call.kwargs)
        call = Call(function, map_refs(call.args, lookup), kwargs)
        made: list[int | None] = []
        changes: list[int] = []
        for name in op.outputs:
            if name is None:
                made.append(None)
            elif has(op.target, Trait.IN_PLACE):
                numbers[name] = numbers[before[name]]
                changes.append(numbers[name])
                made.append(None)
            else:
                numbers[name] = count
                made.append(count)
                count += 1
        plain, over = has(op.target, Trait.PLAIN), None
        if op.makes and op.makes[0] in written and function is torch_callable(op.target):
            over = op.args.index(Ref(written[op.makes[0]]))
        lines.append(Line(call, tuple(made), len(op.outputs) == 1, tuple(changes), plain, over))
    results = (*work.makes, *(new for _, new in work.updates))
    return Program(len(work.reads), tuple(lines), tuple(numbers[name] for name in results))


def _local(plan: Plan, op: Op, grid: tuple[int, ...], coordinate: tuple[int, ...]) -> Call | None:
    """What this rank runs in place of the op; None if it is the identity."""
    tensors = plan.graph.tensors
    if has(op.target, Trait.IDENTITY) or op.target == "flow.accumulate":
        return None
    if op.target == "flow.box":
        (name,) = op.inputs
        return Call(_boxing(op, tensors[name].shape, grid, coordinate), (Ref(name),))
    if op.target == "aten.full.default":
        slices = _slices(plan, op.outputs[0] or "", op.out_sbp[0], grid, coordinate)
        return Call(torch.full, (tuple(n for _, n in slices), op.args[1]), op.kwargs)
    view = LocalView(
        op,
        tuple(tensors[n].shape for n in op.inputs),
        tuple(None if n is None else tensors[n].shape for n in op.outputs),
        tuple(
            _slices(plan, n, nd, grid, coordinate)
            for n, nd in zip(op.inputs, op.in_sbp, strict=True)
        ),
        tuple(
            None if n is None else _slices(plan, n, nd, grid, coordinate)
            for n, nd in zip(op.outputs, op.out_sbp, strict=True)
        ),
    )
    return registry.localize(view)


def _boxing(
    op: Op, shape: Shape, grid: tuple[int, ...], coordinate: tuple[int, ...]
) -> Callable[..., Any]:
    """The local step of a boxing op as a function of one tensor (FX prints constants, and a Step is
    none).
    """
    step, nd_sbp = op.args[1], op.in_sbp[0]

    def box(tensor: torch.Tensor) -> torch.Tensor:
        return local_step(step, tensor, shape, nd_sbp, grid, coordinate)

    return box


def _slices(
    plan: Plan, name: str, nd_sbp: Any, grid: tuple[int, ...], coordinate: tuple[int, ...]
) -> Slices:
    return local_slices(plan.graph.tensors[name].shape, nd_sbp, grid, coordinate)


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
