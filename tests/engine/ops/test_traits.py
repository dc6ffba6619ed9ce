from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from flowrun.engine.ir.graph import Ref, map_refs
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ir.signature import torch_callable
from flowrun.engine.ops import registry
from flowrun.engine.ops.proof.simulated_ranks import OpSample, lay_out, local_view, run
from flowrun.engine.ops.traits import has, is_engine_op, is_random, is_view
from flowrun.engine.torch_internals import FakeTensorMode
from support.samples.op_samples import all_samples

SAMPLES: Mapping[str, OpSample] = {sample.op.target: sample for sample in all_samples()}
READS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
BY_TARGET = pytest.mark.parametrize("target", sorted(SAMPLES))


@pytest.mark.parametrize("trait", Trait, ids=lambda trait: trait.name)
def test_every_target_of_the_table_exists(trait: Trait) -> None:
    targets = [target for target, known in registry.OPS.items() if trait in known.traits]
    assert targets
    torchs = [target for target in targets if not is_engine_op(target)]
    assert all(isinstance(torch_callable(target), torch._ops.OpOverload) for target in torchs)


def inputs_and_outputs(sample: OpSample) -> tuple[list[int], list[int]]:
    """Where the memory of inputs, and of outputs with elements, begins."""
    values = {name: value.clone() for name, value in sample.values.items()}

    def lookup(ref: Ref) -> torch.Tensor:
        return values[ref.name]

    function = registry.whole_function(sample.op.target)
    args, kwargs = map_refs(sample.op.args, lookup), map_refs(sample.op.kwargs, lookup)
    result = function(*args, **dict(kwargs))
    outputs = [result] if isinstance(result, torch.Tensor) else [x for x in result if x is not None]
    return (
        [values[name].untyped_storage().data_ptr() for name in sample.op.inputs],
        [x.untyped_storage().data_ptr() for x in outputs if x.numel()],
    )


@BY_TARGET
def test_views_show_their_first_input_and_others_make_memory(target: str) -> None:
    inputs, outputs = inputs_and_outputs(SAMPLES[target])
    if is_view(target):
        assert outputs and set(outputs) == {inputs[0]}
    elif has(target, Trait.IN_PLACE):
        assert outputs and set(outputs) <= set(inputs)
    elif not has(target, Trait.SUM):  # the runtime adds what it hands on
        assert not set(outputs) & set(inputs)


def test_torch_says_which_of_its_ops_draw() -> None:
    """Attention may: with dropout."""
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert {target for target in SAMPLES if is_random(target)} == {attention}
    assert is_random("aten.native_dropout.default") and is_random("aten.rand.default")


@BY_TARGET
def test_a_rank_whose_program_reads_values_never_compiles_it(target: str) -> None:
    """And the shapes of what it makes are known without values."""
    given = SAMPLES[target]
    for row in registry.signatures(given.op, given.in_shapes, given.out_shapes, 2):
        columns = [tuple((sbp,) for sbp in side) for side in (row.inputs, row.outputs)]
        op = replace(given.op, in_sbp=columns[0], out_sbp=columns[1])
        if registry.needs_expansion(op, given.tensors):
            continue
        call = registry.localize(local_view(op, given.tensors, (2,), (1,)))
        if isinstance(call.function, torch._ops.OpOverload):
            continue
        laid = zip(op.inputs, given.inputs, columns[0], strict=True)
        pieces = {name: lay_out(value, nd, (2,))[1,] for name, value, nd in laid}
        for mode in (FakeTensorMode(), FakeTensorMode(shape_env=ShapeEnv())):
            fake = {n: mode.from_tensor(x, static_shapes=True) for n, x in pieces.items()}
            with mode:
                try:
                    run(call, fake)
                except READS_VALUES:
                    assert has(target, Trait.PLAIN), row
                    assert mode.shape_env or has(target, Trait.IN_PLACE), row
