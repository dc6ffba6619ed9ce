from contextlib import closing

import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrun.engine.runtime.transport.arena import Arena, OwnArena

SIZES = st.integers(0, 1 << 16)


@given(st.lists(st.one_of(SIZES, st.integers(-8, -1)), max_size=40))
def test_pieces_in_use_never_overlap_and_all_given_back_is_as_new(story: list[int]) -> None:
    """A number takes so many bytes; a negative one gives a piece back."""
    with closing(OwnArena()) as arena:
        held: dict[int, int] = {}
        for what in story:
            if what < 0 and held:
                start = list(held)[what % len(held)]
                arena.give(start)
                del held[start]
            elif what >= 0:
                start = arena.take(what)
                after = start + max(what, 1)
                assert all(
                    after <= low or low + max(size, 1) <= start for low, size in held.items()
                )
                held[start] = what
        for start in held:
            arena.give(start)
        assert arena.take(arena.touched) == 0


def test_the_lowest_piece_that_fits_is_taken() -> None:
    with closing(OwnArena()) as arena:
        first, second, third = (arena.take(5000) for _ in range(3))
        assert first < second < third
        arena.give(first)
        arena.give(second)
        assert arena.take(12000) == first
        assert arena.touched == third + 8192


def test_what_one_writes_another_reads() -> None:
    with closing(OwnArena()) as own:
        start = own.take(12)
        own.tensor(start, 3, torch.float32).copy_(torch.tensor([1.0, 2.0, 3.0]))
        assert Arena.of(own.descriptor).tensor(start, 3, torch.float32).tolist() == [1.0, 2.0, 3.0]
