import pytest

from flowrun.engine.passes.sum_tied_gradients import sum_tied_gradients
from support.plans.graph_text import graph_of, one_rank_stages

# Three uses of one weight, two of them on stage 0; autograd sums, then transposes.
TIED = """
    parameter w = %w: float32[4, 4]
    feed x = %x: float32[6, 4]
    %g0 = aten.mm.default(%x, %w)  # backward a stage 0
    %g1 = aten.mm.default(%x, %w)  # backward b stage 0
    %g2 = aten.mm.default(%x, %w)  # backward c stage 1
    %one = aten.add.Tensor(%g2, %g1)  # backward - stage 0
    %all = aten.add.Tensor(%one, %g0)  # backward - stage 0
    %dw = aten.t.default(%all)  # backward a stage 0
    result grad/w = %dw
"""


UNTOUCHED = {
    "all on one stage": TIED.replace("c stage 1", "c stage 0"),
    "a sum that another op reads": TIED.replace(
        "    result", "    %y = aten.relu.default(%all)  # backward a stage 0\n    result", 1
    ),
    "no sum": TIED.replace("aten.add.Tensor(%one, %g0)", "aten.mul.Tensor(%one, %g0)"),
    "twice the same": TIED.replace("aten.add.Tensor(%one, %g0)", "aten.add.Tensor(%one, %one)"),
}


@pytest.mark.parametrize("text", list(UNTOUCHED.values()), ids=list(UNTOUCHED))
def test_other_gradients_stay_whole(text: str) -> None:
    graph = graph_of(text)
    assert str(sum_tied_gradients(graph, one_rank_stages(2))) == str(graph)
