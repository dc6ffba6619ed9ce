import errno
import multiprocessing
import os
import resource
from functools import cache

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.engine.runtime.process.process_memory import address_space
from flowrun.engine.runtime.transport.arena import OwnArena
from flowrun.launcher.job import limits
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.limits import check_limits
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.key_schema import schema
from flowrun.launcher.recipe.recipe_errors import PlacedError, from_hydra

RANKS = 2


@cache
def job() -> Job:
    return Job(load(["recipe=mlp_data_parallel", "train.save_every=10"]), values=False)


def check() -> None:
    check_limits(job(), job().training, RANKS)


def allow(patch: pytest.MonkeyPatch, limit: int, soft: int, hard: int | None = None) -> list[int]:
    """Pretend that a limit of this process is as given; return what it is set to."""
    before, found = resource.getrlimit, list[int]()

    def read(which: int) -> tuple[int, int]:
        return (soft, hard or soft) if which == limit else before(which)

    patch.setattr(resource, "getrlimit", read)
    patch.setattr(resource, "setrlimit", lambda which, pair: found.append(pair[0]))
    return found


def test_the_limits_of_a_usual_host_are_no_error() -> None:
    check()


@pytest.mark.parametrize(
    ("limit", "name", "allowed"),
    [
        (resource.RLIMIT_NOFILE, "ulimit -n", 24),
        (resource.RLIMIT_AS, "ulimit -v", 2**29),
        (resource.RLIMIT_FSIZE, "ulimit -f", 1024),
    ],
)
def test_a_limit_that_is_too_small_is_named(
    monkeypatch: pytest.MonkeyPatch, limit: int, name: str, allowed: int
) -> None:
    allow(monkeypatch, limit, allowed)
    with pytest.raises(RecipeError, match="and this limit allows") as told:
        check()
    assert isinstance(told.value, PlacedError)
    assert told.value.place == name
    assert f"{name} unlimited" in told.value.instead


def test_files_are_allowed_up_to_the_hard_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to = allow(monkeypatch, resource.RLIMIT_NOFILE, 24, 4096)
    check()
    (raised,) = set_to
    assert 24 < raised <= 4096


def test_a_place_without_semaphores_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadOnly:
        def Lock(self) -> None:
            raise OSError(30, "Read-only file system")

    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: ReadOnly())
    with pytest.raises(RecipeError, match="no semaphore can be made there: Read-only file system"):
        check()


@pytest.mark.parametrize(
    ("limit", "allowed"), [(resource.RLIMIT_AS, 2**26), (resource.RLIMIT_FSIZE, 2**25)]
)
def test_arenas_fit_the_limits(monkeypatch: pytest.MonkeyPatch, limit: int, allowed: int) -> None:
    taken = address_space() if limit == resource.RLIMIT_AS else 0
    allow(monkeypatch, limit, taken + allowed)
    arena = OwnArena(RANKS)
    assert 2**20 < os.fstat(arena.descriptor).st_size <= 2**25
    arena.close()


def test_open_files_are_counted() -> None:
    before = limits._count_open_files()
    with open(os.devnull):
        assert limits._count_open_files() == before + 1


def test_a_folder_that_takes_no_file_is_named_by_its_limit() -> None:
    """Hydra writes there before the recipe is known to the launcher."""
    refused = from_hydra(OSError(errno.EFBIG, "File too large"), schema())
    assert isinstance(refused, PlacedError) and refused.place == "the run's folder"
    assert "ulimit -f" in refused.instead
