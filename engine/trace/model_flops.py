"""model_flops: operations of the model's own products in a step, and their share of the peak.

The count is that of PaLM (arXiv 2204.02311, appendix B): forward and backward, causal attention
counted in full, recomputation not counted.
"""

from __future__ import annotations

import re

from flowrun.engine.actors.plan import Plan
from flowrun.engine.cost.op_cost import SizedOp
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.ir.graph import Op
from flowrun.engine.passes.recompute import AGAIN

# some products of a backward recompute forward's: 1 of 5 of fused attention and of experts, 2 of 8
# of experts with gates
_OWN_SHARE_OF_BACKWARD = {
    r"(scaled_dot_product|document)_.*backward\.default$": 0.8,
    r"gated_experts_backward": 0.75,
    r"experts_backward": 0.8,
}


def model_flops(plan: Plan) -> float:
    """Return the floating-point operations of one step over all ranks (2 for a multiply-add).

    Work that several ranks do alike counts once.
    """
    own = (op for op in plan.graph.ops if not op.name.endswith(AGAIN))
    return plan.micro_batches * sum(_flops(plan, op) for op in own)


def utilisation(plan: Plan, hardware: Hardware, dtype: str, step_s: float) -> float:
    """Return the share of the peak of all ranks' devices that the model's products reach.

    dtype: short name of the dtype that multiplies ("bf16").  step_s: seconds of a step; 0 gives 0.
    """
    peak = hardware.products(dtype).flops * plan.num_ranks
    return model_flops(plan) / (step_s * peak) if step_s else 0.0


def _flops(plan: Plan, op: Op) -> float:
    flops = SizedOp.whole(op, plan.graph.tensors).flops
    shares = _OWN_SHARE_OF_BACKWARD.items()
    return flops * next((own for form, own in shares if re.search(form, op.target)), 1.0)
