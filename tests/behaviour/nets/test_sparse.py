"""Tables updated by rows train as plain torch does, in every layout, and no op of a step is as
large as the table.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.actors.plan import Plan
from flowrun.engine.compile import Compilation
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import UPDATE, LogicalGraph
from flowrun.engine.ir.sbp import B, S, Sbp
from flowrun.engine.lowering.add_regions import is_communication
from flowrun.engine.ops.flow import sparse
from flowrun.engine.ops.nn.embedding import EMBEDDING_BACKWARD
from flowrun.engine.strategy import LossScale, Optimizer, Pin
from flowrun.models import optimizers
from flowrun.models.losses import binary_cross_entropy
from flowrun.models.wide_deep import WideDeep
from support.layouts.grids import Layout, example, initial, run_plan, strategy, task
from support.layouts.plain_loop import (
    Training,
    loss_difference,
    plain_loop,
    seeded,
    sgd,
    weight_difference,
)
from support.nets.paper_models import clicks

ROWS, FIELDS, NUMBERS, WIDTH, STEPS = 600, 3, 2, 4, 4
CLIP = 0.02
WIDE_DEEP = partial(WideDeep, ROWS, FIELDS, NUMBERS, WIDTH, (8,))


class Shared(nn.Module):
    """Two look-ups of one table, one of whose ids is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.tagged = nn.Embedding(ROWS, WIDTH, padding_idx=5)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids_BF: Tensor, numbers_BN: Tensor) -> Tensor:
        first, last = self.table(ids_BF[:, 0]), self.table(ids_BF).mean(1)
        tags = self.tagged(ids_BF % 7).sum(1)
        return self.head(first * last + tags + numbers_BN.mean(1, keepdim=True)).flatten()


def training(make: Callable[[], nn.Module], optimizer: Optimizer, **pins: Sbp) -> Training:
    """pins: axis -> how both tables lie."""
    generator = torch.Generator().manual_seed(4)
    pattern = "deep.weight" if make is WIDE_DEEP else "ta*.weight"
    return Training(
        partial(seeded, make),
        {"ids_BF": "ids", "numbers_BN": "numbers"},
        partial(binary_cross_entropy, target="clicks"),
        tuple(clicks(generator, 8, ROWS) for _ in range(STEPS)),
        optimizer,
        2,
        tuple(Pin(pattern, "variable", axis, sbp) for axis, sbp in pins.items()),
    )


ADAGRAD = Optimizer(
    "adagrad", (("lr", 0.1), ("eps", 1e-10), ("weight_decay", 0.0)), function=optimizers.adagrad
)
SGD = sgd(0.5)
ADAMW = Optimizer(
    "adamw",
    (("lr", 0.01), ("beta1", 0.9), ("beta2", 0.99), ("eps", 1e-8), ("weight_decay", 0.0)),
    sparse="lazy",
)


def plan_of(given: Training, layout: Layout) -> Plan:
    pins = tuple(p for p in given.pins if p.axis in layout.axes)
    asked = replace(strategy(given, layout), pins=pins)
    return Compilation(task(given), example(given), asked).training.plan


def compiled_graph(given: Training, layout: Layout) -> LogicalGraph:
    return plan_of(given, layout).graph


def assert_follows(given: Training, layout: Layout, like: Training | None = None) -> LogicalGraph:
    """It trains as plain torch does.  like: what plain torch trains, if it is another."""
    plain = plain_loop(like or given, layout.clip_norm, STEPS)
    run = run_plan(given, plan_of(given, layout), STEPS)
    assert loss_difference(run.losses, plain) <= 1e-5
    assert weight_difference({n: run.weights[n] for n in plain.after}, plain) <= 1e-4
    return run.plan.graph


def updated_by_rows(graph: LogicalGraph) -> set[str]:
    return {op.inputs[0] for op in graph.ops if op.target == "flow.update_rows"}


# ---- the same as plain torch ---------------------------------------------------------------------

