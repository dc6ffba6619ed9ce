"""Plans kept by earlier runs, the user's or another test's, are out of reach; properties are tried
with the same examples each time, however long one takes; every graph and plan is verified.
"""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from flowrun.engine import pipeline
from flowrun.engine.runtime.process.cpu_share import PROBE
from support.checks.thorough import of_thorough
from support.runs.command import kill_running

settings.register_profile(
    "flowrun", deadline=None, derandomize=True, database=None, max_examples=40
)
settings.register_profile("thorough", settings.get_profile("flowrun"), max_examples=200)
pipeline.always_verify = True  # after every pass
# A shell that runs the tests behind it has Ctrl-C ignored, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Programs that tests start import hundreds of files of the tree: they are compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also run tests marked thorough")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that --thorough alone runs, unless they are named."""
    if config.getoption("--thorough") or any("::" in argument for argument in config.args):
        return
    if thorough := of_thorough(items):
        config.hook.pytest_deselected(items=list(thorough))
        items[:] = [item for item in items if item not in thorough]


def pytest_configure(config: pytest.Config) -> None:
    """Begin with the folder whose tests start processes, and end with files of quick tests: workers
    then end together.  Without this xdist sorts files by their number of tests.
    """
    config.option.loadscopereorder = False
    settings.load_profile("thorough" if config.getoption("--thorough") else "flowrun")


def pytest_collection_finish() -> None:
    """Look for garbage among what tests make alone, not among a million objects of torch's modules:
    else that is a fifth of the time of a plan.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Free the tensors of a file of tests that only cycles of objects hold: they are gigabytes.

    What is left are modules that the file has imported, and what they keep: no collection looks at
    it again.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def no_run_is_left() -> Iterator[None]:
    """A run that a test which failed has not waited for is killed."""
    yield
    kill_running()


@pytest.fixture(autouse=True, scope="module")
def no_modules_of_other_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Modules that tests write have the same names in each file of tests, and a recipe takes the
    working directory out of the path, from which processes that tests spawn import them.
    """
    path = [*sys.path]
    yield
    sys.path[:] = path
    written = str(tmp_path_factory.getbasetemp())
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None)).startswith(written):
            del sys.modules[name]


@pytest.fixture(autouse=True, scope="session")
def no_plans_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For fixtures that serve many tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv(PROBE, "0")  # what is foreseen is the same on every machine
        yield


@pytest.fixture(autouse=True)
def no_plans_of_other_tests(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The cache's folder of a test."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache / "flowrun"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """One thread computes: on tensors this small, threads that wait for each other take 30 times
    as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
