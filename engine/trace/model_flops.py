"""model_flops: what the model's own products come to, a step; how much of a device's peak that is.

By the count of PaLM (arXiv 2204.02311, appendix B): forward and backward, causal attention whole,
nothing that is computed again.
"""

from __future__ import annotations

from flowrun.engine.actors.plan import Plan
from flowrun.engine.cost.op_cost import op_flops
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.ir.graph import Op
from flowrun.engine.passes.recompute import AGAIN

_ATTENTION_AGAIN = 0.8  # of five products in the gradient of fused attention, one is forward's


def model_flops(plan: Plan) -> float:
    """Multiply-adds times 2 of a step, of all ranks together: what several do alike counts once."""
    own = (op for op in plan.graph.ops if not op.name.endswith(AGAIN))
    return plan.micro_batches * sum(_flops(plan, op) for op in own)


def utilisation(plan: Plan, hardware: Hardware, dtype: str, step_s: float) -> float:
    """Of what the ranks' devices multiply at most in that time, in a dtype by its short name."""
    peak = hardware.products(dtype).flops * plan.num_ranks
    return model_flops(plan) / (step_s * peak) if step_s else 0.0


def _flops(plan: Plan, op: Op) -> float:
    tensors = plan.graph.tensors
    made = [None if name is None else tensors[name].shape for name in op.outputs]
    flops = op_flops(op, [tensors[name].shape for name in op.inputs], made)
    again = "scaled_dot_product" in op.target and op.target.endswith("backward.default")
    return flops * (_ATTENTION_AGAIN if again else 1.0)
