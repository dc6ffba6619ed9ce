"""A probe of this machine scales what is foreseen, and not the plan."""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.runtime.calibration.quick_probe import Scales, file_of, keep_scales, read_scales
from flowrun.engine.runtime.process.cpu_share import PROBE
from flowrun.launcher.job import forked, job_plans
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.job_plans import probing
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.hardware_keys import load_shipped
from flowrun.launcher.report.notes import notes
from support.runs.workplace import working_in

SPEEDS = [each.name for each in fields(Scales) if each.name != "date"]
SLOW = Scales(date="2026-01-31", **dict.fromkeys(SPEEDS, 0.5))
GIVEN = ["recipe=small", "engine.cache=false"]


@pytest.fixture(autouse=True)
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(PROBE, "1")
    for module in (forked, job_plans):
        monkeypatch.setattr(module, "may_fork", lambda: True)
    with working_in(tmp_path):
        yield


def test_a_machine_half_as_fast_takes_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timeit.timeit", lambda *_, **__: 0.0)  # items are ready
    assert "hardware=cpu is of another machine" in str(Job(load(GIVEN), values=False).notes)
    keep_scales(load_shipped("cpu"), SLOW)
    as_shipped, here = (Job(load([*GIVEN, *more]), values=False) for more in ([OTHER], []))
    seconds, shipped_s = here.training.rehearsal.step_s, as_shipped.training.rehearsal.step_s
    assert seconds == pytest.approx(2 * shipped_s, rel=1e-4)
    assert without_seconds(here) == without_seconds(as_shipped)
    [note] = [note for note in here.notes if "probe" in note]
    assert "scaled by a probe of this machine on 2026-01-31: products x0.5" in note
    assert not any("hardware" in note for note in as_shipped.notes)


SLOW_ITEMS = """
import time
from flowrun.launcher.data.digits import Digits
class Slow(list):
    def __init__(self):
        super().__init__(Digits()[k] for k in range(99))
    def __getitem__(self, index):
        time.sleep(0.05)
        return super().__getitem__(index)
"""


def test_items_whose_time_is_not_stated_are_timed(tmp_path: Path) -> None:
    keep_scales(load_shipped("cpu"), SLOW)
    (tmp_path / "slow_items.py").write_text(SLOW_ITEMS)
    keys = ["recipe=mlp_data_parallel", "train.batch_size=8", "data={_target_: slow_items.Slow}"]
    found = notes(Job(load([*keys, "engine.cache=false"]), values=False))
    assert "samples bound the step: 20" in str(found)  # ms of 4 items a rank


OTHER = "hardware.op_s=4.0001e-6"  # a profile of the user's own


def without_seconds(job: Job) -> object:
    plan = job.training.plan
    zeros = {"seconds": 0.0, "taken": 0.0, "crowding_s": 0.0}
    return plan.order, [replace(actor, **zeros) for actor in plan.actors]  # type: ignore[arg-type]


@pytest.mark.processes
def test_the_first_run_probes_and_others_take_what_it_found() -> None:
    shipped = load_shipped("cpu")
    recipe = load(GIVEN)
    with probing(recipe) as probed:
        found = probed()
    assert found == read_scales(shipped)
    assert found and all(getattr(found, speed) > 0 for speed in SPEEDS)
    with probing(recipe) as probed:
        assert probed() == found


HOSTS = ["launch.nnodes=2", "launch.rdzv_endpoint=host:1"]


@pytest.mark.parametrize("change", [["launch=virtual"], ["hardware=zen5"], [OTHER], HOSTS])
def test_what_runs_elsewhere_is_foreseen_as_it_is_described(change: list[str]) -> None:
    keep_scales(load_shipped("cpu"), SLOW)
    with probing(load([*GIVEN, *change])) as probed:
        assert probed() is None


def test_the_switch_leaves_the_profile_as_it_is_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_scales(load_shipped("cpu"), SLOW)
    monkeypatch.setenv(PROBE, "0")
    with probing(load(GIVEN)) as probed:
        assert probed() is None


def test_a_probe_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Scales:
        raise RuntimeError("no sockets here")

    job = Job(load(GIVEN), values=False, probed=fail)
    assert job.training.rehearsal.step_s > 0
    assert "this machine was not probed: RuntimeError: no sockets here" in job.notes


def test_another_torch_or_processor_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = file_of(Hardware())
    assert file_of(Hardware(op_s=1.0)) != before
    monkeypatch.setattr("os.cpu_count", lambda: 77)
    cores = file_of(Hardware())
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert len({before, cores, file_of(Hardware())}) == 3


def test_a_measurement_that_is_broken_is_none() -> None:
    assert keep_scales(Hardware(), SLOW) == read_scales(Hardware()) == SLOW
    file_of(Hardware()).write_bytes(b"broken")
    assert read_scales(Hardware()) is None
