import dataclasses
import functools
import importlib
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import pytest
import torch

from flowrun.engine import compile as compiler
from flowrun.engine.compile import Rehearsed
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.ir.graph import LogicalGraph, LogicalTensor
from flowrun.engine.ir.own_files import Unusable, read_own
from flowrun.engine.ir.placement import Placement
from flowrun.engine.strategy import ParameterGroup, Strategy
from flowrun.launcher.job import job_plans, plan_cache
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.plan_cache import PlanCache
from flowrun.launcher.model import user_modules
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from flowrun.launcher.store import weight_files as weights
from support.runs.command import losses


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled, not taken from the cache; here, also where torch is built for GPUs."""
    monkeypatch.setattr(job_plans, "forks_autograd", lambda: False)
    made: list[str] = []
    for name in ("plan_training", "plan_evaluation"):
        whole = getattr(compiler, name)

        def counted(*arguments: object, whole=whole, name=name) -> object:  # type: ignore[no-untyped-def]
            made.append(name)
            return whole(*arguments)

        monkeypatch.setattr(compiler, name, counted)
    return made


def job(*overrides: str) -> Job:
    found = Job(load(["recipe=small", "launch=virtual", *overrides]))
    assert found.training and found.plans.compiled[1]
    return found


def test_a_schedule_of_ones_own_is_known_by_what_it_says(place: Path, compiled: list[str]) -> None:
    own = "placement.schedule={_target_: flowrun.engine.actors.schedules.Slots, number: %d}"
    staged = ("placement.stages=2", "train.micro_batches=2")
    first, second = job(*staged, own % 2), job(*staged, own % 2)
    assert compiled == ["plan_training", "plan_evaluation"]
    assert second.plans.cache.notes == []
    by_number = job(*staged, "placement.in_flight=2").plans.compiled[0].plan
    assert first.plans.compiled[0].plan.registers == by_number.registers
    before = len(compiled)
    job(*staged, own % 1)
    assert "plan_training" in compiled[before:]


def test_a_second_job_takes_both_plans_as_they_were(place: Path, compiled: list[str]) -> None:
    first, second = job(), job()
    assert compiled == ["plan_training", "plan_evaluation"]
    assert first.plans.compiled == second.plans.compiled
    assert second.plans.cache.notes == []


def test_a_run_with_a_kept_plan_is_the_same_to_the_last_bit(place: Path) -> None:
    for name in ("made", "kept"):
        run(load(["recipe=small", "launch=virtual"]), place / name)
    assert losses(place / "made") == losses(place / "kept")
    made, kept = (weights.load(place / name) for name in ("made", "kept"))
    assert made.keys() == kept.keys()
    assert all(torch.equal(made[name], kept[name]) for name in made)


def test_what_makes_another_plan_is_compiled(place: Path, compiled: list[str]) -> None:
    job()
    for override, again in {
        "train.steps=9": False,
        "train.seed=1": False,  # nothing in the net is random
        "engine.trace=true": False,
        "eval.batches=1": False,
        "model.hidden=32": True,
        "train.batch_size=16": True,
        "placement.axes.tensor=4": True,
        "optim.lr=0.5": True,
        "engine.register_slots=3": True,
        "hardware.fp32.flops=1e9": True,
        "engine.cache=false": True,
    }.items():
        compiled.clear()
        job(override)
        assert (override, bool(compiled)) == (override, again)


OWN_NET = """\
import json, os
import torch

SCALE = float(os.environ.get("SCALE", "1"))
with open(os.path.join(os.path.dirname(__file__), "setting.json")) as opened:
    SETTING = json.load(opened)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, images):
        return getattr(torch, SETTING["activation"])(self.layer(images)) * SCALE
"""
OWN_RECIPE = """\
defaults: [/optim: sgd, /launch: virtual]
model: {_target_: own_net.Net}
task:
  inputs: {images: images}
  loss: {_target_: flowrun.models.losses.cross_entropy, target: labels}
