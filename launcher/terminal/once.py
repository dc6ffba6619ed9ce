"""Advice that is said once a day, and not after each run."""

from __future__ import annotations

import time

from flowrun.engine.ir.own_files import Unusable, cache_folder, own_folder

_DAY_S = 86400


def is_first_today(what: str) -> bool:
    """Return True if this user has not had the advice in the last day, and remember it.

    what: the advice in a word.  Where nothing can be remembered, it is said each time.
    """
    try:
        file = own_folder(cache_folder()) / f"said-{what}"
        if file.exists() and 0 <= time.time() - file.stat().st_mtime < _DAY_S:
            return False
        file.touch(mode=0o600)
    except (OSError, Unusable):
        pass
    return True
