import pytest

from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.passes.narrow_gradients import narrow_gradients
from support.plans.graph_text import graph_of, one_rank_stages

CAST = """
    parameter w = %w: float32[4, 4]
    feed x = %x: float32[4, 4]
    %xb = aten._to_copy.default(%x, dtype=torch.bfloat16)  # forward a stage 0
    %dwb = aten.mm.default(%xb, %xb)  # backward a stage 0
    %dw = aten._to_copy.default(%dwb, dtype=torch.float32)  # backward a stage 0
    result grad/w = %dw
"""


def narrowed(text: str, accumulate_in_fp32: bool = False) -> LogicalGraph:
    strategy = one_rank_stages(1, accumulate_in_fp32=accumulate_in_fp32)
    return narrow_gradients(graph_of(text), strategy)


UNTOUCHED = {
    "not asked for": (CAST, True),
    "a cast that another op reads": (
        CAST.replace(
            "    result", "    %y = aten.relu.default(%dw)  # backward a stage 0\n    result"
        ),
        False,
    ),
    "a narrowing cast": (CAST.replace("bfloat16", "float64"), False),
    "a sum of casts": (
        CAST.replace(
            "    result grad/w = %dw",
            "    %s = aten.add.Tensor(%dw, %dw)  # backward a stage 0\n    result grad/w = %s",
        ),
        False,
    ),
}


@pytest.mark.parametrize(("text", "wide"), list(UNTOUCHED.values()), ids=list(UNTOUCHED))
def test_other_gradients_stay_as_they_are(text: str, wide: bool) -> None:
    assert str(narrowed(text, wide)) == str(graph_of(text))
