"""Bytes that communication holds beside what it reads."""

from __future__ import annotations

import pytest

from flowrun.engine.boxing import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from flowrun.engine.cost.staging import shared_collective


@pytest.mark.parametrize(
    "kind, keeps",
    [(ALL_REDUCE, False), (ALL_GATHER, False), (REDUCE_SCATTER, True), (ALL_TO_ALL, True)],
)
def test_what_all_want_alike_is_read_from_its_copy(kind: str, keeps: bool) -> None:
    assert shared_collective(kind, 2, 100, 100).keeps == keeps