data: {_target_: samples.Samples}
eval: {fraction: 0.25, batches: 2}
train: {batch_size: 8, micro_batches: 2, steps: 4}
"""


def project(folder: Path, activation: str = "relu") -> Path:
    """A folder with a net of its own, as a user copies them, one an experiment."""
    folder.mkdir(exist_ok=True)
    (folder / "own_net.py").write_text(OWN_NET)
    (folder / "recipe.yaml").write_text(OWN_RECIPE)
    (folder / "setting.json").write_text(json.dumps({"activation": activation}))
    return folder


def scale(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another number in the environment, which the module reads when it is imported."""
    monkeypatch.setenv("SCALE", "0.5")
    return folder


def setting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another word in a file, which the module reads when it is imported."""
    return project(folder, activation="tanh")


def copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project with another forward, by the same names."""
    other = project(folder / "copy")
    (other / "own_net.py").write_text(OWN_NET.replace("* SCALE", "+ SCALE"))
    return other


def as_a_process(folder: Path, *overrides: str) -> Job:
    """A job of the project in a folder, its module imported anew."""
    sys.modules.pop("own_net", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(user_modules, "FOLDERS", [])  # earlier working directories
        found = Job(load([f"recipe={folder / 'recipe.yaml'}", *overrides]))
        assert found.training and found.plans.compiled[1]
    sys.modules.pop("own_net", None)
    return found


@pytest.mark.parametrize("change", [scale, setting, copied])
def test_what_only_the_captured_graph_shows_makes_another_plan(
    place: Path,
    compiled: list[str],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path, pytest.MonkeyPatch], Path],
) -> None:
    first = as_a_process(project(place))
    compiled.clear()
    as_a_process(place)
    assert compiled == []
    folder = change(place, monkeypatch)
    second = as_a_process(folder)
    assert compiled == ["plan_training", "plan_evaluation"]
    assert second.training == as_a_process(folder, "engine.cache=false").training
    assert second.training != first.training


UPDATE = "def update(param, grad, *, lr):\n    return param - lr * grad * {}\n"


def test_an_optimizer_counts_by_what_it_does(
    place: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for factor in (1, 1, 2):
        (place / "own_update.py").write_text(UPDATE.format(factor))
        monkeypatch.delitem(sys.modules, "own_update", raising=False)
        importlib.invalidate_caches()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "dont_write_bytecode", True)
            job("optim.update={_target_: own_update.update}")
        made.append(len(compiled))
    assert made == [2, 2, 4]


@dataclass
class Maker:
    """Stands for the compiler.  made: how often it was asked."""

    made: int = 0

    def __call__(self) -> Rehearsed:
        self.made += 1
        return cast(Rehearsed, ["a plan", 1.0])

    def plan(self, *made_of: object) -> PlanCache:
        cache = PlanCache(True)
        assert cache.get("training", made_of, self) == ["a plan", 1.0]
        return cache


@pytest.fixture
def kept(no_plans_of_other_tests: Path) -> tuple[Maker, Path]:
    """A plan was made; its file."""
    maker = Maker()
    assert maker.plan().notes == []
    (file,) = no_plans_of_other_tests.iterdir()
    return maker, file


def test_the_engine_torch_and_what_a_plan_is_made_of_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    maker, file = Maker(), tmp_path / "passes" / "new.py"
    file.parent.mkdir()
    monkeypatch.setattr(plan_cache, "_ENGINE", tmp_path)
    made = []
    for content, torchs, value in [
        ("x = 1", "2.13", 1),
        ("x = 1", "2.13", 1),
        ("x = 2", "2.13", 1),
        ("x = 2", "2.14", 1),
        ("x = 2", "2.14", 1.0),
    ]:
        file.write_text(content)
        monkeypatch.setattr(torch, "__version__", torchs)
        plan_cache._made_by.cache_clear()
        maker.plan(value)
        made.append(maker.made)
    plan_cache._made_by.cache_clear()
    assert made == [1, 1, 2, 3, 4]