CASES: dict[str, tuple[Layout, dict[str, Sbp]]] = {
    "single": (Layout(), {}),
    "single, clipped": (Layout(clip_norm=CLIP), {}),
    "data 2, tables whole": (Layout(data=2, clip_norm=CLIP), {"data": B}),
    "data 2, tables by rows": (Layout(data=2, clip_norm=CLIP), {"data": S(0)}),
    "data 2, tables by columns": (Layout(data=2, clip_norm=CLIP), {"data": S(1)}),
    "tensor 2, by rows": (Layout(tensor=2, clip_norm=CLIP), {"tensor": S(0)}),
    "tensor 2, by columns": (Layout(tensor=2, clip_norm=CLIP), {"tensor": S(1)}),
    "data 2 x tensor 2, rows and columns": (
        Layout(data=2, tensor=2, clip_norm=CLIP),
        {"data": S(0), "tensor": S(1)},
    ),
    "data 4, by rows, ZeRO 2": (Layout(data=4, zero=2, clip_norm=CLIP), {"data": S(0)}),
    "data 2, ZeRO 3": (Layout(data=2, zero=3), {}),
    "stages 2": (Layout(stages=2, clip_norm=CLIP), {}),
}
ANY_CASE = pytest.mark.parametrize(("layout", "pins"), list(CASES.values()), ids=list(CASES))
# for what differs by the update and not by the layout
FEW = ("single, clipped", "data 2, tables by rows", "tensor 2, by columns", "data 2, ZeRO 3")
SOME_CASES = pytest.mark.parametrize(
    ("layout", "pins"),
    [
        pytest.param(*case, marks=() if name in FEW else pytest.mark.thorough, id=name)
        for name, case in CASES.items()
    ],
)


@ANY_CASE
def test_wide_and_deep_trains_as_plain_torch(layout: Layout, pins: dict[str, Sbp]) -> None:
    graph = assert_follows(training(WIDE_DEEP, ADAGRAD, **pins), layout)
    assert updated_by_rows(graph) == {"wide.weight", "deep.weight"}


@SOME_CASES
def test_where_no_shape_follows_from_values_it_does_so_too(
    layout: Layout, pins: dict[str, Sbp], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse, "AT_ONCE", frozenset())
    assert_follows(training(WIDE_DEEP, ADAGRAD, **pins), layout)
    assert_follows(training(Shared, SGD, **pins), layout)


