"""balance_stages: where to cut the forward ops so that the slowest stage is as fast as possible.

A cut may fall between any two ops.  The time of a stage is foreseen: the time of its pieces of the
line (stage_costs.py), and for each activation that enters it and each gradient that comes back to
it an act and the bytes (no latency: other micro-batches hide it).  Among cuts that are nearly as
fast, those with the least to send win: between blocks one tensor crosses, inside a residual block
two.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from flowrun.engine.errors import RecipeError
from flowrun.engine.hardware.network import Link
from flowrun.engine.ir.graph import FORWARD, LogicalGraph, Op

WORK_TOLERANCE = 0.002  # share of a rank's work by which a stage may be slower to send less


@dataclass(frozen=True, slots=True)
class ForwardSequence:
    """The forward ops as a line of pieces to be cut into stages.

    All seconds are sums over the ranks of a stage.
    work_s: of each piece, forward and backward.
    entering_s, returning_s: of messages for a cut before that piece: activations that enter the
        stage after it, gradients that return to the stage before it; the first of each is 0.
    """

    work_s: tuple[float, ...]
    entering_s: tuple[float, ...]
    returning_s: tuple[float, ...]


def balance_cuts(line: ForwardSequence, ranks: Sequence[int], chunks: int = 1) -> tuple[int, ...]:
    """Return the pieces at which stages 1, 2, … begin; exact.

    ranks: of each chunk of a stage, in order of the line: the number of its stage's ranks, which
    share its work evenly; each counts as a stage here.  chunks: of each stage.  Among cuts whose
    slowest stage is within WORK_TOLERANCE of the fastest possible, those with the least to send
    win; among those, the fastest.  Raises RecipeError if there are more stages than pieces.
    """
    if len(line.work_s) < len(ranks):
        raise _too_many(len(line.work_s), len(ranks) // chunks, chunks)
    share = sum(line.work_s) / sum(ranks)
    limit = max(1e-9, share)
    more = 0.01
    while not (fastest := _best_cuts(line, ranks, limit * (1 + more), counts_sent=False)):
        more *= 2  # a low limit leaves few ends of stages
    best = _best_cuts(line, ranks, fastest[1] + WORK_TOLERANCE * share, counts_sent=True)
    assert best is not None
    return best[2][1:]


def _best_cuts(
    line: ForwardSequence, ranks: Sequence[int], limit: float, counts_sent: bool
) -> tuple[float, float, tuple[int, ...]] | None:
    """Return the least (seconds of links, slowest stage, where each stage begins); None if each
    cut has a stage that takes longer than `limit`.

    counts_sent: if not, links count 0 seconds.
    """
    total = list(itertools.accumulate(line.work_s, initial=0.0))
    n = len(line.work_s)
    returning_s = (*line.returning_s, 0.0)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}  # by the last's end
    for k, share in enumerate(ranks):
        here: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        least = total[n] - limit * sum(ranks[k + 1 :]) * (1 + 1e-9)  # else later stages do too much
        for start, (sent, slowest, cuts) in best.items():
            if counts_sent:
                sent += line.entering_s[start] + line.returning_s[start]
            first = max(start + 1, bisect_left(total, least))
            for end in range(first, n - len(ranks) + k + 2):  # one piece for each later stage
                work = total[end] - total[start]
                if work / share > limit:
                    break
                seconds = (work + line.entering_s[start] + returning_s[end]) / share
                if seconds <= limit:
                    candidate = (sent, max(slowest, seconds), (*cuts, start))
                    here[end] = min(here.get(end, candidate), candidate)
        best = here
    return best.get(n)


def _too_many(pieces: int, stages: int, chunks: int) -> RecipeError:
    """Return the error for more stages, or chunks of all stages, than pieces."""
    split = chunks > 1 and stages <= pieces
    parts = f"{stages} stages" + f" of {chunks} chunks, {stages * chunks} in all," * (chunks > 1)
    return RecipeError(
        "placement.chunks" if split else "placement.stages",
        f"the recipe asks for {parts}, but the model can be cut into at most {pieces} pieces:"
        " the other ops before the loss compute nothing.",
        f"Write at most {pieces // stages} chunks." if split else f"Write at most {pieces} stages.",
    )


def make_line(
    graph: LogicalGraph, line_ops: Sequence[Op], seconds: Sequence[float], link: Link, act_s: float
) -> tuple[list[int], ForwardSequence]:
    """Return (where each piece begins, the line) of the forward ops to be divided among stages.

    line_ops: the forward ops, in order.  seconds: of each, with all that follows it.  Seconds are
    sums over the ranks of a stage.
    """
    entering, returning = _crossing_seconds(graph, line_ops, link, act_s)
    starts = _cut_points(
        line_ops, seconds, [a + b for a, b in zip(entering, returning, strict=True)]
    )
    ends = [*starts[1:], len(line_ops)]
    return starts, ForwardSequence(
        tuple(sum(seconds[start:end]) for start, end in zip(starts, ends, strict=True)),
        tuple(entering[start] for start in starts),
        tuple(returning[start] for start in starts),
    )


def _crossing_seconds(
    graph: LogicalGraph, line_ops: Sequence[Op], link: Link, act_s: float
) -> tuple[list[float], list[float]]:
    """Return, for a cut before each op, the seconds to send the activations that cross, and the
    gradients.
    """
    place = {op.name: k for k, op in enumerate(line_ops)}
    forward, backward = [0.0] * (len(line_ops) + 1), [0.0] * (len(line_ops) + 1)
    for k, op in enumerate(line_ops):
        for name in op.makes:
            readers = graph.consumers.get(name, ())
            last = max((place.get(r.name, 0) for r in readers if r.phase == FORWARD), default=0)
            if last > k:
                tensor = graph.tensors[name]
                seconds = act_s + tensor.num_bytes / link.bytes_per_s
                sides = (forward, backward) if tensor.dtype.is_floating_point else (forward,)
                for side in sides:
                    side[k + 1] += seconds
                    side[last + 1] -= seconds
    return _at_each_op(forward), _at_each_op(backward)


def _at_each_op(changes: Sequence[float]) -> list[float]:
    return [max(0.0, round(s, 12)) for s in itertools.accumulate(changes[:-1])]


def _cut_points(
    line_ops: Sequence[Op], seconds: Sequence[float], crossing_s: Sequence[float]
) -> list[int]:
    """Return the ops before which a cut makes sense, and the first op.

    The loss stays whole.  Between two cuts with only views between them, the one with less to send
    is kept.
    """
    starts = [0]
    since_cut_s = 0.0
    for k in range(1, len(line_ops)):
        since_cut_s += seconds[k - 1]
        if line_ops[k - 1].module == "loss":
            break
        if since_cut_s > 0.0:
            starts.append(k)
            since_cut_s = 0.0
        elif starts[-1] and crossing_s[k] < crossing_s[starts[-1]]:
            starts[-1] = k
    return starts
