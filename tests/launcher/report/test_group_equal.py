import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrun.launcher.report.group_equal import alike, extent, one_of_each, some, spans
from flowrun.launcher.terminal.units import size


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0], "0"),
        ([0, 1, 2, 3], "0-3"),
        ([1, 5], "1,5"),
        ([1, 3, 5, 6, 7], "1-5 by 2, 6-7"),
        ([], ""),
    ],
)
def test_numbers_in_short(values: list[int], text: str) -> None:
    assert spans(values) == text


@given(st.sets(st.integers(0, 60)))
def test_numbers_in_short_say_each_number(values: set[int]) -> None:
    found: list[int] = []
    for part in filter(None, spans(values).replace(", ", ",").split(",")):
        run, _, by = part.partition(" by ")
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1, int(by or 1))
    assert found == sorted(values)


def test_few_stages_are_shown_one_by_one() -> None:
    assert alike(range(3), lambda stage: 0) == [[0], [1], [2]]
    assert alike(range(20), lambda stage: stage == 0) == [[0], list(range(1, 20))]
    assert some(4) == [0, 1, 2, 3]
    assert (len(some(64)), some(64)[0], some(64)[-1]) == (16, 0, 63)


def test_values_that_read_alike_are_one() -> None:
    assert extent([1_000_000, 1_000_001], size) == "1.0 MB"
    assert extent([1e6, 3e6], size) == "1.0 MB to 3.0 MB"


def test_notes_that_differ_in_numbers_alone_are_one_where_stages_are_many() -> None:
    notes = ["stage 1 has 1,000 bytes", "stage 2 has 20 bytes", "other"]
    assert one_of_each(notes, 4) == notes
    assert one_of_each(notes, 64) == ["stage 1 has 1,000 bytes (and 1 notes like it)", "other"]
