"""`flowrun eval`: what it prints, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrun.engine.errors import RecipeError
from flowrun.launcher.cli import main
from flowrun.launcher.commands.evaluate import evaluate
from support.saved_run import TINY, save_run

LOSS = """\
import torch


class Scaled(torch.nn.Module):
    def __init__(self, target):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, output, batch):
        return output.mean() * self.scale
"""


def test_the_command_prints_a_line(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(workplace / "run")
    with pytest.raises(SystemExit) as ended:
        main(["eval", "run", "eval.batches=2"])
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    assert out.startswith("step 3: loss ") and out.endswith("(64 held-out samples)\n")
    assert "accuracy 0.0" in out


def test_averages_are_read_where_evaluation_reads_them(workplace: Path) -> None:
    run = save_run(workplace / "run", *TINY, "optim.ema=0.9")
    state = load_file(run / "weights.safetensors")
    zeros = {name: torch.zeros_like(value) for name, value in state.items()}
    save_file(zeros, run / "ema.safetensors", {"format": "pt", "steps": "3"})
    assert evaluate(run).results["loss"] == pytest.approx(5.5452, abs=1e-3)  # log 256
    assert evaluate(run, ["optim.ema_eval=false"]).results["loss"] != pytest.approx(
        5.5452, abs=1e-3
    )


def test_a_run_of_epochs_is_evaluated(workplace: Path) -> None:
    run = save_run(workplace / "run", *TINY, "train.epochs=2")
    assert evaluate(run, ["eval.batches=1"]).samples == 32


def test_a_loss_of_halves_is_that_of_the_autocast(workplace: Path) -> None:
    run = save_run(workplace / "run")
    losses = [
        evaluate(run, [f"precision.dtype={dtype}"]).results["loss"] for dtype in ("fp32", "bf16")
    ]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["eval.batches=0"], "eval.batches\n  no samples are held out"),
        (["eval.fraction=0"], "eval.fraction\n  no samples are held out"),
        (["task.loss={_target_: scaled.Scaled}"], "Scaled has weights of its own"),
        (["model.width=32"], "has not the weights of step 3"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    workplace: Path, overrides: list[str], problem: str
) -> None:
    (workplace / "scaled.py").write_text(LOSS)
    save_run(workplace / "run")
    with pytest.raises(RecipeError, match=problem):
        evaluate(workplace / "run", overrides)
