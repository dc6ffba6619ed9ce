"""Regions as programs: the ops of a region, at the shapes that one rank holds, emitted as one FX
GraphModule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from flowrun.engine.graph import map_refs, refs
from flowrun.engine.ops.signature import Call
from flowrun.engine.ops.update import OF_MANY
from flowrun.engine.plan import Plan, RegionWork
from flowrun.engine.runtime.instead import kernel_of
from flowrun.engine.runtime.into import into
from flowrun.engine.runtime.program import Line, Program, Tile
from flowrun.engine.runtime.region_program import region_program
from flowrun.engine.runtime.tiles import tiled

# reads -> makes, then the new values of `updates` (RegionWork); the list is emptied
Kernel = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]
# the number of a line, its function -> what is called instead
Around = Callable[[int, Callable[..., Any]], Callable[..., Any]]
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


def emit(program: Program, around: Around | None = None, device: torch.device = CPU) -> Kernel:
    """A program as FX code.  around: what calls the function of a line.  device: where what is made
    from nothing is made.

    It empties the list, so that what nobody else holds is free behind the op that reads it last.
    """
    graph = torch.fx.Graph()
    values = graph.placeholder("values")
    nodes = {k: graph.call_function(_next, (values,)) for k in range(program.reads)}
    lines = program.lines if around else updates_at_once(program.lines)
    for at, line in enumerate(lines):
        lookup = lambda ref: nodes[int(ref.name)]  # noqa: E731
        call = line.call
        function = call.function
        if isinstance(function, Tile):
            whole, rows = (emit(x, device=device) for x in (function.whole, function.rows))
            function = tiled(function, whole, rows)
        args = map_refs(call.args, lookup)
        if line.into is not None:
            function, args = into(function), (nodes[line.into], *args)
        function = kernel_of(function, line.loose)
        if device != CPU and not any(refs((call.args, call.kwargs))):
            function = made_on(device, function)
        node = graph.call_function(
            around(at, function) if around else function,
            args,
            {k: map_refs(v, lookup) for k, v in call.kwargs},
        )
        for k, number in enumerate(line.made):
            if number is not None:
                nodes[number] = node if line.single else graph.call_function(_item, (node, k))
    graph.output(tuple(nodes[k] for k in program.results))
    kernel: Kernel = torch.fx.GraphModule(torch.nn.Module(), graph).forward  # without hooks
    return kernel


def made_on(device: torch.device, function: Callable[..., Any]) -> Callable[..., Any]:
    """Called with this default device: in a run within it torch would ask Python about each call,
    a microsecond long.
    """

    def there(*args: Any, **kwargs: Any) -> Any:
        with device:
            return function(*args, **kwargs)

    return there


def updates_at_once(lines: Sequence[Line]) -> list[Line]:
    """Updates that follow one another, by the same numbers, as one line: a call takes 6 us."""
    out: list[Line] = []
    for (function, kwargs, _), run in groupby(lines, _update_key):
        alike = list(run)
        if function is None or len(alike) == 1:
            out += alike
            continue
        each = tuple(line.call.args for line in alike)
        changes = tuple(k for line in alike for k in line.changes)
        out.append(Line(Call(OF_MANY[function], (each,), kwargs), (), False, changes, plain=True))
    return out


def _update_key(line: Line) -> tuple[Callable[..., Any] | None, Any, int]:
    """Equal for updates that go together; nothing else goes with anything."""
    if line.call.function in OF_MANY:
        return line.call.function, line.call.kwargs, 0
    return None, (), id(line)


def _next(values: list[torch.Tensor]) -> torch.Tensor:
    return values.pop(0)


def _item(values: Any, k: int) -> Any:
    return values[k]
