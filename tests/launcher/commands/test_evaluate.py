import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.evaluate import evaluate
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from support.runs.saved_run import TINY, save_run
from support.runs.workplace import End

LOSS = """\
import torch


class Scaled(torch.nn.Module):
    def __init__(self, target):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, output, batch):
        return output.mean() * self.scale
"""

TALKS = """\
import torch


class Talks:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 6) % 11
        targets = torch.where(torch.arange(6) < index % 5, -100, tokens % 4)
        return {"images": tokens[:, None] / 11.0, "targets": targets}
"""
UNLIKE = """\
defaults: [/model: mlp, /optim: sgd, /launch: virtual]
model: {inputs: 1, hidden: 4, outputs: 4}
data: {_target_: talks.Talks}
task:
  inputs: {x_BI: images}
  loss: {_target_: flowrun.models.losses.cross_entropy, target: targets}
  metrics: {accuracy: {_target_: flowrun.models.metrics.accuracy, target: targets}}
placement: {axes: {data: 1}}
engine: {check_capture: false, cache: false}
optim: {lr: 1.0}
eval: {fraction: 0.25, batches: 2}
train: {batch_size: 8, micro_batches: 4, steps: 2}
"""
MIRRORED = ["view=mirrored", "placement.axes.data=2", "train.micro_batches=2"]


@pytest.mark.parametrize(
    "changes",
    [[], ["task.metrics={}"], ["train.loss_mean=micro_batch"], MIRRORED, ["eval.fraction=0.05"]],
    ids=["step", "loss alone", "micro_batch", "mirrored", "few samples"],
)
def test_the_numbers_are_those_of_the_run(workplace: Path, changes: list[str]) -> None:
    (workplace / "talks.py").write_text(TALKS)
    (workplace / "unlike.yaml").write_text(UNLIKE)
    run(load(["recipe=unlike.yaml", *changes]), workplace / "run")
    own = json.loads((workplace / "run" / "report.json").read_text())["validation"]
    found = evaluate(workplace / "run")
    assert found.results == pytest.approx({name: own[name] for name in found.results}, rel=1e-6)
    few = "eval.fraction=0.05" in changes
    assert found.samples == (3 if few else 16)
    expected = ["3 samples are held out and an evaluation reads a batch of 8"] if few else []
    assert [note.partition(":")[0] for note in found.notes] == expected
    assert ("3 samples are held out" in (workplace / "run" / "plan.txt").read_text()) == few


def test_the_command_prints_a_line(workplace: Path, end: End) -> None:
    save_run(workplace / "run")
    status, out, err = end("eval", "run", "eval.batches=2")
    assert (status, err) == (0, "")
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
