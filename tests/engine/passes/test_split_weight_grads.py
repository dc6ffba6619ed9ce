import pytest

from flowrun.engine.ir.graph import BACKWARD, WEIGHT_GRAD, LogicalGraph
from flowrun.engine.passes.split_weight_grads import split_weight_grads
from flowrun.engine.passes.stages.split_stages import split_stages
from flowrun.engine.passes.update.update_ops import update_ops
from support.plans.graph_text import graph_of, one_rank_stages, rewritten

THROUGH = (split_stages, update_ops, split_weight_grads)
TWO_STAGES = (("a", "act"), ("b",))


def late(graph: LogicalGraph) -> list[str]:
    """Names of the ops that may wait."""
    return [op.name for op in graph.ops if op.phase == WEIGHT_GRAD]


def test_what_only_a_weights_sum_waits_for_is_late() -> None:
    graph = rewritten(THROUGH, one_rank_stages(2, stage_modules=TWO_STAGES))
    assert late(graph) == ["dyt", "db", "grad/b.weight", "dht", "da", "grad/a.weight"]
    expected = [*("tangent@1", "dy", "dr", "dh")]
    assert [op.name for op in graph.ops if op.phase == BACKWARD] == expected


@pytest.mark.parametrize("in_flight", ["1f1b", "gpipe"])
def test_1f1b_and_gpipe_keep_weight_gradients_joined_to_backward(in_flight: str) -> None:
    strategy = one_rank_stages(2, stage_modules=TWO_STAGES, in_flight=in_flight)
    assert late(rewritten(THROUGH, strategy)) == []


def test_one_stage_has_no_bubble_to_fill() -> None:
    assert late(rewritten(THROUGH, one_rank_stages(1))) == []


def test_what_another_block_waits_for_is_not_late() -> None:
    """%z is read by the sum of block a's weight alone, but made in block b."""
    graph = graph_of(
        """
        feed x = %x: float32[4, 4]
        %z = aten.relu.default(%x)  # backward b stage 1
        %da = aten.relu.default(%z)  # backward a stage 0
        result grad/a = %da
        """
    )
    assert late(split_weight_grads(graph, one_rank_stages(2))) == []
