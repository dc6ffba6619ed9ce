import numpy as np
import pytest
import torch

from flowrun.models.sampling import draw_in_blocks, held_out_indices, sample_indices


def step_of(seed: int, step: int, batch_size: int, num_samples: int) -> list[int]:
    numbers = range(step * batch_size, (step + 1) * batch_size)
    return sample_indices(seed, numbers, num_samples).tolist()


def test_steps_of_one_epoch_visit_each_sample_once() -> None:
    seen = [i for step in range(5) for i in step_of(0, step, 4, 20)]
    assert sorted(seen) == list(range(20))


def test_nothing_is_dropped_where_an_epoch_ends_inside_a_batch() -> None:
    seen = [i for step in range(7) for i in step_of(3, step, 3, 7)]
    assert sorted(seen) == sorted(3 * list(range(7)))


def test_a_step_is_the_same_whenever_it_is_asked_for() -> None:
    later = [step_of(1, step, 4, 10) for step in (9, 0, 5)]
    assert later == [step_of(1, step, 4, 10) for step in (9, 0, 5)]


def test_seeds_and_epochs_differ() -> None:
    assert step_of(0, 0, 50, 50) != step_of(1, 0, 50, 50)
    assert step_of(0, 0, 50, 50) != step_of(0, 1, 50, 50)


def test_the_size_of_a_batch_does_not_change_the_order_of_samples() -> None:
    assert step_of(0, 0, 8, 30) == step_of(0, 0, 4, 30) + step_of(0, 1, 4, 30)


@pytest.mark.parametrize(
    ("numbers", "num_samples"),
    [(range(4), 20), (range(18, 23), 20), (range(40), 20), (range(5, 40), 7), (range(9, 12), 1)],
    ids=["inside", "over an end", "two epochs", "several epochs", "one sample"],
)
def test_samples_are_those_that_earlier_runs_chose(numbers: range, num_samples: int) -> None:
    """A resumed run, and one beside which another is held, depend on it."""
    expected = [
        np.random.default_rng((5, n // num_samples)).permutation(num_samples)[n % num_samples]
        for n in numbers
    ]
    assert sample_indices(5, numbers, num_samples).tolist() == expected


def test_what_is_chosen_is_memory_of_its_own() -> None:
    sample_indices(0, range(4), 20).zero_()
    assert len(set(step_of(0, 0, 20, 20))) == 20


def test_evaluation_reads_the_last_samples_in_order_and_again() -> None:
    assert held_out_indices(range(4), 3, 20).tolist() == [17, 18, 19, 17]
    assert held_out_indices(range(4, 8), 3, 20).tolist() == [18, 19, 17, 18]


@pytest.mark.parametrize(("samples", "block", "mixed"), [(100, 10, 2), (97, 10, 3), (7, 10, 2)])
def test_samples_of_some_blocks_at_a_time_are_drawn_once(
    samples: int, block: int, mixed: int
) -> None:
    def draw(epoch: int, numbers: range) -> list[int]:
        found = draw_in_blocks(
            0, epoch, torch.tensor(numbers), block=block, mixed=mixed, num_samples=samples
        )
        return [int(k) for k in found]

    whole = draw(0, range(samples))
    assert sorted(whole) == [*range(samples)] != whole and whole != draw(1, range(samples))
    assert whole == [k for first in range(samples) for k in draw(0, range(first, first + 1))]
    blocks = [k // block for k in whole]
    spread = [samples - blocks[::-1].index(k) - blocks.index(k) for k in {*blocks}]
    assert max(spread) <= block * (mixed + 1)
