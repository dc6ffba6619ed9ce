"""As test_random_models.py, of seeds that have more of torch (support/nets/random_extras.py)."""

from __future__ import annotations

import pytest

from support.nets.random_extras import EXTRAS
from support.nets.random_models import EXTRA_FROM, model_of, wrong_ones

# of those that were tried; few that have every extra in a model without a mistake
SOME = (
    2016,
    2025,
    2069,
    2120,
    2136,
    2190,
    2200,
    2213,
    2225,
    2248,
    2255,
    2332,
    2336,
    2357,
    2392,
)
AT_ONCE = 10


@pytest.mark.parametrize("first", range(0, len(SOME), AT_ONCE))
def test_random_models_train_as_plain_torch_or_are_refused(first: int) -> None:
    wrong = wrong_ones(SOME[first : first + AT_ONCE])
    assert not wrong, "\n".join(wrong)


def test_the_seeds_have_every_block() -> None:
    assert min(SOME) >= EXTRA_FROM
    assert {name for seed in SOME for name in model_of(seed).blocks} >= set(EXTRAS)
