"""Regions as programs: the ops of a region, at the shapes that one rank holds, emitted as one FX
GraphModule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flowrun.engine.graph import Op, Ref, map_refs
from flowrun.engine.ops import registry
from flowrun.engine.ops.signature import Call, LocalView, torch_callable
from flowrun.engine.ops.traits import Trait, has
from flowrun.engine.placement import Shape, Slices, local_slices
from flowrun.engine.plan import Plan, RegionWork
from flowrun.engine.runtime.in_place import in_place
from flowrun.engine.runtime.products import kernel_of
from flowrun.engine.runtime.transport import local_step

Kernel = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]


def region_kernel(plan: Plan, work: RegionWork, stage: int, coordinate: tuple[int, ...]) -> Kernel:
    """kernel(reads) -> makes, then the new values of `updates`; for the rank at a coordinate of a
    stage.

    It empties the list, so that what nobody else holds is free behind the op that reads it last.
    An output that is summed over micro-batches comes out as this act's addend.
    """
    graph = torch.fx.Graph()
    values = graph.placeholder("values")
    nodes: dict[str, torch.fx.Node] = {
        name: graph.call_function(_next, (values,)) for name in work.reads
    }
    grid = plan.placements[stage].shape
    over = dict(work.overwrites)
    for op in work.ops:
        call = _local(plan, op, grid, coordinate)
        if call is None:  # the op hands its input on
            nodes[op.makes[0]] = nodes[op.inputs[0]]
            continue
        if op.makes[0] in over and call.function is torch_callable(op.target):
            argument = op.args.index(Ref(over[op.makes[0]]))
            call = replace(call, function=in_place(op.target, argument))
        lookup = lambda ref: nodes[ref.name]  # noqa: E731
        node = graph.call_function(
            kernel_of(call.function),
            map_refs(call.args, lookup),
            {k: map_refs(v, lookup) for k, v in call.kwargs},
        )
        if len(op.outputs) == 1:
            nodes[op.makes[0]] = node
        else:
            for k, name in enumerate(op.outputs):
                if name is not None:
                    nodes[name] = graph.call_function(_item, (node, k))
    graph.output(tuple(nodes[name] for name in (*work.makes, *(new for _, new in work.updates))))
    program: Kernel = torch.fx.GraphModule(torch.nn.Module(), graph).forward  # without hooks
    return program


def _next(values: list[torch.Tensor]) -> torch.Tensor:
    return values.pop(0)


def _item(values: Any, k: int) -> Any:
    return values[k]


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
