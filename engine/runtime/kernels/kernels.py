"""Regions as programs: the ops of a region, at the shapes that one rank holds, emitted as
one Python function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from types import CodeType, NoneType
from typing import Any

import torch

from flowrun.engine.actors.plan import Plan, RegionWork
from flowrun.engine.ir.graph import Ref, refs
from flowrun.engine.ops.flow.update import OF_MANY
from flowrun.engine.ops.signature import LocalCall
from flowrun.engine.runtime.kernels.out_variants import into
from flowrun.engine.runtime.kernels.overrides import kernel_of
from flowrun.engine.runtime.kernels.program import Program, ProgramCall
from flowrun.engine.runtime.kernels.region_program import region_program

# reads -> makes, then the new values of `updates` (RegionWork); the list is emptied
Kernel = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]
# the number of a line, its function -> what is called instead
KernelWrapper = Callable[[int, Callable[..., Any]], Callable[..., Any]]
# a plan, a stage, a rank's coordinate and device -> region actor -> kernel
Kernels = Callable[[Plan, int, tuple[int, ...], torch.device], Mapping[int, Kernel]]

CPU = torch.device("cpu")


def eager_kernels(
    plan: Plan, stage: int, coordinate: tuple[int, ...], device: torch.device = CPU
) -> Mapping[int, Kernel]:
    """Region actor -> kernel, op after op, for the rank at a coordinate of a stage."""
    return {
        actor.id: emit(region_program(plan, actor.work, stage, coordinate), device=device)
        for actor in plan.stage_actors(stage)
        if isinstance(actor.work, RegionWork)
    }


def emit(
    program: Program, around: KernelWrapper | None = None, device: torch.device = CPU
) -> Kernel:
    """A program as Python code.  around: what calls the function of a line.  device: where what is
    made from nothing is made.

    It empties the list, so that what nobody else holds is free behind the op that reads it last.
    """
    lines = program.lines if around else updates_at_once(program.lines)
    names: dict[str, Any] = {}  # of functions and of arguments that are no values of the program
    for at, line in enumerate(lines):
        function = _function(line, device)
        names[f"call{at}"] = around(at, function) if around else function
    exec(_code(_text(program, lines, names)), names)
    kernel: Kernel = names["kernel"]
    return kernel


def _function(line: ProgramCall, device: torch.device) -> Callable[..., Any]:
    """What a line calls, with the value that it writes into before its arguments."""
    function = line.call.function
    if line.into is not None:
        function = into(function)
    function = kernel_of(function, line.loose)
    if device == CPU or any(refs((line.call.args, line.call.kwargs))):
        return function
    return made_on(device, function)


@lru_cache(maxsize=4096)
def _code(text: str) -> CodeType:
    """Ranks that hold equal parts, and blocks of a model, have the same."""
    return compile(text, "<region>", "exec")


def _text(program: Program, lines: Sequence[ProgramCall], names: dict[str, Any]) -> str:
    """The function `kernel` of a program; call0 is the function of its first line.

    names: is given the arguments that the text names.
    """
    rows = [f"{_value(k)}, " for k in range(program.reads)]
    text = ["def kernel(values):", f" {''.join(rows)}= values" if rows else "", " values.clear()"]
    behind = _last_reads(program, lines)
    for at, line in enumerate(lines):
        args = line.call.args if line.into is None else (Ref(str(line.into)), *line.call.args)
        given = [_written(x, names) for x in args]
        given += [f"{name}={_written(x, names)}" for name, x in line.call.kwargs]
        made = [(k, number) for k, number in enumerate(line.made) if number is not None]
        text.append(f" made = call{at}({', '.join(given)})")
        text += [
            f" {_value(n)} = made" if line.single else f" {_value(n)} = made[{k}]" for k, n in made
        ]
        text.append(f" {''.join(f'{_value(k)} = ' for k in behind[at])}made = None")
    return "\n".join([*text, f" return ({''.join(f'{_value(k)}, ' for k in program.results)})"])


def _value(number: int | str) -> str:
    return f"v{number}"


def _written(argument: Any, names: dict[str, Any]) -> str:
    """An argument of a call as text."""
    if isinstance(argument, Ref):
        return _value(argument.name)
    if isinstance(argument, tuple) and any(refs(argument)):
        return f"({''.join(f'{_written(x, names)}, ' for x in argument)})"
    if type(argument) in (bool, int, str, NoneType):
        return repr(argument)
    name = f"given{len(names)}"
    names[name] = argument
    return name


def _last_reads(program: Program, lines: Sequence[ProgramCall]) -> list[list[int]]:
    """Behind each line, the values that nothing reads any more."""
    last = {k: 0 for k in range(program.reads)}
    for at, line in enumerate(lines):
        read = [*line.reads, *(() if line.into is None else (line.into,))]
        last |= dict.fromkeys([*read, *(k for k in line.made if k is not None)], at)
    out: list[list[int]] = [[] for _ in lines]
    for number, at in last.items():
        if number not in program.results and lines:
            out[at].append(number)
    return out


def made_on(device: torch.device, function: Callable[..., Any]) -> Callable[..., Any]:
    """Called with this default device: in a run within it torch would ask Python about each call,
    a microsecond long.
    """

    def there(*args: Any, **kwargs: Any) -> Any:
        with device:
            return function(*args, **kwargs)

    return there


def updates_at_once(lines: Sequence[ProgramCall]) -> list[ProgramCall]:
    """Updates that follow one another, by the same numbers, as one line: a call takes 6 us."""
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


def _update_key(line: ProgramCall) -> tuple[Callable[..., Any] | None, Any, int]:
    """Equal for updates that go together; nothing else goes with anything."""
    if line.call.function in OF_MANY:
        return line.call.function, line.call.kwargs, 0
    return None, (), id(line)
