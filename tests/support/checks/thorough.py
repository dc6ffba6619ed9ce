"""Which cases every run has, and which `--thorough` alone."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], often: Any = None, but: Collection[Any] = ()) -> list[Any]:
    """Mark as thorough the cases that are not of `often` (None: all are), or that `but` names."""
    return [
        case
        if case not in but and (often is None or case in often)
        else pytest.param(case, marks=pytest.mark.thorough)
        for case in cases
    ]
