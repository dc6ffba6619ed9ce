"""Compiled regions save traffic: chains of elementwise ops are one kernel each.

Inductor, and kernels fused by hand, keep what passes between such ops in registers: a kernel reads
what enters the chain and writes what leaves it.  Products stay kernels of their own, and so does
what reduces a whole batch before anything can use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ops.nn.norm import LAYER_NORM
from flowrun.engine.ops.nn.softmax import SAFE_SOFTMAX, SOFTMAX, SOFTMAX_BACKWARD
from flowrun.engine.ops.traits import has, is_view


@dataclass(frozen=True, slots=True)
class Fusion:
    """Kernels end at some ops, by target.

    ends: ops that share a kernel with the ops that feed them, and not with those that read them.
    begins: the other way round.
    alone: ops that share a kernel with neither.
    """

    ends: frozenset[str] = frozenset()
    begins: frozenset[str] = frozenset()
    alone: frozenset[str] = frozenset()


COMPILED = Fusion()
# Apex and Megatron-LM (arXiv 2104.04473, section 4.2; megatron/fused_kernels): bias and GELU; bias,
# dropout and sum; scale, mask and softmax, after which dropout is torch's; Apex's layer norm.
HANDWRITTEN = Fusion(
    ends=frozenset({SOFTMAX, SAFE_SOFTMAX}),
    begins=frozenset({SOFTMAX_BACKWARD}),
    alone=frozenset({LAYER_NORM}),
)
FUSIONS: Mapping[str, Fusion] = {"compiled": COMPILED, "handwritten": HANDWRITTEN}


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """Ops run as one kernel.  reads, writes: tensors in memory, views as what they show."""

    ops: tuple[Op, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def kernels(
    ops: Sequence[Op], kept: Iterable[str], elements: Callable[[Op], int], fusion: Fusion = COMPILED
) -> tuple[FusedKernel, ...]:
    """Group the ops of a region into kernels; views are left out.

    kept: tensors that are read outside of it.  elements: op -> elements that it runs over.  An op
    joins the kernel of an op that feeds it if both run over as many elements and no product lies
    between them on any way; so no two kernels wait for each other.
    """
    grouped: list[list[Op]] = []
    source: dict[str, str] = {}  # view -> what it shows
    made_by: dict[str, tuple[int, int, int]] = {}  # tensor -> kernel, products before it, elements
    for op in ops:
        reads = [source.get(name, name) for name in op.inputs]
        if is_view(op.target):
            source.update((name, reads[0]) for name in op.makes)
            continue
        depth = max((made_by[name][1] for name in reads if name in made_by), default=0)
        size = elements(op)
        alike = (made_by[name][0] for name in reads if made_by.get(name, ())[1:] == (depth, size))
        joins, joined = _shares(op, fusion)
        number = next(alike, len(grouped)) if joins else len(grouped)
        if number == len(grouped):
            grouped.append([])
        grouped[number].append(op)
        after_it = (number, depth, size) if joined else (number, depth + 1, -1)
        made_by.update((name, after_it) for name in op.makes)
    return _with_traffic(grouped, source, {source.get(name, name) for name in kept})


def _shares(op: Op, fusion: Fusion) -> tuple[bool, bool]:
    """Return if the op may share a kernel with what feeds it, and with what reads it."""
    target = op.target
    fused = has(target, Trait.POINTWISE) or has(target, Trait.ROW_STATISTICS)
    fused = fused and target not in fusion.alone
    return fused and target not in fusion.begins, fused and target not in fusion.ends


def _with_traffic(
    grouped: Sequence[Sequence[Op]], source: Mapping[str, str], kept: Set[str]
) -> tuple[FusedKernel, ...]:
    """Make kernels: each reads once what enters it, and writes what others or the region need."""
    outputs = [{name for op in ops for name in op.makes} for ops in grouped]
    read = [{source.get(name, name): None for op in ops for name in op.inputs} for ops in grouped]
    entering = [
        tuple(name for name in names if name not in own)
        for names, own in zip(read, outputs, strict=True)
    ]
    wanted = {*kept, *(name for names in entering for name in names)}
    return tuple(
        FusedKernel(tuple(ops), reads, tuple(sorted(own & wanted)))
        for ops, reads, own in zip(grouped, entering, outputs, strict=True)
    )
