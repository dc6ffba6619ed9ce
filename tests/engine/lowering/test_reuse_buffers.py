from typing import Any

import pytest
import torch
from torch import Tensor

from flowrun.engine.actors.plan import RegionWork
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ir.signature import torch_callable
from flowrun.engine.lowering.reuse_buffers import overwrite
from flowrun.engine.ops import registry
from flowrun.engine.ops.nn import cross_entropy
from flowrun.engine.ops.traits import has
from flowrun.engine.pipeline import PASSES, lower
from flowrun.engine.runtime.kernels.out_variants import can_write, into
from support.layouts.grids import Layout, compiled
from support.layouts.plain_loop import TINY_GPT
from support.plans.graph_text import graph_of, one_axis, rewritten

BEGIN = """
    feed x = %x: float32[6, 4]
    parameter w = %w: float32[6, 4]
    %a = aten.exp.default(%x)  # forward m stage 0
"""
END = """
    %loss = aten.sum.default(%end)  # forward m stage 0
    result loss = %loss
"""


def overwrites(lines: str) -> dict[str, str]:
    """Made -> what it is written over, of the ops between BEGIN and END."""
    text = BEGIN + "\n".join(f"{line}  # forward m stage 0" for line in lines.split("; ")) + END
    graph = rewritten(PASSES, one_axis("data", 1), graph_of(text))
    works = [actor.work for actor in overwrite(lower(graph, one_axis("data", 1))).actors]
    pairs = [pair for work in works if isinstance(work, RegionWork) for pair in work.overwrites]
    return {made: read for made, read in pairs if made in text}


CASES = {
    "the last reader": ("%end = aten.exp.default(%a)", {"end": "a"}),
    "a reader before the last": (
        "%b = aten.exp.default(%a); %end = aten.mul.Tensor(%b, %a)",
        {"end": "b"},
    ),
    "the second argument": (
        "%b = aten.exp.default(%a); %end = aten.add.Tensor(%w, %b)",
        {"b": "a", "end": "b"},
    ),
    "the second argument of an op with an order": ("%end = aten.sub.Tensor(%w, %a)", {}),
    "through a view": ("%v = aten.t.default(%a); %end = aten.exp.default(%v)", {"end": "v"}),
    "a view of it is read later": (
        "%v = aten.t.default(%a); %b = aten.exp.default(%a); %c = aten.t.default(%b); "
        "%end = aten.mul.Tensor(%v, %c)",
        {"end": "v"},
    ),
    "expanded": (
        "%s = aten.sum.dim_IntList(%a, [0], True); %e = aten.expand.default(%s, [6, 4]); "
        "%end = aten.exp.default(%e)",
        {},
    ),
    "a smaller one": (
        "%s = aten.sum.dim_IntList(%a, [0], True); %end = aten.mul.Tensor(%s, %w)",
        {},
    ),
    "twice": ("%end = aten.add.Tensor(%a, %a)", {}),
    "a field of the batch": ("%end = aten.exp.default(%x)", {}),
    "a weight": ("%end = aten.add.Tensor(%w, %a)", {"end": "a"}),
    "what is made of weights alone, for a whole step": (
        "%b = aten.exp.default(%w); %end = aten.mul.Tensor(%b, %a)",
        {"end": "a"},
    ),
    "what an op of unknown memory read": (
        "%c = aten.clone.default(%a); %end = aten.exp.default(%c)",
        {},
    ),
}


@pytest.mark.parametrize(("lines", "expected"), list(CASES.values()), ids=list(CASES))
def test_a_result_goes_over_what_nobody_reads_later(lines: str, expected: dict[str, str]) -> None:
    assert overwrites(lines) == expected


def test_memory_that_a_thousand_ops_may_share_is_followed() -> None:
    chain = [
        f"%y{k} = aten.exp.default(%w); %c{k + 1} = aten.fmax.default(%y{k}, %c{k})"
        for k in range(999)
    ]
    lines = "; ".join(("%c0 = aten.exp.default(%a)", *chain, "%end = aten.exp.default(%c999)"))
    assert overwrites(lines) == {"c0": "a"}


