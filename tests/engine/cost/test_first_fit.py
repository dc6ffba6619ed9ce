from flowrun.engine.cost.first_fit import BestFit, FirstFit
from flowrun.engine.cost.messages import Messages

PAGE = 4096


def test_the_lowest_place_that_fits_is_taken() -> None:
    pieces = FirstFit(10 * PAGE)
    assert [pieces.take(n) for n in (1, 2 * PAGE, PAGE)] == [0, PAGE, 3 * PAGE]
    pieces.give(PAGE)
    assert pieces.take(3 * PAGE) == 4 * PAGE
    assert pieces.take(2 * PAGE) == PAGE
    assert pieces.touched == 7 * PAGE


def test_the_smallest_place_that_fits_is_taken() -> None:
    pieces = BestFit(100 * PAGE)
    holes = [pieces.take(n * PAGE) for n in (3, 1, 2, 1)]
    for hole in holes[::2]:
        pieces.give(hole)
    assert pieces.take(2 * PAGE) == holes[2]
    assert pieces.take(PAGE) == holes[0]
    assert pieces.take(3 * PAGE) == 7 * PAGE == holes[-1] + PAGE


def test_a_message_stays_until_reader_and_writer_have_each_ended_an_act() -> None:
    """So of messages that follow one another, act by act, two are there at once."""
    messages = Messages()
    for actor in range(5):
        messages.begin(actor, PAGE)
        messages.end(actor)
        messages.end_compute()
    assert messages.touched == 2 * PAGE


def test_a_large_message_finds_no_place_between_small_ones() -> None:
    messages = Messages()
    messages.begin(0, PAGE)
    messages.begin(1, PAGE)
    messages.end(0)
    messages.end_compute()
    messages.end_compute()
    messages.begin(2, 2 * PAGE)
    assert messages.touched == 4 * PAGE
