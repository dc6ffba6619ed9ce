"""layout_view: the modules of a plan and the tensors between them, equal blocks together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from flowrun.engine.actors.plan import RECEIVE, BoxWork, Plan, TransferWork
from flowrun.engine.boxing.boxing import BoxingStep
from flowrun.engine.ir.graph import FORWARD, Op
from flowrun.launcher.page.page_data import BoxingView, EdgeView, ModuleView
from flowrun.launcher.report.group_equal import FEW, spans
from flowrun.launcher.report.progress import layout
from flowrun.launcher.report.show_plan import show_shape

_BOXES = ("flow.box", "flow.transfer")
_Parameters = tuple[tuple[str, str, str], ...]


def layout_view(plan: Plan) -> tuple[tuple[ModuleView, ...], tuple[EdgeView, ...]]:
    """Return what computes in forward, in its order, and the tensors between; of other phases those
    whose layout changes by communication.
    """
    place, modules = _fold_modules(plan)
    moved = _moves_by_tensor(plan)
    homes = {v.tensor: v.name.rpartition(".")[0] for v in plan.variables.values()}
    seen: set[tuple[str, str, str]] = set()
    edges = Counter[EdgeView]()
    for op, read in _reads(plan):
        name, module, boxings = _source_of(plan, read, moved)
        source = place.get(module or homes.get(name, ""))
        target = place.get(op.module, source)
        shown = op.phase == FORWARD and source != target
        key, boxed = (read, op.module, op.phase), (read, "", op.phase)
        if source is None or target is None or key in seen:
            continue
        if not shown and not any(boxing.bytes for boxing in boxings):
            continue
        edge = EdgeView(
            source=source,
            target=target,
            phase=op.phase,
            shape=show_shape(plan.tensors[name].shape),
            boxings=boxings if boxed not in seen else (),  # else the first reader has them
            times=1,
        )
        edges[edge] += 1
        seen |= {key, boxed}
    return modules, tuple(replace(edge, times=times) for edge, times in edges.items())


def _reads(plan: Plan) -> Iterator[tuple[Op, str]]:
    """Yield every op but boxings, with each tensor that it reads."""
    for op in plan.graph.ops:
        if op.target not in _BOXES:
            yield from ((op, read) for read in op.inputs)


def _source_of(
    plan: Plan, name: str, moved: Mapping[str, tuple[float, float]]
) -> tuple[str, str, tuple[BoxingView, ...]]:
    """Return the tensor that boxings have made another of, its module, and the boxings."""
    boxings: list[BoxingView] = []
    while (op := plan.graph.producer.get(name)) and op.target in _BOXES:
        boxings.insert(0, _boxing(plan, op, moved))
        name = op.inputs[0]
    return name, op.module if op else "", tuple(boxings)


def _fold_modules(plan: Plan) -> tuple[dict[str, int], tuple[ModuleView, ...]]:
    """Return the place of each module among the views, and the views.

    Modules that differ by the number of a block are one; of many stages, by the stage, too.
    """
    held = _parameters(plan)
    forward = (op for op in plan.graph.ops if op.phase == FORWARD)
    last = {op.module: op for op in forward if op.module and op.makes}
    groups: dict[tuple[str, int, str, str, _Parameters], list[tuple[str, Op]]] = {}
    for module, op in last.items():
        number = re.search(r"\d+", module)
        pattern = re.sub(r"\d+", "*", module, count=1)
        shape, sbp = show_shape(plan.tensors[op.makes[0]].shape), layout(op.out_sbp[0])
        stage = op.stage if len(plan.placements) <= FEW else -1
        key = pattern, stage, shape, sbp, held.get(module, ())
        groups.setdefault(key, []).append((number[0] if number else "", op))
    views = tuple(
        ModuleView(
            path=pattern.replace("*", spans(int(n) for n, _ in of if n), 1),
            stages=spans(op.stage for _, op in of),
            shape=shape,
            sbp=sbp,
            parameters=parameters,
            times=len(of),
        )
        for (pattern, _, shape, sbp, parameters), of in groups.items()
    )
    return {op.module: k for k, of in enumerate(groups.values()) for _, op in of}, views


def _parameters(plan: Plan) -> dict[str, _Parameters]:
    """Return the name, shape and SBP of each parameter, by module."""
    held: dict[str, _Parameters] = {}
    for v in (v for v in plan.variables.values() if v.kind == "parameter"):
        module, _, leaf = v.name.rpartition(".")
        row = leaf, show_shape(plan.tensors[v.tensor].shape), layout(v.nd_sbp)
        held[module] = (*held.get(module, ()), row)
    return held


def _moves_by_tensor(plan: Plan) -> Mapping[str, tuple[float, float]]:
    """Return what communication makes -> the tensor's share of its bytes and seconds."""
    found = {}
    for actor in plan.actors:
        if isinstance(actor.work, BoxWork | TransferWork) and actor.kind != RECEIVE:
            total = sum(move.num_bytes for move in actor.work.moves) or 1
            for move in actor.work.moves:
                shares = (x * move.num_bytes / total for x in (actor.sent_bytes, actor.seconds))
                sent, seconds = (float(f"{share:.4g}") for share in shares)  # equal: one edge
                found[move.made] = sent, seconds
    return found


def _boxing(plan: Plan, op: Op, moved: Mapping[str, tuple[float, float]]) -> BoxingView:
    change = f"{layout(op.in_sbp[0])} -> {layout(op.out_sbp[0])}"
    cost = moved.get(op.makes[0], (0.0, 0.0))
    step = next((arg for arg in op.args if isinstance(arg, BoxingStep)), None)
    if step is None:
        return BoxingView("send", "", change, *cost)
    return BoxingView(step.kind.replace("_", "-"), plan.axes[step.axis], change, *cost)
