import pytest

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.sbp import B, P, S, Sbp
from flowrun.engine.passes.layout.apply_pins import apply_pins
from flowrun.engine.strategy import Pin
from support.plans.graph_text import graph_of, one_axis, two_layers

BLOCKS = """
    parameter blocks.0.fc.weight = %w0: float32[4, 4]
    parameter blocks.1.fc.weight = %w1: float32[4, 4]
    feed x = %x: float32[6, 4]
    %p = aten.mm.default(%x, %w0)  # forward blocks.0.fc stage 0
    %q = aten.relu.default(%p)  # forward blocks.0 stage 0
    %r = aten.mm.default(%q, %w1)  # forward blocks.1.fc stage 0
    %s = aten.relu.default(%r)  # forward blocks.1 stage 0
    %loss = aten.sum.default(%s)  # forward loss stage 0
    result loss = %loss
"""


def pin(pattern: str, where: str, sbp: Sbp | None = None, axis: str = "tensor") -> Pin:
    """One line of `sbp:`; S(1) where nothing is said."""
    return Pin(pattern, where, axis, sbp or S(1))


def pinned(*pins: Pin) -> list[str]:
    graph = apply_pins(graph_of(BLOCKS), one_axis("tensor", pins=pins))
    return [op.inputs[0] for op in graph.ops if op.target == "flow.pin"]


# pin -> (index of the first op shown, ops)


def test_a_pattern_pins_each_module_that_it_names_not_what_passes_inside() -> None:
    assert pinned(pin("blocks.*", "out")) == ["q", "s"]
    assert pinned(pin("blocks.*", "in")) == ["x", "q"]
    assert pinned(pin("blocks.*.fc", "out")) == ["p", "r"]


def test_pins_on_two_axes_meet_in_one_op() -> None:
    pins = (pin("blocks.0", "out"), pin("blocks.1", "in", B))
    graph = apply_pins(graph_of(BLOCKS), one_axis("tensor", pins=pins))
    (op,) = (op for op in graph.ops if op.target == "flow.pin")
    assert op.args[1] == (("tensor", B),), "the later line of the recipe wins"


def test_a_pin_of_an_axis_that_the_placement_does_not_have_is_not_used() -> None:
    assert pinned(pin("blocks.*", "out", axis="elsewhere")) == []


REFUSED = {
    "a weight that is not there": (
        pin("c.weight", "variable"), "sbp.c.weight", "matches no parameter",
    ),
    "a module that is not there": (pin("c", "out"), "sbp.c", "matches no module"),
    "a dim that the weight does not have": (
        pin("a.weight", "variable", S(2)), "sbp.a.weight.tensor",
        r"Split dim 2 does not exist: a.weight has shape \(8, 4\), so S\(0\) and S\(1\)",
    ),
    "a dim that the activation does not have": (
        pin("a", "out", S(3)), "sbp.a.out.tensor", "Split dim 3 does not exist: h has shape",
    ),
    "a weight that is to be a sum": (
        pin("a.weight", "variable", P), "sbp.a.weight.tensor", "is whole on each rank, or split",
    ),
    "a field that is to be a sum": (
        pin("batch.*", "variable", P), "sbp.batch.*.tensor", "is whole on each rank, or split",
    ),
    "a dim shorter than the ranks": (
        pin("b.weight", "variable", S(0)), "sbp.b.weight.tensor", "shorter than the 3 ranks",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("line", "where", "message"), list(REFUSED.values()), ids=list(REFUSED))
def test_a_pin_that_fits_nothing_is_refused_at_its_key(line: Pin, where: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        apply_pins(two_layers(), one_axis("tensor", 3, pins=(line,)))
    assert error.value.where == where


def test_an_output_that_no_other_module_reads_cannot_be_pinned() -> None:
    text = BLOCKS.replace("forward loss", "forward blocks.1")
    with pytest.raises(RecipeError, match=r"no tensor leaves 'blocks\.1' in forward"):
        apply_pins(graph_of(text), one_axis("tensor", pins=(pin("blocks.1", "out"),)))