def _arguments(target: str) -> list[object]:
    x, y = (torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(k)) for k in (1, 2))
    rows, classes = x.flatten(0, 1).clone(), torch.arange(30) % 8
    return {
        "aten.exp.default": [x],
        "aten.relu.default": [x],
        "aten.threshold_backward.default": [x, y, 0.0],
        "aten._log_softmax.default": [x, -1, False],
        "aten._log_softmax_backward_data.default": [x, y.log_softmax(-1), 2, torch.float32],
        "flow.cross_entropy_backward": [
            torch.tensor(0.5), rows, rows.logsumexp(1, True), classes, None, 2, -100, None, 0
        ],
    }.get(target, [x, y])  # fmt: skip


OVER = {target: known.out.over for target, known in registry.OPS.items() if known.out}


@pytest.mark.parametrize("target", OVER)
def test_an_op_over_its_argument_makes_what_the_op_makes(target: str) -> None:
    function = registry.whole_function(target)
    assert has(target, Trait.ALLOCATES) and can_write(function)
    for argument in OVER[target]:
        expected, given = function(*_arguments(target)), _arguments(target)
        made = into(function)(given[argument], *given)
        assert made is given[argument]
        assert torch.equal(made, expected)


@pytest.mark.parametrize("target", [name for name in OVER if name.startswith("aten.")])
def test_it_takes_no_memory_for_that(target: str) -> None:
    given, write = _arguments(target), into(torch_callable(target))
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        write(given[OVER[target][0]], *given)
    assert not max(event.self_cpu_memory_usage for event in profile.events())


LIES = {
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "expanded": lambda x: x[:, :1].expand(x.shape),
    "with gaps": lambda x: x.repeat(1, 1, 2)[:, :, ::2],
}


@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("which", ["all", "the argument"])
@pytest.mark.parametrize("target", [name for name in OVER if name.startswith("aten.")])
def test_a_result_lies_as_the_op_would_lay_it_or_is_contiguous(
    target: str, which: str, lies: str
) -> None:
    """Such as a view or a kernel behind it takes."""
    function = torch_callable(target)
    for argument in OVER[target]:
        given: list[Any] = [
            LIES[lies](x) if isinstance(x, Tensor) and (which == "all" or k == argument) else x
            for k, x in enumerate(_arguments(target))
        ]
        expected = function(*given)
        made = into(function)(given[argument], *given)
        assert torch.equal(made, expected)
        assert made.is_contiguous() or made.stride() == expected.stride()


def test_a_reader_that_comes_before_is_no_reader_any_more() -> None:
    """What another region reads for a boxing, behind which this one comes, is free then; what it
    reads beside that is not.
    """
    text = """
    feed x = %x: float32[6, 4]
    %a = aten.exp.default(%x)  # forward m stage 0
    %s = aten.sum.dim_IntList(%a, [0], True)  # forward m stage 0
    %b = aten.exp.default(%a)  # forward m stage 0
    %end = aten.mul.Tensor({first}, %s)  # forward m stage 0
    %more = aten.add.Tensor(%end, %b)  # forward m stage 0
    %loss = aten.sum.default(%more)  # forward m stage 0
    result loss = %loss
"""
    for first, expected in (("%a", {"end": "a", "more": "end"}), ("%x", {"more": "end"})):
        graph = rewritten(PASSES, one_axis("data", 2), graph_of(text.format(first=first)))
        works = [actor.work for actor in overwrite(lower(graph, one_axis("data", 2))).actors]
        regions = [work for work in works if isinstance(work, RegionWork) and work.reads]
        pairs = [pair for work in regions for pair in work.overwrites]
        assert len(regions) > 1
        assert {made: read for made, read in pairs if made in ("end", "more")} == expected


@pytest.mark.parametrize(
    "layout", [Layout(data=2), Layout(tensor=2), Layout(data=2, tensor=2)], ids=str
)
def test_the_gradient_of_logits_goes_over_them(layout: Layout) -> None:
    """The loss, which reads them too, is there before, whatever the boxings between."""
    works = (actor.work for actor in compiled(TINY_GPT, layout).plan.actors)
    regions = [work for work in works if isinstance(work, RegionWork)]
    (gradient,) = (op for work in regions for op in work.ops if op.target == cross_entropy.BACKWARD)
    written = dict(pair for work in regions for pair in work.overwrites)
    assert written[gradient.makes[0]] == gradient.inputs[1]
