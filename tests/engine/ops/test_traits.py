from collections.abc import Mapping

import pytest
import torch

from flowrun.engine.ir.graph import Ref, map_refs
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ir.signature import torch_callable
from flowrun.engine.ops import registry
from flowrun.engine.ops.proof.simulated_ranks import OpSample
from flowrun.engine.ops.traits import has, is_engine_op, is_random, is_view
from support.samples.op_samples import all_samples

SAMPLES: Mapping[str, OpSample] = {sample.op.target: sample for sample in all_samples()}
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
