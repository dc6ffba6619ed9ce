import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrun.launcher.bench.foreseen.published import Foreseen, PublishedRow, PublishedTable
from flowrun.launcher.bench.foreseen.score import ScoredFigure, ranks, score, spearman


def test_equal_values_share_the_mean_of_their_places() -> None:
    assert ranks([30.0, 10.0, 20.0, 10.0]) == [4.0, 1.5, 3.0, 1.5]


@pytest.mark.parametrize(
    ("one", "other", "correlation"),
    [
        pytest.param([1, 2, 3], [10, 200, 3000], 1.0, id="the same order"),
        pytest.param([1, 2, 3], [3, 2, 1], -1.0, id="the opposite order"),
        pytest.param([1, 2, 3, 4, 5], [2, 1, 3, 5, 4], 0.8, id="1 - 6 * 4 / (5 * 24)"),
        pytest.param([1, 2], [1, 2], None, id="two are too few"),
        pytest.param([1, 2, 3], [7, 7, 7], None, id="no order"),
    ],
)
def test_spearman(one: list[float], other: list[float], correlation: float | None) -> None:
    assert spearman(one, other) == (None if correlation is None else pytest.approx(correlation))


@given(st.lists(st.integers(1, 1000), min_size=3, unique=True))
def test_spearman_looks_at_the_order_alone(values: list[int]) -> None:
    assert spearman(values, [value**3 for value in values]) == pytest.approx(1.0)


def suite(*rows: PublishedRow) -> Foreseen:
    return Foreseen(
        name="mine",
        note="",
        rank_at_least=0.9,
        error_at_most=0.15,
        tables=(PublishedTable("t", "T", "", rows),),
    )


def test_a_score_is_of_the_rows_that_could_be_planned() -> None:
    lines = [
        ScoredFigure(table="t", row="t/a", unit="step_ms", published=100.0, foreseen=110.0),
        ScoredFigure(table="t", row="t/b", unit="step_ms", published=200.0, foreseen=190.0),
        ScoredFigure(table="t", row="t/c", unit="step_ms", published=400.0, foreseen=600.0),
        ScoredFigure(table="t", row="t/d", unit="step_ms", published=800.0, problem="too large"),
        ScoredFigure(table="other", row="other/a", unit="step_ms", published=1.0, foreseen=9.0),
    ]
    given_suite = suite()
    found = score(given_suite, given_suite.tables[0], "step_ms", lines)
    assert found is not None
    assert (found.rows, found.rank) == (3, pytest.approx(1.0))
    assert found.error == pytest.approx(0.1)  # of 10 %, 5 %, 50 %
    assert found.ranks_hold and found.errors_hold
    assert score(given_suite, given_suite.tables[0], "memory_mib", lines) is None
