"""Kernels of regions: the ops of a region, at the shapes of one rank, as a Python function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from types import CodeType, NoneType
from typing import cast

import torch

from flowrun.engine.actors.plan import Plan
from flowrun.engine.ir.graph import Ref, refs
from flowrun.engine.ir.signature import Function, LocalCall
from flowrun.engine.ops.flow.update import OF_MANY
from flowrun.engine.runtime.kernels.out_variants import into
from flowrun.engine.runtime.kernels.overrides import kernel_of
from flowrun.engine.runtime.kernels.program import Program, ProgramCall
from flowrun.engine.runtime.kernels.region_program import region_program, regions_of

# `reads` -> `makes`, then the new values of `updates` (RegionWork); the list is emptied
Kernel = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]
# (number of a line, its function) -> the function that is called instead
KernelWrapper = Callable[[int, Function], Function]
# a plan, a rank and its device -> region actor -> kernel
Kernels = Callable[[Plan, int, torch.device], Mapping[int, Kernel]]

CPU = torch.device("cpu")


def eager_kernels(plan: Plan, rank: int, device: torch.device) -> Mapping[int, Kernel]:
    """Return region actor -> kernel that runs op after op."""
    return {
        actor: emit(region_program(plan, work, rank), device=device)
        for actor, work in regions_of(plan, rank)
    }


def emit(program: Program, wrap: KernelWrapper | None = None, device: torch.device = CPU) -> Kernel:
    """Compile a program to a Python function.

    wrap: replaces the function of each line; None: updates are batched instead.  device: where ops
    without inputs make their tensors.  The function empties the list that it takes, so that a
    tensor is freed after the op that reads it last.
    """
    lines = program.lines if wrap else batch_updates(program.lines)
    names: dict[str, object] = {}  # functions, and arguments that the program does not make
    for at, line in enumerate(lines):
        function = _function(line, device)
        names[f"call{at}"] = wrap(at, function) if wrap else function
    exec(_code(_text(program, lines, names)), names)
    return cast(Kernel, names["kernel"])


def _function(line: ProgramCall, device: torch.device) -> Function:
    """Return what a line calls; if it writes into a value, that is the first argument."""
    function = line.call.function
    if line.into is not None:
        function = into(function)
    function = kernel_of(function, line.any_stride)
    if device == CPU or any(refs((line.call.args, line.call.kwargs))):
        return function
    return run_on_device(device, function)


@lru_cache(maxsize=4096)
def _code(text: str) -> CodeType:
    """Compile a text; ranks that hold equal parts, and equal blocks of a model, share it."""
    return compile(text, "<region>", "exec")


def _text(program: Program, lines: Sequence[ProgramCall], names: dict[str, object]) -> str:
    """Return the source of the function `kernel`; call0 is the function of its first line.

    names: receives the arguments that the source refers to by name.
    """
    rows = [f"{_value(k)}, " for k in range(program.reads)]
    text = ["def kernel(values):", f" {''.join(rows)}= values" if rows else "", " values.clear()"]
    unread = _last_reads(program, lines)
    for at, line in enumerate(lines):
        args = line.call.args if line.into is None else (Ref(str(line.into)), *line.call.args)
        given = [_source(x, names) for x in args]
        given += [f"{name}={_source(x, names)}" for name, x in line.call.kwargs]
        used = [(k, number) for k, number in enumerate(line.outputs) if number is not None]
        text.append(f" made = call{at}({', '.join(given)})")
        text += [
            f" {_value(n)} = made" if line.single else f" {_value(n)} = made[{k}]" for k, n in used
        ]
        text.append(f" {''.join(f'{_value(k)} = ' for k in unread[at])}made = None")
    return "\n".join([*text, f" return ({''.join(f'{_value(k)}, ' for k in program.results)})"])


def _value(number: int | str) -> str:
    return f"v{number}"


def _source(argument: object, names: dict[str, object]) -> str:
    if isinstance(argument, Ref):
        return _value(argument.name)
    if isinstance(argument, tuple) and any(refs(argument)):
        return f"({''.join(f'{_source(x, names)}, ' for x in argument)})"
    if type(argument) in (bool, int, str, NoneType):
        return repr(argument)
    name = f"given{len(names)}"
    names[name] = argument
    return name


def _last_reads(program: Program, lines: Sequence[ProgramCall]) -> list[list[int]]:
    """Return for each line the values that no later line reads."""
    last = {k: 0 for k in range(program.reads)}
    for at, line in enumerate(lines):
        read = [*line.reads, *(() if line.into is None else (line.into,))]
        last |= dict.fromkeys([*read, *(k for k in line.outputs if k is not None)], at)
    out: list[list[int]] = [[] for _ in lines]
    for number, at in last.items():
        if number not in program.results and lines:
            out[at].append(number)
    return out


def run_on_device(device: torch.device, function: Function) -> Function:
    """Return the function with a default device: one for the whole run would cost a microsecond in
    each call of torch.
    """

    def run(*args: object, **kwargs: object) -> object:
        with device:
            return function(*args, **kwargs)

    return run


def batch_updates(lines: Sequence[ProgramCall]) -> list[ProgramCall]:
    """Merge consecutive updates of equal settings into one line, as a call takes 6 us."""
    out: list[ProgramCall] = []
    for (function, kwargs, _), run in groupby(lines, _update_key):
        alike = list(run)
        if function is None or len(alike) == 1:
            out += alike
            continue
        each = tuple(line.call.args for line in alike)
        changes = tuple(k for line in alike for k in line.changes)
        out.append(
            ProgramCall(
                LocalCall(OF_MANY[function], (each,), kwargs), (), False, changes, plain=True
            )
        )
    return out


def _update_key(line: ProgramCall) -> tuple[Function | None, tuple[tuple[str, object], ...], int]:
    """Return a key that is equal for updates that can be merged."""
    if line.call.function in OF_MANY:
        return line.call.function, line.call.kwargs, 0
    return None, (), id(line)
