import pytest

from flowrun.engine.boxing.boxing import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGE,
    REDUCE_SCATTER,
)
from flowrun.engine.cost.staging import Staging, collective, shared_collective


@pytest.mark.parametrize(
    "kind, keeps",
    [(ALL_REDUCE, False), (ALL_GATHER, False), (REDUCE_SCATTER, True), (ALL_TO_ALL, True)],
)
def test_what_all_want_alike_is_read_from_its_copy(kind: str, keeps: bool) -> None:
    assert shared_collective(kind, 2, [100], [100]).keeps == keeps


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_an_exchange_holds_what_it_sends_and_what_arrives(parts: int) -> None:
    sent = arrived = (parts - 1) * 100
    made = 100
    held = sent + arrived
    expected = Staging(held, held, held + made, shared=True)
    assert collective(EXCHANGE, parts, [60, 40], [60, 40]) == expected
