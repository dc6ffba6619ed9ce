"""ReduceLROnPlateau: rates that the run's own evaluations change, in any layout, and resumed."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run, verify
from flowrun.launcher.store.checkpoint import find_step
from flowrun.launcher.store.weight_files import load as load_weights

LR, STEPS, EVERY = 0.4, 12, 2
GIVEN = {"factor": 0.5, "patience": 0, "threshold": 0.2}
PLATEAU = {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "metric": "loss", **GIVEN}
RECIPE = ("recipe=mlp_hybrid", f"train.steps={STEPS}", f"eval.every={EVERY}", "log=[]")
LAYOUTS = {
    "one rank": ["placement.axes={data: 1}", "sbp={}"],
    "data 2, stages 2": [
        "placement={axes: {data: 2}, stages: 2}",
        "sbp={}",
        "train.micro_batches=2",
    ],
}


def trained(
    folder: Path, *keys: str, schedule: dict[str, Any] = PLATEAU, step: int = 0
) -> tuple[list[float], list[float]]:
    """The rate of each step, and the loss of each evaluation.  step: of a checkpoint to resume."""
    start = find_step(folder, step) if step else None
    optim = f"optim={{name: sgd, lr: {LR}, schedule: {schedule}}}".replace("'", "")
    run(load([*RECIPE, "launch=virtual", optim, *keys]), folder, None, start)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["validation"]["loss"] for line in lines if "validation" in line]
    return [line["lr"] for line in lines if "lr" in line], losses


def of_torch(losses: Sequence[float]) -> list[float]:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    scheduler, found = ReduceLROnPlateau(optimizer, **GIVEN), [LR] * EVERY
    for loss in losses[:-1]:
        scheduler.step(loss)
        found += [optimizer.param_groups[0]["lr"]] * EVERY
    return found


def factor_of(step: int, *, factors: list[float]) -> float:
    return factors[step]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_run_has_the_rates_of_torch_and_what_they_train(
    layout: list[str], tmp_path: Path
) -> None:
    rates, losses = trained(tmp_path / "out", *layout)
    assert rates == of_torch(losses) and len({*rates}) > 2
    factors = [rate / LR for rate in rates]
    known = {"_target_": f"{__name__}.factor_of", "factors": factors}
    trained(tmp_path / "known", *layout, schedule=known)
    one, other = (load_weights(tmp_path / name) for name in ("out", "known"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_resumed_run_goes_on_with_the_same_rates_in_another_layout(tmp_path: Path) -> None:
    whole, _ = trained(tmp_path / "whole", *LAYOUTS["one rank"])
    trained(tmp_path / "out", *LAYOUTS["one rank"], "train.save_every=5", "train.keep=0")
    for step in (10, 5):  # between evaluations, and with one
        layout = LAYOUTS["data 2, stages 2"]
        assert trained(tmp_path / "out", *layout, step=step)[0] == whole
    one, other = (load_weights(tmp_path / name) for name in ("whole", "out"))
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


@pytest.mark.processes
def test_all_processes_know_what_one_of_them_has_evaluated(tmp_path: Path) -> None:
    virtual, _ = trained(tmp_path / "virtual", *LAYOUTS["data 2, stages 2"])
    found, losses = trained(tmp_path / "out", *LAYOUTS["data 2, stages 2"], "launch=local")
    assert found == virtual == of_torch(losses)
    one, other = (load_weights(tmp_path / name) for name in ("virtual", "out"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.thorough
def test_verify_leaves_the_schedule_out_and_says_so() -> None:
    keys = [*RECIPE, "train.steps=1", "+optim.schedule={name: ReduceLROnPlateau}"]
    found = verify(load([*keys, "placement.axes={data: 1}", "sbp={}"]))
    assert "without a schedule: it would wait" in found.caption
    assert all(row.ok for row in found.rows)
