"""Planted faults: numbers that leave their range are noticed in their step, and named; weights stay
those of before it.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from flowrun.engine.errors import RunError
from flowrun.engine.runtime.drivers.virtual import VirtualCluster
from flowrun.engine.runtime.rank.rank import Results
from flowrun.launcher.job.recipe_strategy import strategy_of
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run

Plant = Callable[[Tensor], object]
OnStep = Callable[[int, Results], None]
BAD = 40  # the sample that is planted
SAMPLES, BATCH, STEPS = 64, 8, 8


class Samples:
    """Small regression; sample BAD has `plant` in place of its first number."""

    def __init__(self, plant: float = 0.5) -> None:
        self.plant = plant

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.rand(6, generator=torch.Generator().manual_seed(index)) + 0.5
        if index == BAD:
            x[0] = self.plant
        return {"x": x, "y": x[:2].clone().clamp(0, 1)}


class Net(nn.Module):
    """Two layers, with one of FAULTS between them."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(6, 8), nn.Linear(8, 2)
        self.between = Between(fault)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.between(self.hidden(x).tanh(), x))


class Between(nn.Module):
    """Adds what is 0, or not finite where the first number of a sample is 0 (or 1e30)."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        first = x[:, :1]
        if self.fault == "log":
            return h + 0 * torch.log(first * h.exp())
        if self.fault == "mask":  # what is masked is infinite by intention
            shares = h.masked_fill(torch.arange(8) < 3, -math.inf).softmax(-1)
            return h + 0 * shares * torch.log(first * h.exp())
        if self.fault == "divide":
            return h + 0 * (h / first)
        if self.fault == "sqrt":
            return h + 1e-3 * torch.sqrt(first * h * h)
        if self.fault == "overflow":
            return h + 0 * (h * first).exp()
        if self.fault == "always":
            return h + 0 * (h * h + 1000).exp()
        return h


class StagedNet(nn.Module):
    """Net, and behind it a scale whose own gradient alone is infinite where the first number of a
    sample is 1e30.
    """

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.body, self.tail = Net(fault), Tail()

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.body(x), x)


class Tail(nn.Module):
    """Adds 1e10 for a first number of 1e30; the scale's gradient is about 1e50 then."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1e-30))

    def forward(self, output: Tensor, x: Tensor) -> Tensor:
        return output + 1e10 * (self.scale * (x[:, :1] - 2).relu())


