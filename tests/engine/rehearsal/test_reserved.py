"""What torch's allocator reserves, as the rules of its ranges have it."""

import pytest

from flowrun.engine.rehearsal import reserved
from flowrun.engine.rehearsal.reserved import count_reserved
from support.layouts.grids import Layout, compiled
from support.layouts.plain_loop import TINY_GPT

LAYOUTS = (Layout(), Layout(data=2, zero=2), Layout(data=2, zero=3), Layout(stages=2, tensor=2))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_tensors_have_a_place_and_none_keeps_it(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compiled(TINY_GPT, layout)
    reserved_bytes = count_reserved(found.plan)
    peak = max(found.rehearsal.peak_bytes)
    assert peak <= reserved_bytes < 1.5 * peak
    monkeypatch.setattr(reserved, "_STEPS", 8)
    assert count_reserved(found.plan) < 1.05 * reserved_bytes


def test_streams_do_not_use_the_memory_of_each_other() -> None:
    """Gradients of the last step may not lie where activations were, nor these over gathered
    weights.
    """
    found = compiled(TINY_GPT, Layout(data=2, zero=3))
    assert count_reserved(found.plan, streams_of_fsdp=True) > count_reserved(found.plan)
    alone = compiled(TINY_GPT, Layout())
    assert count_reserved(alone.plan, streams_of_fsdp=True) == count_reserved(alone.plan)