def test_rows_that_are_all_somebody_elses_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def lowered(param: Tensor, grad: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return param.sub_(grad), state.add_(1)

    monkeypatch.setattr(sparse, "AT_ONCE", frozenset())
    for ids, changed in {(2, 3, -1): [], (7, -1, 2): [0], (2, 8, 7): [1, 0]}.items():
        param, state = torch.arange(6.0).view(3, 2), torch.zeros(3, 1)
        expected = param.clone(), state.clone()
        expected[0][changed] -= 1
        expected[1][changed] += 1
        by = sparse.RowUpdate("lowered", lowered)
        sparse.update_rows(param, torch.tensor(ids), torch.ones(3, 2), state, by=by, start=7)
        assert torch.equal(param, expected[0]) and torch.equal(state, expected[1])


@SOME_CASES
def test_several_look_ups_of_one_table_and_padding_train_as_plain_torch(
    layout: Layout, pins: dict[str, Sbp]
) -> None:
    graph = assert_follows(training(Shared, SGD, **pins), layout)
    assert updated_by_rows(graph) == {"table.weight", "tagged.weight"}


def test_lazy_adam_is_the_sparse_adam_of_torch() -> None:
    given = replace(training(OrderedTable, ADAMW), inputs={"ids_BF": "ids"})
    model = seeded(partial(OrderedTable, sparse=True))
    optimizer = torch.optim.SparseAdam([*model.parameters()], lr=0.01, betas=(0.9, 0.99))
    losses = []
    for batch in given.batches:
        optimizer.zero_grad()
        _, loss = given.output_loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = run_plan(given, plan_of(given, Layout(data=2)), STEPS)
    assert found.losses == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(found.weights["table.weight"], model.table.weight.detach())


class OrderedTable(nn.Module):
    """The mean of what is looked up; sparse: torch's own sparse gradients."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=sparse)

    def forward(self, ids_BF: Tensor) -> Tensor:
        return self.table(ids_BF).mean((1, 2))


# ---- precision -----------------------------------------------------------------------------------


class Cast(WideDeep):
    """The large table is looked up in bf16."""

    def forward(self, ids_BF: Tensor, numbers_BN: Tensor) -> Tensor:
        rows_BFD = nn.functional.embedding(ids_BF, self.deep.weight.bfloat16())
        deep_BX = torch.cat([rows_BFD.flatten(1), numbers_BN], 1)
        return self.wide(ids_BF).flatten(1).sum(1) + self.head(self.mlp(deep_BX)).flatten()


CAST = partial(Cast, ROWS, FIELDS, NUMBERS, WIDTH, (8,))
NARROW = {
    "bf16": (WIDE_DEEP, torch.bfloat16, None),
    "fp16, scaled": (WIDE_DEEP, torch.float16, LossScale(1024.0)),
    "a table that the model casts": (CAST, None, None),
}


@pytest.mark.parametrize("layout", [Layout(), Layout(data=2, clip_norm=CLIP)], ids=str)
@pytest.mark.parametrize(("make", "dtype", "scale"), list(NARROW.values()), ids=list(NARROW))
def test_rows_in_a_narrow_dtype_train_as_the_whole_table_does(
    make: Callable[[], nn.Module], dtype: Any, scale: LossScale | None, layout: Layout
) -> None:
    """Both round alike; a last bit of fp32 that differs may turn one of 8 bits: 2^-8 of a row."""
    given = replace(training(make, ADAGRAD), autocast=dtype, loss_scale=scale)
    dense = replace(given, optimizer=replace(ADAGRAD, sparse="off"))
    by_rows, whole = (run_plan(each, plan_of(each, layout), STEPS) for each in (given, dense))
    assert updated_by_rows(by_rows.plan.graph) == {"wide.weight", "deep.weight"}
    assert updated_by_rows(whole.plan.graph) == set()
    assert by_rows.losses == pytest.approx(whole.losses, rel=1e-3)
    for name, before in initial(given).items():
        moved = (whole.weights[name] - before).norm()
        assert (by_rows.weights[name] - whole.weights[name]).norm() <= 2**-8 * moved, name


# ---- nothing as large as the table ---------------------------------------------------------------


@ANY_CASE
def test_no_op_makes_anything_as_long_as_the_table(layout: Layout, pins: dict[str, Sbp]) -> None:
    graph = compiled_graph(training(WIDE_DEEP, ADAGRAD, **pins), layout)
    long = [
        (op.target, name)
        for op in graph.ops
        for name in op.makes
        if ROWS in graph.tensors[name].shape and op.target != "flow.update_rows"
    ]
    assert long == []


def test_the_plan_says_how_many_rows_change() -> None:
    notes = compiled_graph(training(WIDE_DEEP, ADAGRAD), Layout()).notes
    assert (
        "deep.weight: at most 24 of 600 rows are updated a step, those looked up; the same as the "
        "dense update" in notes
    )


# ---- a dense update, whose gradient is made of rows ----------------------------------------------

DECAYED = replace(ADAMW, arguments=(*ADAMW.arguments[:-1], ("weight_decay", 0.1)), sparse="exact")
TABLE = "deep.weight"


@SOME_CASES
def test_a_table_whose_every_row_moves_trains_as_plain_torch(
    layout: Layout, pins: dict[str, Sbp]
) -> None:
    graph = assert_follows(training(WIDE_DEEP, DECAYED, **pins), layout)
    made = graph.producer[f"grad/{TABLE}"]
    assert (made.target, made.phase) == (EMBEDDING_BACKWARD, UPDATE)


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(data=2, zero=2)], ids=str)
def test_ranks_that_divide_the_batch_exchange_rows_of_a_large_table(layout: Layout) -> None:
    large = partial(WideDeep, 100_000, FIELDS, NUMBERS, WIDTH, (8,))
    graph = compiled_graph(training(large, DECAYED), layout)
    boxed = {
        (op.inputs[0], op.args[1].kind)
        for op in graph.ops
        if is_communication(op) and op.phase == UPDATE
    }
    assert (f"rows/{TABLE}", "all_gather") in boxed
    assert f"grad/{TABLE}" not in {name for name, _ in boxed}


def test_where_a_step_looks_up_as_many_rows_as_a_rank_may_hold_tables_are_summed() -> None:
    """24 look-ups a step."""
    for ids, parts, by_rows in ((25, 1, True), (24, 1, False), (49, 2, False), (50, 2, True)):
        given = training(partial(WideDeep, ids, FIELDS, NUMBERS, WIDTH, (8,)), DECAYED)
        graph = compiled_graph(given, Layout(tensor=parts))
        assert (graph.producer[f"grad/{TABLE}"].target == EMBEDDING_BACKWARD) == by_rows


def test_the_sum_of_two_look_ups_is_summed_as_a_table() -> None:
    graph = compiled_graph(training(Shared, DECAYED), Layout())
    assert graph.producer["grad/table.weight"].target == "flow.accumulate"
    assert graph.producer["grad/tagged.weight"].target == EMBEDDING_BACKWARD


# ---- where it would be something else ------------------------------------------------------------

DENSE = {
    "off": (replace(ADAGRAD, sparse="off"), ""),
    "momentum": (replace(SGD, arguments=(("lr", 0.5), ("momentum", 0.9))), "momentum moves them"),
    "decay": (
        replace(SGD, arguments=(("lr", 0.5), ("weight_decay", 0.1))),
        "weight_decay moves them",
    ),
    "adamw": (replace(ADAMW, sparse="exact"), "adamw moves them"),
    "decay of adagrad": (
        replace(ADAGRAD, arguments=(("lr", 0.1), ("eps", 1e-10), ("weight_decay", 0.1))),
        "adagrad moves them",
    ),
    "average": (replace(SGD, ema=0.9), "a moving average changes"),
    "norms": (
        Optimizer(
            "lamb",
            (("lr", 0.1), ("beta1", 0.9), ("beta2", 0.9), ("eps", 1e-6), ("weight_decay", 0.0)),
            function=optimizers.lamb,
        ),
        "lamb mixes rows",
    ),
}


@pytest.mark.parametrize(("optimizer", "why"), list(DENSE.values()), ids=list(DENSE))
def test_where_other_rows_change_too_the_update_is_dense_and_the_plan_says_why(
    optimizer: Optimizer, why: str
) -> None:
    graph = compiled_graph(training(WIDE_DEEP, optimizer), Layout())
    assert updated_by_rows(graph) == set()
    assert any(why in note for note in graph.notes) == bool(why)


def test_a_table_shorter_than_what_is_looked_up_is_updated_whole() -> None:
    small = partial(WideDeep, 70, FIELDS, NUMBERS, WIDTH, (8,))
    given = training(small, SGD)
    assert updated_by_rows(compiled_graph(given, Layout())) == {"wide.weight", "deep.weight"}
    smaller = partial(WideDeep, 20, FIELDS, NUMBERS, WIDTH, (8,))
    assert updated_by_rows(compiled_graph(training(smaller, SGD), Layout())) == set()


def test_rows_of_lamb_cannot_be_updated_lazily() -> None:
    lazy = replace(DENSE["norms"][0], sparse="lazy")
    with pytest.raises(RecipeError, match=r"mixes the rows of wide\.weight") as error:
        compiled_graph(training(WIDE_DEEP, lazy), Layout())
    assert error.value.where == "optim.sparse"
