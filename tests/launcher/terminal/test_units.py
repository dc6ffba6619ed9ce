import pytest

from flowrun.launcher.terminal.units import duration, ranks


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.4, "0 s"), (99, "99 s"), (150, "2 min"), (11_520, "3 h 12 min"), (900_000, "10.4 days")],
)
def test_a_duration_has_the_unit_that_fits(value: float, text: str) -> None:
    assert duration(value) == text


def test_one_rank_is_one() -> None:
    assert (ranks(1), ranks(2)) == ("1 rank", "2 ranks")
