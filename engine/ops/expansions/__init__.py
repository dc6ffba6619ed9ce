"""expansions: an op whose signature reduces statistics inside, written out as ordinary ops.

Softmax with its classes split on some axis needs the maximum and the sum of each row over all ranks
of that axis, a batch norm with its batch split the sums of each channel, and nothing else.  The ops
carry nd-SBPs of their own; where an output is P and its reader wants B, insert_boxing puts the
boxing. Axes that do not split a reduced dim keep the SBP that the op's signature gives its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flowrun.engine.ir.graph import LogicalTensor, Op
from flowrun.engine.ir.sbp import Split
from flowrun.engine.ops.expansions import expand_batch_norm as batch_norm
from flowrun.engine.ops.expansions import expand_softmax as softmax
from flowrun.engine.ops.expansions.expansion import Expansion, ReducedDims
from flowrun.engine.ops.signature import places

# target -> the argument that is reduced, and which of its dims are
REDUCES: Mapping[str, tuple[str, ReducedDims]] = {**softmax.REDUCES, **batch_norm.REDUCES}

WRITE: Mapping[str, Callable[[Expansion], None]] = {**softmax.WRITE, **batch_norm.WRITE}


def needs_expansion(op: Op, tensors: Mapping[str, LogicalTensor]) -> bool:
    """True if the op splits a dim that it reduces, on some axis.  op.in_sbp holds the chosen
    signature.
    """
    if op.target not in REDUCES or not op.in_sbp:
        return False
    argument, dims = REDUCES[op.target]
    reduced = dims(op, tensors)
    at = places(op).index(argument)
    return any(isinstance(sbp, Split) and sbp.dim in reduced for sbp in op.in_sbp[at])


def expand(
    op: Op, tensors: Mapping[str, LogicalTensor]
) -> tuple[tuple[Op, ...], tuple[LogicalTensor, ...]]:
    """(ops in order, the tensors they make in between).  The last ones make op.outputs."""
    program = Expansion(op, tensors, REDUCES[op.target][1](op, tensors))
    WRITE[op.target](program)
    return program.done()
