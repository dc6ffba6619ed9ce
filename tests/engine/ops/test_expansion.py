from dataclasses import replace

import pytest
import torch

from flowrun.engine.ir.graph import LogicalTensor, Op, Ref
from flowrun.engine.ir.sbp import P_LOGSUMEXP, B, NdSbp, P, S
from flowrun.engine.ops import registry
from support.samples.table_verdict import nd_rows

CLASSES: NdSbp = (S(0), S(1))
SPLIT = Op(
    "soft",
    "aten._log_softmax.default",
    (Ref("x"), 1, False),
    (),
    outputs=("y",),
    module="head",
    phase="forward",
    stage=3,
    in_sbp=(CLASSES,),
    out_sbp=(CLASSES,),
)


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, LogicalTensor]:
    return {name: LogicalTensor(name, (6, 8), dtype) for name in ("x", "y", "grad")}


def test_split_classes_need_an_expansion() -> None:
    assert registry.needs_expansion(SPLIT, tensors())


@pytest.mark.parametrize("nd_sbp", [(S(0), B), (B, B), (S(0), S(0))], ids=str)
def test_other_layouts_need_none(nd_sbp: NdSbp) -> None:
    assert not registry.needs_expansion(
        replace(SPLIT, in_sbp=(nd_sbp,), out_sbp=(nd_sbp,)), tensors()
    )


def test_statistics_are_reduced_on_the_axis_of_the_classes_alone() -> None:
    ops, _ = registry.expand(SPLIT, tensors(), (2, 2))
    by_name = {op.name: op for op in ops}
    assert by_name["soft_lse"].out_sbp == ((S(0), P_LOGSUMEXP),)
    assert by_name["soft_out"].in_sbp == (CLASSES, (S(0), B))


def test_only_statistics_travel() -> None:
    """Whatever an op reads otherwise than it was made is a statistic of a row."""
    ops, between = registry.expand(SPLIT, tensors(), (2, 2))
    shapes = {tensor.name: tensor.shape for tensor in between}
    written = {name: nd for op in ops for name, nd in zip(op.outputs, op.out_sbp, strict=True)}
    boxed = {
        name
        for op in ops
        for name, nd in zip(op.inputs, op.in_sbp, strict=True)
        if name in written and written[name] != nd
    }
    assert {shapes[name] for name in boxed} == {(6, 1)}


def test_every_expanded_op_is_signed_with_a_row_of_its_table() -> None:
    ops, between = registry.expand(SPLIT, tensors(), (2, 2))
    shapes = {t.name: t.shape for t in (*tensors().values(), *between)}
    for op in ops:
        lifted = nd_rows(op, [shapes[n] for n in op.inputs], [shapes[n] for n in op.makes], (2, 2))
        assert (op.in_sbp, op.out_sbp) in {(row.inputs, row.outputs) for row in lifted}, op.name


def test_statistics_of_narrow_numbers_are_taken_in_fp32() -> None:
    ops, between = registry.expand(SPLIT, tensors(torch.bfloat16), (2, 2))
    assert {t.dtype for t in between} == {torch.float32}
    assert ops[0].target == ops[-1].target == "aten._to_copy.default"
    assert dict(ops[-1].kwargs) == {"dtype": torch.bfloat16}


def test_a_partial_gradient_stays_partial_on_its_axis() -> None:
    grad, output = (P, S(1)), (B, S(1))
    op = Op(
        "back",
        "aten._log_softmax_backward_data.default",
        (Ref("grad"), Ref("x"), 1, torch.float32),
        (),
        outputs=("y",),
        in_sbp=(grad, output),
        out_sbp=(grad,),
    )
    ops, _ = registry.expand(op, tensors(), (2, 2))
    by_name = {o.name: o for o in ops}
    assert by_name["back_sum"].out_sbp == ((P, P),)
    assert by_name["back_share"].in_sbp == (output, (P, B))
    assert ops[-1].in_sbp == (grad, grad)
