from dataclasses import replace

from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.hardware.measured_ops import shapes_of
from flowrun.engine.runtime.calibration.op_times import measure_op_times
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load

GPT = "recipe=gpt_dp model.depth=1 data.max_bytes=100000 eval.batches=0 engine.cache=false"


def test_every_op_that_computes_is_timed_with_the_shapes_of_a_rank() -> None:
    job = Job(load([*GPT.split(), "launch=virtual"]))
    plan = job.training.plan
    found = measure_op_times(
        plan, job.materials.sampler, job.materials.initial, Hardware(), steps=1
    )
    assert all(value > 0 for values in found.values() for value in values)
    targets = {target for target, _ in found}
    assert {"aten.mm.default", "aten.gelu.default", "flow.adamw"} <= targets
    assert not any("view" in target for target in targets)
    (batch,) = {shapes_of(text)[1][0][0] for target, text in found if target == "aten.gelu.default"}
    assert batch == job.recipe.micro_batch_size // 2


def test_what_is_foreseen_twice_as_long_is_half_as_far_off() -> None:
    """The hardware that is given decides: ops are foreseen as by any other profile."""
    job = Job(load([*GPT.split(), "launch=virtual"]))
    given = (job.training.plan, job.materials.sampler, job.materials.initial)
    slow = replace(Hardware().slow_down(1e-6), core=1.0)
    assert max(v for values in measure_op_times(*given, slow, steps=1).values() for v in values) < 1
