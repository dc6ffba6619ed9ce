import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrun.engine.errors import RecipeError, RunError
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
# a metric by the interface of torchmetrics: it sees all samples at once
OWN = """\
import torch


def pairs(output, batch):
    return torch.cat([output.flatten(0, 1), batch["targets"].flatten()[:, None]], 1)


class Spread:
    def update(self, scores, targets):
        self.scores = scores[targets >= 0]

    def compute(self):
        return self.scores.quantile(0.9) - self.scores.median()


def spread(rows):
    metric = Spread()
    metric.update(rows[:, :-1], rows[:, -1])
    return metric.compute()


pairs.of_rows = spread


def flat(output, batch):
    return output.flatten()


flat.of_rows = spread


def broken(output, batch):
    return pairs(output, batch)


broken.of_rows = lambda rows: rows.middle()


def unlucky(output, batch):
    return pairs(output, batch)


unlucky.of_rows = lambda rows: int("two classes")
"""
ROWS = ["task.metrics.f1._target_=flowrun.models.metrics.f1", "task.metrics.own._target_=own.pairs"]
LAYOUTS = {
    "single": "",
    "data 2": "placement.axes.data=2",
    "data 3": "placement.axes.data=3 train.batch_size=12 train.micro_batches=2",
    "tensor 2": "placement.axes.tensor=2 sbp.hidden.weight.tensor=S0 sbp.output.weight.tensor=S0",
    "stages 2": "placement.stages=2",
    "ZeRO 3": "placement.axes.data=2 zero.stage=3 zero.min_size=1",
}


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_metric_of_all_samples_is_that_of_plain_torch(workplace: Path, layout: str) -> None:
    for name, text in {"talks.py": TALKS, "unlike.yaml": UNLIKE, "own.py": OWN}.items():
        (workplace / name).write_text(text)
    run(load(["recipe=unlike.yaml", *ROWS, *LAYOUTS[layout].split()]), workplace / "run")
    own = json.loads((workplace / "run" / "report.json").read_text())["validation"]
    found = evaluate(workplace / "run").results
    assert {*own} == {"loss", "accuracy", "f1", "own"} and 0 < own["f1"] < 1
    assert found == pytest.approx(own, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ([*MIRRORED, ROWS[0]], "f1 is made of the rows of all samples"),
        (["task.metrics.own._target_=own.flat"], r"instead of rows \(n, D\)"),
        (
            ["task.metrics.own._target_=own.broken"],
            r"of_rows, tried on \d+ rows .*: AttributeError",
        ),
        ([ROWS[0], "task.metrics.f1.target=no"], r"KeyError: 'no' .* A batch has "),
    ],
)
def test_a_metric_that_makes_no_number_is_refused(
    workplace: Path, changes: list[str], problem: str
) -> None:
    for name, text in {"talks.py": TALKS, "unlike.yaml": UNLIKE, "own.py": OWN}.items():
        (workplace / name).write_text(text)
    with pytest.raises(RecipeError, match=problem) as refused:
        run(load(["recipe=unlike.yaml", *changes]), workplace / "run")
    assert refused.value.where.startswith("task.metrics")


def test_rows_that_no_number_is_made_of_end_a_run_by_the_name_of_the_metric(
    workplace: Path,
) -> None:
    for name, text in {"talks.py": TALKS, "unlike.yaml": UNLIKE, "own.py": OWN}.items():
        (workplace / name).write_text(text)
    with pytest.raises(RunError, match="ValueError: invalid literal") as ended:
        run(
            load(["recipe=unlike.yaml", "task.metrics.own._target_=own.unlucky"]), workplace / "run"
        )
    assert ended.value.where == "task.metrics.own"


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
