"""memory: where an op's result lies: over one of its arguments, in memory of its own, or in that of
what it reads.  An op that no table has is taken for another name of what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowrun.engine.ops import cross_entropy
from flowrun.engine.ops.traits import TARGETS, Trait

# op -> positions of the arguments that its result may be written over (kernels/out_variants.py)
INPLACE_ARGS: Mapping[str, tuple[int, ...]] = {
    "aten.add.Tensor": (0, 1),
    "aten.sub.Tensor": (0,),
    "aten.mul.Tensor": (0, 1),
    "aten.div.Tensor": (0,),
    "aten.exp.default": (0,),
    "aten.relu.default": (0,),
    "aten.threshold_backward.default": (0,),
    "aten.gelu_backward.default": (0,),
    "aten._log_softmax.default": (0,),
    "aten._log_softmax_backward_data.default": (0, 1),
    cross_entropy.BACKWARD: (1,),
}
# ops whose result is memory of its own
ALLOCATES = frozenset(INPLACE_ARGS) | {
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.matmul.default",
    "aten.gelu.default",
    "aten.convolution.default",
    "aten.convolution_backward.default",
    "aten.native_layer_norm.default",
    "aten.native_layer_norm_backward.default",
    "aten._native_batch_norm_legit_functional.default",
    "aten.native_batch_norm_backward.default",
    "aten.nll_loss_forward.default",
    "aten.nll_loss_backward.default",
    "aten._to_copy.default",
    "aten.sum.dim_IntList",
    "aten.amax.default",
    "aten.logsumexp.default",
    cross_entropy.FORWARD,
    "aten.log.default",
}
# ops whose result shows all that they read, each element once
ALIASES = frozenset(TARGETS[Trait.IDENTITY]) | {
    *TARGETS[Trait.RESHAPE],
    "flow.accumulate",
    "aten.t.default",
    "aten.transpose.int",
    "aten.permute.default",
    "aten.unsqueeze.default",
}
