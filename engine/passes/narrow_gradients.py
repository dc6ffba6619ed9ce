"""narrow_gradients: captured -> captured.  Gradients stay in the dtype that they were computed in.

It runs if `precision.accumulate_dtype: null` asks for it.  Under autocast the gradient of a weight
is computed in low precision and then cast to the dtype of the weight.  Without this cast it is
accumulated over the micro-batches and summed over ranks in low precision (Megatron-LM in fp16, with
`accumulate_allreduce_grads_in_fp32` off); update_ops widens the sum, once a step.  Gradients that
autograd computes in fp32 stay so, and a note names them: norms, embeddings, and weights that are
read twice, because autograd adds up gradients after the cast.
"""

from __future__ import annotations

from dataclasses import replace

from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ops.math.pointwise import CAST
from flowrun.engine.strategy import Strategy


def narrow_gradients(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Let the results "grad/..." name the gradients before their last cast, which nothing else
    reads.
    """
    if strategy.accumulate_in_fp32:
        return graph
    gone: set[str] = set()
    without_cast: list[str] = []
    results: list[tuple[str, str]] = []
    for name, tensor in graph.results:
        is_gradient = name.startswith("grad/")
        computed = _uncast_gradient(graph, tensor) if is_gradient else None
        if computed is not None:
            gone.add(tensor)
        elif is_gradient:
            without_cast.append(name.removeprefix("grad/"))
        results.append((name, computed or tensor))
    names = ", ".join(without_cast[:4]) + (" …" if len(without_cast) > 4 else "")
    note = (
        "gradients are accumulated in the dtype that they were computed in; "
        f"{len(without_cast)} were computed in their weight's: {names}"
    )
    return replace(
        graph,
        ops=tuple(op for op in graph.ops if not gone.intersection(op.makes)),
        tensors={name: tensor for name, tensor in graph.tensors.items() if name not in gone},
        results=tuple(results),
        notes=(*graph.notes, note) if without_cast else graph.notes,
    )


def _uncast_gradient(graph: LogicalGraph, tensor: str) -> str | None:
    """Return the input of the widening cast that makes a gradient; None if there is no such
    cast.
    """
    op = graph.producer[tensor]
    if op.target != CAST or graph.consumers.get(tensor):
        return None
    (source,) = op.inputs
    narrower = graph.tensors[source].dtype.itemsize < graph.tensors[tensor].dtype.itemsize
    return source if narrower else None
