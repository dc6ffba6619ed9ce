"""trunk: which compute hides which boxing.

Ops run in the order of the graph.  A boxing can start when its tensor is made and must end before
the first op that reads it.  The ops in between (the *trunk*) hide it.  A link does one thing at a
time, so the tensors in flight after an op share its seconds, by bytes.  A tensor of the trunk
itself is read by the very next op, and nothing hides it; the gradient of a weight is read only by
the update, and the rest of backward hides it.

OneFlow's trunk subtracts a constant wait from each boxing; here seconds of the boxing itself are
subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from flowrun.engine.ir.graph import LogicalGraph


def hidden_seconds(
    graph: LogicalGraph, least_s: Mapping[str, float], but: Collection[int] = ()
) -> dict[str, float]:
    """Return tensor -> seconds of a step that hide its boxing.

    graph: in order of execution.  least_s: op name -> its seconds in a step.  but: stages where
    nothing is hidden.
    """
    place = {op.name: k for k, op in enumerate(graph.ops)}
    opens: dict[int, list[str]] = {}
    closes: dict[int, list[str]] = {}
    for name, readers in graph.consumers.items():
        maker = graph.producer.get(name)
        start = place[maker.name] + 1 if maker else 0
        first = min(place[op.name] for op in readers)
        if first > start:
            opens.setdefault(start, []).append(name)
            closes.setdefault(first, []).append(name)
    stage_of = {source.tensor: source.stage for source in graph.sources}
    stage_of |= {name: op.stage for name, op in graph.producer.items()}
    under_way: dict[int, int] = {}  # stage -> bytes
    shares: dict[int, float] = {}  # stage -> seconds for each byte under way, so far
    began: dict[str, float] = {}
    hidden: dict[str, float] = {}
    for k, op in enumerate(graph.ops):
        for name in closes.get(k, ()):
            stage, num_bytes = stage_of[name], graph.tensors[name].num_bytes
            under_way[stage] -= num_bytes
            if stage not in but:
                hidden[name] = _round_down((shares.get(stage, 0.0) - began[name]) * num_bytes)
        for name in opens.get(k, ()):
            stage = stage_of[name]
            under_way[stage] = under_way.get(stage, 0) + graph.tensors[name].num_bytes
            began[name] = shares.get(stage, 0.0)
        total = under_way.get(op.stage, 0)
        if total:
            shares[op.stage] = shares.get(op.stage, 0.0) + least_s[op.name] / total
    return hidden


def _round_down(seconds: float) -> float:
    """Round down, by an eighth at most, so that blocks that are nearly equal become equal."""
    mantissa, exponent = math.frexp(max(0.0, seconds))
    return math.ldexp(math.floor(16 * mantissa) / 16, exponent)
