"""Small modules of what people write train as plain torch trains them, or are refused by name.

Each row of support/nets/written_rows.py is in one model, each model in two of the five layouts in
turn; the script there tries others.
"""

import pytest

from support.nets.compositions import (
    EQUAL,
    LAYOUTS,
    LOSS_ROWS,
    REFUSED,
    ROWS,
    WRONG_ROWS,
    Model,
    faults,
    model_of,
    outcome,
    traced_once,
)
from support.nets.written_rows import OUTPUTS

ROWS_OF_A_MODEL = 6
MODELS = [
    Model(ROWS[k::STRIDE], LOSS_ROWS[k % len(LOSS_ROWS)], k % len(OUTPUTS))
    for STRIDE in [-(-len(ROWS) // ROWS_OF_A_MODEL)]
    for k in range(STRIDE)
]


@pytest.mark.parametrize("k", range(len(MODELS)))
def test_a_model_trains_as_plain_torch(k: int) -> None:
    layouts = [[*LAYOUTS][(k + place) % 5] for place in (0, 2)]
    with traced_once():
        said = [outcome(MODELS[k], layout) for layout in layouts]
    assert said == [EQUAL, EQUAL], [faults([MODELS[k]], layout) for layout in layouts]


def test_every_row_and_loss_is_tried() -> None:
    assert {row for model in MODELS for row in model.rows} == set(ROWS)
    assert {model.loss for model in MODELS} == set(LOSS_ROWS)


@pytest.mark.parametrize("k", range(len(WRONG_ROWS)))
def test_what_may_be_refused_trains_as_plain_torch_or_is(k: int) -> None:
    model = Model((WRONG_ROWS[k],), LOSS_ROWS[0])
    assert faults([model], "data 2", (EQUAL, REFUSED)) == []


def test_a_seed_draws_the_same_model_each_time() -> None:
    assert model_of(7) == model_of(7) != model_of(8)


def test_an_update_that_is_a_thousandth_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.nets.compositions.LR", 0.05 * 1.001)
    assert outcome(MODELS[0], "single").endswith("apart")


def test_an_error_without_a_place_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.nets.compositions.NEVER", ("nowhere",))
    assert outcome(Model(("x = x * self.nowhere",)), "single").startswith("refused badly")
