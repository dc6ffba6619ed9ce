"""Rows that hold on the samples and that no table lists, each with its reason."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.sbp import B, P, Sbp, Split
from flowrun.engine.ir.signature import Signature, places
from flowrun.engine.ops.proof.simulated_ranks import OpSample

Given = Mapping[str, Sbp]  # argument -> SBP


@dataclass(frozen=True)
class Absent:
    """Rows of some targets that hold, or seem to on the sample, and are not wanted."""

    targets: str  # patterns
    when: Callable[[Given, Signature], bool]
    reason: str

    def among(self, targets: Iterable[str]) -> list[str]:
        """Return the targets that it is about."""
        patterns = self.targets.split()
        return [t for t in targets if any(fnmatchcase(t, pattern) for pattern in patterns)]

    def covers(self, op: Op, row: Signature) -> bool:
        """Return whether it is the reason why a row of an op is left out."""
        names = places(op) if op.target.startswith("aten.") else op.inputs
        given = dict(zip(names, row.inputs, strict=True))
        return bool(self.among([op.target])) and self.when(given, row)


def partial(*names: str) -> Callable[[Given, Signature], bool]:
    return lambda given, row: any(given.get(name) == P for name in names)


def any_partial(given: Given, row: Signature) -> bool:
    return P in row.inputs


def cut_in_space(given: Given, row: Signature) -> bool:
    return any(isinstance(sbp, Split) and sbp.dim >= 2 for sbp in given.values())


ABSENT = (
    Absent("flow.not_finite", any_partial, "parts may be finite where their sum is not"),
    Absent(
        "flow.round flow.update_narrow",
        any_partial,
        "it holds within the digits of bf16: other numbers are drawn, or a weight would be partial",
    ),
    Absent(
        "aten.*_norm* aten._fused_rms_norm*",
        partial("weight", "bias", "running_mean", "running_var"),
        "no layout makes weights, biases or running statistics partial",
    ),
    Absent(
        "aten._native_batch_norm_legit_no_training.default",
        lambda given, row: P in row.outputs[1:],
        "the outputs after the first have no elements",
    ),
    Absent(
        "aten.convolution* aten.avg_pool2d.default",
        cut_in_space,
        "holds only for the sample's sizes, on which no window reaches over the cut",
    ),
    Absent(
        "aten.convolution_backward.default",
        partial("weight"),
        "listed; with output_mask[0] off the weight is not read, and any SBP of it does",
    ),
    Absent(
        "aten.*_pool2d*_backward.default",
        partial("self"),
        "self is read for its shape alone, and never partial",
    ),
    Absent(
        "aten.nll_loss*backward.default",
        partial("self", "total_weight", "weight"),
        "self is read for its shape, total_weight for a mean only; class weights are never partial",
    ),
    Absent("aten.nll_loss*forward.default", partial("weight"), "class weights are never partial"),
    Absent("flow.target_weight", any_partial, "neither classes nor their weights are partial"),
    Absent(
        "aten.nll_loss*forward.default flow.cross_entropy",
        lambda given, row: row.outputs[1] == P,
        "the total weight of an unreduced loss is a constant 0, which is its own partial sum",
    ),
    Absent(
        "flow.cross_entropy* flow.head_gradient",
        lambda given, row: P in row.inputs[1:],
        "statistics of logits and weights of classes are never partial sums",
    ),
    Absent(
        "aten.*zeros*",
        lambda given, row: row.outputs == (P,),
        "a zero is its own partial sum; boxing B -> P moves nothing either",
    ),
    Absent(
        "flow.next_scale",
        lambda given, row: row.inputs != (B,) * 4,
        "states of the step are whole; a sum may overflow where no part does, unlike here",
    ),
    Absent(
        "flow.sgd flow.snapshot flow.assign flow.ema flow.update_rows",
        any_partial,
        "it is linear, but a weight that is a partial sum has no home",
    ),
    Absent(
        "flowrun.recurrent_layer_backward.default",
        lambda given, row: row.inputs[-1] != row.inputs[1],
        "what forward kept is laid out as it was there; elements of it are not read",
    ),
    Absent(
        "flow.collect",
        lambda given, row: row.inputs[0] != row.inputs[1] or row.inputs[1] == P,
        "rows and ids apart would come in two orders, with several micro-batches; ids are not sums",
    ),
)


def reason_for_absence(given: OpSample, row: Signature) -> str | None:
    """Return why a row that holds is left out; None if nothing says so."""
    return next((absent.reason for absent in ABSENT if absent.covers(given.op, row)), None)
