"""balance_stages: where to cut the forward ops so that the slowest stage is as fast as possible.

A cut may fall between any two ops. A stage's time is foreseen: what its pieces of the line take
(stage_costs.py), and for each activation that enters it and each gradient that comes back to it an
act and the bytes (no latency: other micro-batches hide that). Among cuts that are nearly as fast,
those with the least to send win: between blocks one tensor crosses, inside a residual block two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from flowrun.engine.errors import RecipeError
from flowrun.engine.hardware.network import Link
from flowrun.engine.ir.graph import FORWARD, LogicalGraph, Op

NEARLY = 0.002  # of a rank's share of the work: a stage so much slower is as good, if less crosses


@dataclass(frozen=True, slots=True)
class ForwardSequence:
    """The forward ops as a line to be cut.

    All seconds are those of the ranks of a stage, summed.
    work_s: of each piece, forward and backward.  entering_s, leaving_s: of messages, for a cut
        before that piece: activations that enter the stage behind it, gradients that come back to
        the stage before it; the first of each is 0.
    """

    work_s: tuple[float, ...]
    entering_s: tuple[float, ...]
    leaving_s: tuple[float, ...]

    def seconds(self, start: int, end: int) -> float:
        """Of a stage with the pieces start … end - 1."""
        leaving = self.leaving_s[end] if end < len(self.work_s) else 0.0
        return sum(self.work_s[start:end]) + self.entering_s[start] + leaving


def balanced_cuts(line: ForwardSequence, ranks: Sequence[int], chunks: int = 1) -> tuple[int, ...]:
    """The pieces at which stages 1, 2, … begin; exact.

    ranks: of each stage; they share its work evenly.  Of the cuts whose slowest stage is, within
    NEARLY of a rank's work, as fast as possible, those with the least to send; of those the
    fastest.  chunks: of each stage; they are stages here.  Raises RecipeError where there are more
    stages than pieces.
    """
    if len(line.work_s) < len(ranks) * chunks:
        raise _too_many(len(line.work_s), len(ranks), chunks)
    ranks = [*ranks] * chunks
    limit = _fastest(line, ranks) + NEARLY * sum(line.work_s) / sum(ranks)
    total = list(itertools.accumulate(line.work_s, initial=0.0))
    n, stages = len(line.work_s), len(ranks)
    # least (seconds of links, slowest stage, cuts) of the first stages, by where they end
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for k, share in enumerate(ranks):
        here: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        least = _least_done(total[n], limit, ranks[k + 1 :])
        for end in range(k + 1, n - (stages - k - 1) + 1):
            if total[end] < least:
                continue
            leaving = line.leaving_s[end] if end < n else 0.0
            for start in range(end - 1, k - 1, -1):
                work = total[end] - total[start]
                if work / share > limit:
                    break
                seconds = (work + line.entering_s[start] + leaving) / share
                if start in best and seconds <= limit:
                    sent, slowest, cuts = best[start]
                    sent += line.entering_s[start] + line.leaving_s[start]
                    found = (sent, max(slowest, seconds), (*cuts, start))
                    here[end] = min(here.get(end, found), found)
        best = here
    return best[n][2][1:]


def _too_many(pieces: int, stages: int, chunks: int) -> RecipeError:
    """More stages, or chunks of all stages, than pieces: at the key that can be mended alone."""
    split = chunks > 1 and stages <= pieces
    parts = f"{stages} stages" + f" of {chunks} chunks, {stages * chunks} in all," * (chunks > 1)
    return RecipeError(
        "placement.chunks" if split else "placement.stages",
        f"{parts} are asked for, but the model can be cut into {pieces} pieces at most:"
        " it has no more ops that compute before the loss.",
        f"Write at most {pieces // stages} chunks." if split else f"Write at most {pieces} stages.",
    )


def _fastest(line: ForwardSequence, ranks: Sequence[int]) -> float:
    """Seconds of the slowest stage, at best: sought below a limit, which grows until it is met, as
    few ends of a stage are possible below a low one.
    """
    limit, found = max(1e-9, sum(line.work_s) / sum(ranks)), math.inf
    while math.isinf(found):
        limit *= 1.2
        found = _fastest_below(line, ranks, limit)
    return found


def _fastest_below(line: ForwardSequence, ranks: Sequence[int], limit: float) -> float:
    """Seconds of the slowest stage, at best; infinite if they are more than a limit."""
    total = list(itertools.accumulate(line.work_s, initial=0.0))
    n = len(line.work_s)
    best = {0: 0.0}  # slowest stage so far, by where the last ends
    for k, share in enumerate(ranks):
        here: dict[int, float] = {}
        least = _least_done(total[n], limit, ranks[k + 1 :])
        for start, slowest in best.items():
            for end in range(start + 1, n + 1):
                work = total[end] - total[start]
                if work / share > limit:
                    break
                if total[end] < least:
                    continue
                leaving = line.leaving_s[end] if end < n else 0.0
                seconds = max(slowest, (work + line.entering_s[start] + leaving) / share)
                if seconds <= limit and seconds < here.get(end, math.inf):
                    here[end] = seconds
        best = here
    return best.get(n, math.inf)


def _least_done(all_s: float, limit: float, others: Sequence[int]) -> float:
    """Work that must be done before stages on so many ranks each, none slower than a limit."""
    return all_s - limit * sum(others) * (1 + 1e-9)


def line_of(
    graph: LogicalGraph,
    line_ops: Sequence[Op],
    seconds: Sequence[float],
    link: Link,
    act_s: float,
) -> tuple[list[int], ForwardSequence]:
    """(where each piece begins, the line) of `line_ops`, the forward ops to be shared out.

    seconds: of each, with all that follows it.  link: between stages.  act_s: of one act.  Both of
    all ranks of a stage.
    """
    entering, leaving = _crossing_seconds(graph, line_ops, link, act_s)
    starts = _possible(line_ops, seconds, [a + b for a, b in zip(entering, leaving, strict=True)])
    ends = [*starts[1:], len(line_ops)]
    return starts, ForwardSequence(
        tuple(sum(seconds[start:end]) for start, end in zip(starts, ends, strict=True)),
        tuple(entering[start] for start in starts),
        tuple(leaving[start] for start in starts),
    )


def _crossing_seconds(
    graph: LogicalGraph, line_ops: Sequence[Op], link: Link, act_s: float
) -> tuple[list[float], list[float]]:
    """For a cut before each op: seconds to send the activations that cross, and the gradients."""
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


def _possible(
    line_ops: Sequence[Op], seconds: Sequence[float], crossing_s: Sequence[float]
) -> list[int]:
    """Ops before which a cut makes sense, the first with them: the loss stays whole, and where only
    views lie between two cuts the one with less to send is enough.
    """
    starts = [0]
    behind = 0.0  # seconds since the last possible cut
    for k in range(1, len(line_ops)):
        behind += seconds[k - 1]
        if line_ops[k - 1].module == "loss":
            break
        if behind > 0.0:
            starts.append(k)
            behind = 0.0
        elif starts[-1] and crossing_s[k] < crossing_s[starts[-1]]:
            starts[-1] = k
    return starts