def test_every_flipped_bit_is_found(kept: tuple[Maker, Path]) -> None:
    maker, file = kept
    whole = file.read_bytes()
    for bit in range(8 * len(whole)):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        file.write_bytes(broken)
        with pytest.raises(Unusable, match="checksum"):
            read_own(file)
    file.write_bytes(whole)
    maker.plan()
    assert maker.made == 1


class Hostile:
    """Its pickle runs what it likes."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, ("hostile",)


def cut_to(left: int) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(file.read_bytes()[:left])


def link_elsewhere(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


SPOILED: Mapping[str, tuple[Callable[[Path], object], str]] = {
    **{f"{left} bytes": (cut_to(left), "is broken: its checksum") for left in (0, 10, 32, -1)},
    "planted": (lambda file: file.write_bytes(pickle.dumps(Hostile())), "is broken"),
    "open to others": (lambda file: file.chmod(0o666), "others may write to"),
    "a link": (link_elsewhere, "the stored plan was not used"),
}


@pytest.mark.parametrize(("spoil", "note"), list(SPOILED.values()), ids=list(SPOILED))
def test_a_file_that_is_not_whole_and_the_users_own_is_made_anew(
    kept: tuple[Maker, Path], spoil: Callable[[Path], object], note: str, tmp_path: Path
) -> None:
    maker, file = kept
    spoil(file)
    (found,) = maker.plan().notes
    assert found.startswith("the stored plan was not used: ") and note in found
    assert maker.made == 2 and maker.plan().notes == []
    assert not file.is_symlink() and file.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "hostile").exists()


def test_a_folder_that_is_not_the_users_own_is_not_used(
    kept: tuple[Maker, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, file = kept
    file.parent.chmod(0o777)
    assert maker.plan().notes == [f"no plan is kept: others may write to {file.parent} (mode 777)"]
    file.parent.chmod(0o755)
    assert maker.plan().notes == []
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert "belongs to another user" in maker.plan().notes[0]
    assert maker.made == 3


def test_a_folder_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "no plan is kept: NotADirectoryError" in Maker().plan().notes[0]


def types_in(kind: object, found: set[type]) -> set[type]:
    """The dataclasses that values of a type are made of."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind not in found:
        found.add(kind)
        for hint in get_type_hints(kind, localns={"OpTable": object}).values():
            types_in(hint, found)
    for part in get_args(kind):
        types_in(part, found)
    return found


def test_every_field_of_what_a_plan_is_made_of_prints() -> None:
    kinds = types_in(Strategy, types_in(LogicalGraph, set()))
    assert {LogicalTensor, Hardware, Placement, ParameterGroup} <= kinds
    for kind in kinds:
        hidden = [f.name for f in dataclasses.fields(kind) if f.init and not f.repr]
        assert not hidden, kind
        assert hasattr(kind.__repr__, "__wrapped__"), "its repr is a dataclass's own"


@pytest.mark.parametrize(
    "hides", [threading.Lock(), len, functools.partial(len), torch.zeros(2), Maker, lambda: 0]
)
def test_a_plan_of_what_prints_no_content_is_not_kept(hides: Any) -> None:
    maker = Maker()
    notes = [maker.plan((hides,)).notes for _ in range(2)]
    assert notes[0] == notes[1] != []
    assert maker.made == 2


def test_the_longest_unused_files_go(
    monkeypatch: pytest.MonkeyPatch, no_plans_of_other_tests: Path
) -> None:
    monkeypatch.setattr(plan_cache, "MOST_FILES", 2)
    maker = Maker()
    for k in range(4):
        maker.plan(k)
        for age, file in enumerate(sorted(no_plans_of_other_tests.iterdir())):
            os.utime(file, ns=(age + 1, age + 1))
        maker.plan(k)  # which is the last used
    assert len(list(no_plans_of_other_tests.iterdir())) == 2
    maker.plan(3)
    assert maker.made == 4