class FrozenHeadNet(nn.Module):
    """StagedNet, and behind it a scale that is not trained."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.body, self.tail, self.head = Net(fault), Tail(), FrozenHead()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tail(self.body(x), x))


class FrozenHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, output: Tensor) -> Tensor:
        return output * self.one


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, batch["y"])


def nan_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """NaN where the first number of a sample is negative."""
    return loss(output, batch) * (1 + 0 * torch.log(batch["x"][:, :1]).mean())


RECIPE = """
defaults: [/optim: sgd, /launch: virtual]
model: {_target_: %(here)s.%(net)s, fault: "%(fault)s"}
task: {inputs: {x: x}, loss: {_target_: %(here)s.%(loss)s}}
data: {_target_: %(here)s.Samples, plant: %(plant)s}
placement: {axes: {data: 2}, stages: 1}
eval: {fraction: 0.0, batches: 0}
optim: {lr: %(lr)s, momentum: 0.0}
train: {batch_size: 8, micro_batches: 2, steps: 8, save_every: 2}
engine: {cache: false, check_capture: false}
"""


def recipe_of(folder: Path, *overrides: str, **changed: Any) -> Any:
    keys = {
        "here": __name__,
        "net": "Net",
        "fault": "",
        "loss": "loss",
        "plant": "0.5",
        "lr": "0.1",
    } | changed
    file = folder / "mine.yaml"
    file.write_text(RECIPE % keys)
    return load([f"recipe={file}", *overrides])


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "NaN in data": ({"plant": ".nan"}, r"not finite: sample 40 \(field x\)"),
    "Inf in data": ({"plant": ".inf"}, r"not finite: sample 40 \(field x\)"),
    "log of a negative": (
        {"plant": "-1.0", "fault": "log"},
        r"makes nan of finite numbers: aten.log.default of module between \(test_nonfinite.py:6",
    ),
    "log of a negative, behind a mask": (
        {"plant": "-1.0", "fault": "mask"},
        r"makes nan of finite numbers: aten.log.default of module between",
    ),
    "division by zero": (
        {"plant": "0.0", "fault": "divide"},
        r"makes inf of finite numbers: aten.div.Tensor of module between",
    ),
    "overflow": (
        {"plant": "1e30", "fault": "overflow"},
        r"makes inf of finite numbers: aten.exp.default of module between",
    ),
    "gradient of sqrt at 0": (
        {"plant": "0.0", "fault": "sqrt"},
        r"finite numbers: aten.\S+ of module between \S+, backward, micro-batch",
    ),
    "loss of its own": (
        {"plant": "-1.0", "loss": "nan_loss"},
        r"makes nan of finite numbers: aten.log.default of module loss",
    ),
    "rate that explodes": ({"lr": "1e30"}, r"the first op that makes \S+ of finite numbers"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_ends_its_step_and_is_named(name: str, tmp_path: Path) -> None:
    changed, said = FAULTS[name]
    recipe = recipe_of(tmp_path, **changed)
    with pytest.raises(RunError, match=said) as caught:
        run(recipe, tmp_path / "run")
    lines = lines_of(tmp_path / "run")
    assert caught.value.where.startswith(f"step {lines[-1]['step']}")
    assert lines[-1]["grad_norm"] is None
    assert all(math.isfinite(line["grad_norm"]) for line in lines[:-1])


STAGES = ("placement.axes.data=1", "placement.stages=[{modules:[body]},{modules:[tail]}]")
LATE_FAULT = "last stage, one weight's gradient"  # earlier stages have updated by then
STAGED_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "first stage, forward": (
        {"plant": "0.0", "fault": "divide"},
        r"makes inf of finite numbers: aten.div.Tensor of module body.between \S+, forward",
    ),
    "first stage, backward": (
        {"plant": "0.0", "fault": "sqrt"},
        r"makes inf of finite numbers: aten.div.Tensor of module body.between \S+, backward",
    ),
    "loss": FAULTS["loss of its own"],
    LATE_FAULT: (
        {"plant": "1e30"},
        r"makes inf of finite numbers: aten.mul.Tensor of module tail \S+, weight_grad",
    ),
}


@pytest.mark.parametrize(
    ("name", "launch"),
    [
        *((name, "virtual") for name in STAGED_FAULTS),
        pytest.param(LATE_FAULT, "local", marks=pytest.mark.processes),
    ],
)
def test_a_fault_in_a_stage_ends_its_step_and_is_named(
    name: str, launch: str, tmp_path: Path
) -> None:
    changed, said = STAGED_FAULTS[name]
    recipe = recipe_of(tmp_path, *STAGES, f"launch={launch}", net="StagedNet", **changed)
    with pytest.raises(RunError, match=said) as caught:
        run(recipe, tmp_path / "run")
    bad = next(line for line in lines_of(tmp_path / "run") if line["grad_norm"] is None)
    assert caught.value.where.startswith(f"step {bad['step']}")
    saved = {file.name for file in (tmp_path / "run" / "checkpoints").iterdir()}
    assert saved == {f"step_{step:08}" for step in range(2, bad["step"] + 1, 2)}
    assert not (tmp_path / "run" / "weights.safetensors").exists()


@pytest.mark.processes
def test_no_restart_begins_behind_a_bad_step(tmp_path: Path) -> None:
    """The rank that reports trains nothing, so that its snapshots hold no step back."""
    stages = "placement.stages=[{modules:[body]},{modules:[tail]},{modules:[head]}]"
    keys = ("placement.axes.data=1", stages, "launch=local", "launch.restarts=2")
    recipe = recipe_of(tmp_path, *keys, net="FrozenHeadNet", plant="1e30")
    with pytest.raises(RunError, match="of module tail") as caught:
        run(recipe, tmp_path / "run")
    assert caught.value.where.startswith("step 5")
    assert not (tmp_path / "run" / "checkpoints" / "step_00000006").exists()


@pytest.mark.parametrize(
    ("keys", "alike"),
    [
        ((), False),
        (("train.on_nonfinite=rollback",), False),
        (("train.on_nonfinite=skip",), True),
        (("launch.restarts=1",), True),  # its snapshots could hold half a step
    ],
)
def test_stages_wait_for_later_ones_where_what_they_hold_is_used(
    keys: tuple[str, ...], alike: bool, tmp_path: Path
) -> None:
    strategy = strategy_of(recipe_of(tmp_path, *STAGES, "launch=local", *keys, net="StagedNet"))
    assert strategy.skips_nonfinite and strategy.skips_alike == alike


def plant_in_weights(monkeypatch: pytest.MonkeyPatch, step: int, change: Plant) -> None:
    """Let `change` alter a weight of rank 1 after a step."""
    run_whole = VirtualCluster.run

    def run_planted(
        self: VirtualCluster, steps: int, on_step: OnStep | None = None, *given: Any, **named: Any
    ) -> list[Results]:
        def then(done: int, results: Results) -> None:
            if done == step:
                change(self.ranks[1].variables["hidden.weight"].view(-1)[3:4])
            if on_step:
                on_step(done, results)

        return run_whole(self, steps, then, *given, **named)

    monkeypatch.setattr(VirtualCluster, "run", run_planted)


def test_a_rank_whose_weight_is_nan_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_in_weights(monkeypatch, 2, lambda weight: weight.fill_(math.nan))
    with pytest.raises(RunError, match=r"not finite: hidden.weight \(rank 1\)") as caught:
        run(recipe_of(tmp_path), tmp_path / "run")
    assert caught.value.where.startswith("step 3")


@pytest.mark.parametrize(("ranks", "named"), [(2, "ranks 0, 1"), (4, "rank 1")])
def test_a_rank_with_a_flipped_bit_in_a_weight_is_named(
    ranks: int, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_in_weights(monkeypatch, 3, lambda weight: weight.view(torch.int32).bitwise_xor_(1))
    recipe = recipe_of(tmp_path, f"placement.axes.data={ranks}", "engine.verify_every=3")
    with pytest.raises(RunError, match=r"hidden.weight") as caught:
        run(recipe, tmp_path / "run")
    assert caught.value.where == f"{named}, step 5"


def test_ranks_that_compute_right_hold_the_same_bytes(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "optim=adamw", "zero.stage=2", "engine.verify_every=1")
    run(recipe, tmp_path / "run")


@pytest.mark.parametrize(
    ("layout", "net", "plant"),
    [((), "Net", ".nan"), (STAGES, "StagedNet", "1e30")],
    ids=["data", "a gradient of the last stage alone"],
)
def test_an_update_that_is_skipped_changes_nothing(
    layout: tuple[str, ...], net: str, plant: str, tmp_path: Path
) -> None:
    runs = {"5": (), "6": ("train.on_nonfinite=skip",)}
    for steps, changed in runs.items():
        keys = (*layout, f"train.steps={steps}", *changed)
        recipe = recipe_of(tmp_path, *keys, net=net, plant=plant)
        report = run(recipe, tmp_path / steps)
    five, six = (load_file(tmp_path / k / "weights.safetensors") for k in runs)
    assert report.skipped_updates == 1
    assert lines_of(tmp_path / "6")[-1]["skipped_updates"] == 1
    assert all(torch.equal(six[name], value) for name, value in five.items())


def test_a_rollback_leaves_out_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    """Step 5 is bad, and step 4 may have led there; with or without a halt between."""
    back = ("train.on_nonfinite=rollback", "train.resume=auto")
    run(recipe_of(tmp_path, "train.steps=4", plant=".inf"), tmp_path / "four")
    for steps in ("6", "8"):
        recipe = recipe_of(tmp_path, f"train.steps={steps}", *back, plant=".inf")
        report = run(recipe, tmp_path / steps)
        assert report.skipped_updates == 2
        line = json.loads((tmp_path / steps / "restarts.jsonl").read_text())
        assert (line["first"], line["left_out"], line["source"]) == (6, [4, 5], "checkpoint")
    run(recipe_of(tmp_path, *back, plant=".inf"), tmp_path / "6")
    four, six, eight = (load_file(tmp_path / k / "weights.safetensors") for k in ("four", "6", "8"))
    assert not all(torch.equal(eight[name], value) for name, value in four.items())
    assert all(torch.equal(six[name], value) for name, value in eight.items())
    assert [line["step"] for line in lines_of(tmp_path / "6")] == [*range(8)]


def test_weights_that_are_nan_are_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_in_weights(monkeypatch, 3, lambda weight: weight.fill_(math.nan))
    report = run(recipe_of(tmp_path, "train.on_nonfinite=rollback"), tmp_path / "run")
    assert report.skipped_updates == 2  # seen before the checkpoint of step 4
    weights = load_file(tmp_path / "run" / "weights.safetensors")
    assert all(value.isfinite().all() for value in weights.values())


def test_rollbacks_that_do_not_help_end_the_run(tmp_path: Path) -> None:
    changed = ("train.on_nonfinite=rollback", "train.steps=30", "train.save_every=50")
    recipe = recipe_of(tmp_path, *changed, fault="always")
    with pytest.raises(RunError, match=r"makes inf of finite numbers: aten.exp.default") as caught:
        run(recipe, tmp_path / "run")
    assert caught.value.where.startswith("step 20")


def test_what_is_ignored_enters_the_weights(tmp_path: Path) -> None:
    run(recipe_of(tmp_path, "train.on_nonfinite=ignore", plant=".nan"), tmp_path / "run")
    weights = load_file(tmp_path / "run" / "weights.safetensors")
    assert not all(value.isfinite().all() for value in weights.values())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_overflow_in_half_precision_ends_the_run(dtype: str, tmp_path: Path) -> None:
    """Loss scaling leaves out updates, as torch's does; but not for ever."""
    changed = ("train.steps=30", f"precision.dtype={dtype}")
    recipe = recipe_of(tmp_path, *changed, fault="always")
    with pytest.raises(RunError, match=r"makes inf of finite numbers: aten.exp.default") as caught:
        run(recipe, tmp_path / "run")
    assert caught.value.where.startswith("step 0" if dtype == "bf16" else "step 19")
