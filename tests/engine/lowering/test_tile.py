"""tile: ops that go row by row run some rows at a time, and make the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrun.engine.actors.plan import Plan, RegionWork
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.lowering.lower import lower
from flowrun.engine.lowering.overwrite import overwrite
from flowrun.engine.lowering.tile import tile
from flowrun.engine.ops import registry
from flowrun.engine.ops.rowwise import ROWWISE
from flowrun.engine.pipeline import PASSES
from flowrun.engine.rehearsal.rehearsal import rehearse
from flowrun.engine.runtime.kernels.kernels import eager_kernels
from support.graph_text import graph_of, one_axis, rewritten

BEGIN = """
    feed x = %x: {dtype}[{rows}, {classes}]
    feed y = %y: int64[{rows}]
"""
LOSS = """
    %half = aten.mul.Tensor(%x, 0.5)
    %logits = aten._to_copy.default(%half, dtype=torch.float32)
    %target = aten.view.default(%y, [{rows}])
    %log_p = aten._log_softmax.default(%logits, 1, False)
    %loss, %weight = aten.nll_loss_forward.default(%log_p, %target, None, 1, -100)
    %picked = aten.nll_loss_backward.default(%loss, %log_p, %target, None, 1, -100, %weight)
    %grad = aten._log_softmax_backward_data.default(%picked, %log_p, 1, torch.float32)
    %back = aten._to_copy.default(%grad, dtype=torch.bfloat16)
    %flat = aten.view.default(%back, [{rows}, {classes}])
    %end = aten.t.default(%flat)
"""
SOFTMAX = """
    %x32 = aten._to_copy.default(%x, dtype=torch.float32)
    %max = aten.amax.default(%x32, [-1], True)
    %shift = aten.sub.Tensor(%x32, %max)
    %cube = aten.view.default(%shift, [1, {rows}, {classes}])
    %exp = aten.exp.default(%cube)
    %sum = aten.sum.dim_IntList(%exp, [2], True)
    %log = aten.log.default(%sum)
    %end = aten.sub.Tensor(%cube, %log)
"""
OF_LOGITS = """
    %wide = aten._to_copy.default(%x, dtype=torch.float32)
    %lse = aten.logsumexp.default(%wide, [1], True)
    %loss, %weight = flow.cross_entropy(%x, %lse, %y, None, 2, -100)
    %grad = flow.cross_entropy_backward(%loss, %x, %lse, %y, None, 1, -100, %weight, None)
    %end = aten.t.default(%grad)
"""


def lowered(body: str, dtype: str = "bfloat16", rows: int = 6, classes: int = 5) -> Plan:
    """One region on one rank, neither tiled nor written over."""
    ops = [line for line in body.splitlines() if line.strip()] + ["%total = aten.sum.default(%end)"]
    lines = [f"{line}  # forward m stage 0" for line in ops]
    text = "\n".join((BEGIN, *lines, "result loss = %total"))
    text = text.format(dtype=dtype, rows=rows, classes=classes)
    return lower(rewritten(PASSES, one_axis("data", 1), graph_of(text)), one_axis("data", 1))


def works(plan: Plan) -> list[RegionWork]:
    """Of its regions."""
    return [actor.work for actor in plan.actors if isinstance(actor.work, RegionWork)]


def tiles(plan: Plan) -> list[list[str]]:
    """Names of what is made in each tile."""
    runs = [run for work in works(tile(plan, Hardware())) for run, is_tile in work.runs if is_tile]
    return [[name for op in run for name in op.makes] for run in runs]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a few bytes are worth it, and pieces have a few rows."""
    monkeypatch.setattr("flowrun.engine.lowering.tile.LEAST_BYTES", 1)
    monkeypatch.setattr("flowrun.engine.runtime.kernels.tiles._PIECE_BYTES", 64)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (LOSS, [["half", "logits", "log_p"], ["picked", "grad", "back"]]),
        (OF_LOGITS, [["wide", "lse"], ["grad"]]),
        (SOFTMAX, [["x32", "max", "shift", "cube", "exp", "sum", "log", "end"]]),
        ("    %a = aten.exp.default(%x)\n    %b = aten.t.default(%a)\n"
         "    %c = aten.exp.default(%b)\n    %end = aten.mul.Tensor(%c, %b)", [["c", "end"]]),
        ("    %a = aten.sum.dim_IntList(%x, [0], True)\n    %end = aten.mul.Tensor(%x, %a)", []),
        ("    %a = aten.exp.default(%x)\n    %b = aten.view.default(%a, [2, 15])\n"
         "    %end = aten.exp.default(%b)", []),
    ],
    ids=["loss", "loss of logits", "softmax", "columns", "over rows", "other rows"],
)  # fmt: skip
def test_ops_that_go_row_by_row_follow_one_another(body: str, expected: list[list[str]]) -> None:
    assert tiles(lowered(body)) == expected


def test_what_fits_the_cache_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrun.engine.lowering.tile.LEAST_BYTES", 6 * 5 * 4 + 1)
    assert tiles(lowered(LOSS)) == []


def results(plan: Plan, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What all regions make of copies of x and y."""
    known = dict(zip(("x", "y"), values, strict=True))
    kernels = eager_kernels(plan, 0, (0,))
    made: list[torch.Tensor] = []
    for actor in plan.actors:
        if isinstance(actor.work, RegionWork):
            read = [
                known[name].clone(memory_format=torch.preserve_format) for name in actor.work.reads
            ]
            found = kernels[actor.id](read)
            known.update(zip(actor.work.makes, found, strict=False))
            made += [x.clone() for x in found]
    return made


@given(
    body=st.sampled_from([LOSS, OF_LOGITS, SOFTMAX]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    rows=st.integers(2, 40),
    classes=st.integers(2, 70),
    dense=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_tile_makes_the_bits_that_its_ops_make(
    body: str, dtype: str, rows: int, classes: int, dense: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    classes = 64 if body == OF_LOGITS else classes  # rows that fill vectors
    plan = lowered(body, dtype, rows, classes)
    x = torch.randn(rows, classes, generator=random).to(getattr(torch, dtype))
    y = torch.randint(0, classes, (rows,), generator=random)
    x = x if dense else x.t().contiguous().t()
    values = (x, y)
    tiled = overwrite(tile(plan, Hardware()))
    assert any(work.tiles for work in works(tiled))
    for expected, found in zip(results(plan, values), results(tiled, values), strict=True):
        assert torch.equal(expected, found)


def test_what_ops_of_a_tile_hand_on_takes_no_memory_and_no_time() -> None:
    plan = lowered(LOSS, rows=600, classes=500)
    before, after = rehearse(overwrite(plan)), rehearse(overwrite(tile(plan, Hardware())))
    assert after.peak_bytes[0] < before.peak_bytes[0]
    assert after.step_s < before.step_s


def test_a_tile_is_seen_in_the_plan() -> None:
    text = str(tile(lowered(LOSS), Hardware()))
    assert text.count("      some rows at a time:\n        %") == 2


def test_ops_that_go_row_by_row_have_no_program_of_their_own_but_the_loss() -> None:
    """A local program would be given matrices instead of what it was written for."""
    assert ROWWISE & set(registry.LOCALS) <= {
        "aten.nll_loss_backward.default",
        "aten.logsumexp.default",  # these two are for matrices as they are
        "flow.cross_entropy_backward",
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten.reshape.default",
        "aten._reshape_alias.default",
    }
