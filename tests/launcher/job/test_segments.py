from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from flowrun.launcher.job.segments import RankRows, ReadingOrder, Segment, segments
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe

RECIPE = load(["recipe=mlp_hybrid"])


def recipe(steps: int, evaluate: int = 0, save: int = 0, verify: int = 0) -> Recipe:
    """A run of some steps that evaluates, saves and compares ranks every so often."""
    train = replace(RECIPE.train, steps=steps, save_every=save)
    engine = replace(RECIPE.engine, verify_every=verify)
    return replace(RECIPE, train=train, eval=replace(RECIPE.eval, every=evaluate), engine=engine)


def test_a_run_evaluates_at_its_end_and_saves_nothing_unless_asked() -> None:
    assert segments(recipe(5)) == (Segment(0, 5, True, False),)


def test_a_run_stops_where_it_evaluates_or_saves() -> None:
    assert segments(recipe(7, evaluate=2, save=3)) == (
        Segment(0, 2, True, False),
        Segment(2, 3, False, True),
        Segment(3, 4, True, False),
        Segment(4, 6, True, True),
        Segment(6, 7, True, True),
    )


def test_ranks_are_compared_before_what_they_hold_is_saved() -> None:
    assert segments(recipe(5, save=4, verify=2)) == (
        Segment(0, 2, False, False, verify=True),
        Segment(2, 4, False, True, verify=True),
        Segment(4, 5, True, True, verify=True),
    )


COUNTS = st.integers(0, 6)


@given(st.integers(1, 20), COUNTS, COUNTS, st.data())
def test_the_rest_of_a_run_has_the_segments_that_the_run_has(
    steps: int, evaluate: int, save: int, data: st.DataObject
) -> None:
    every = segments(recipe(steps, evaluate, save))
    first = data.draw(st.sampled_from([segment.first for segment in every]))
    expected = every[-len(every) :][[segment.first for segment in every].index(first) :]
    assert segments(recipe(steps, evaluate, save), first) == expected


@given(st.integers(1, 20), COUNTS, COUNTS, st.integers(0, 19))
def test_segments_are_all_steps_once(steps: int, evaluate: int, save: int, first: int) -> None:
    first = min(first, steps - 1)
    walked = [
        k for s in segments(recipe(steps, evaluate, save), first) for k in range(s.first, s.last)
    ]
    assert walked == list(range(first, steps))


def test_a_run_that_goes_on_from_memory_does_again_what_was_due_after_its_last_step() -> None:
    rest = segments(recipe(6, evaluate=2, save=4), 4, ended=False)
    assert rest == (Segment(4, 4, True, True), Segment(4, 6, True, True))
    assert segments(recipe(6, evaluate=2, save=4), 0, ended=False) == segments(recipe(6, 2, 4))
    assert segments(recipe(6), 3, ended=False) == (Segment(3, 6, True, False),)


def test_a_rank_reads_what_the_segments_train_and_evaluate_on_in_turn() -> None:
    order = ReadingOrder(
        segments=segments(recipe(3, evaluate=2), first=1),
        training=RankRows(slice(2, 4), 2),
        evaluation=RankRows(slice(0, 4), 1),
        eval_steps=1,
    )
    read = [(each.evaluation, each.step, each.micro_batch) for each in order]
    held_out = (True, 0, 0)
    assert read == [(False, 1, 0), (False, 1, 1), held_out, (False, 2, 0), (False, 2, 1), held_out]
