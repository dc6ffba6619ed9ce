"""Which samples a step reads."""

from __future__ import annotations

from flowrun.models.sampling import sample_indices


def test_steps_of_one_epoch_visit_each_sample_once() -> None:
    seen = [i for step in range(5) for i in sample_indices(0, step, 4, 20)]
    assert sorted(seen) == list(range(20))


def test_nothing_is_dropped_where_an_epoch_ends_inside_a_batch() -> None:
    seen = [i for step in range(7) for i in sample_indices(3, step, 3, 7)]
    assert sorted(seen) == sorted(3 * list(range(7)))


def test_a_step_is_the_same_whenever_it_is_asked_for() -> None:
    later = [sample_indices(1, step, 4, 10) for step in (9, 0, 5)]
    assert later == [sample_indices(1, step, 4, 10) for step in (9, 0, 5)]


def test_seeds_and_epochs_differ() -> None:
    assert sample_indices(0, 0, 50, 50) != sample_indices(1, 0, 50, 50)
    assert sample_indices(0, 0, 50, 50) != sample_indices(0, 1, 50, 50)


def test_the_size_of_a_batch_does_not_change_the_order_of_samples() -> None:
    assert sample_indices(0, 0, 8, 30) == sample_indices(0, 0, 4, 30) + sample_indices(0, 1, 4, 30)
