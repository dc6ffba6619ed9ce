"""What a recipe says of the update, from the recipe to the run's folder, on the virtual cluster."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.sbp import S
from flowrun.engine.strategy import ParameterGroup
from flowrun.launcher.commands.plain_loop import plain_loop
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.optimizer import optimizer_of
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run

RECIPE = """
defaults: [/model: mlp, /data: digits, /optim: sgd, /launch: virtual]
placement: {axes: {data: 2}}
zero: {axis: data, stage: 1}
optim:
  schedule: {name: CosineAnnealingLR}
  warmup_steps: 2
  groups: {"*.bias": {weight_decay: 0, lr: 0.05}, "output.*": {momentum: 0.5}}
  clip_value: 0.01
  clip_norm: 0.05
task:
  loss: {label_smoothing: 0.1}
  metrics:
    perplexity: {_target_: flowrun.models.metrics.perplexity, target: labels}
eval: {fraction: 0.2, batches: 3}
train: {batch_size: 32, micro_batches: 2, steps: 6}
"""


def recipe_file(folder: Path, text: str = RECIPE) -> str:
    file = folder / "mine.yaml"
    file.write_text(text)
    return f"recipe={file}"


def test_schedule_groups_clipping_and_smoothing_train_as_plain_torch(tmp_path: Path) -> None:
    recipe = load([recipe_file(tmp_path)])
    run(recipe, tmp_path)
    plain = plain_loop(recipe)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    expected = pytest.approx(plain.losses, rel=1e-5)
    assert [line["loss"] for line in lines if "loss" in line] == expected
    found = load_file(tmp_path / "weights.safetensors")
    for name, weight in plain.after.items():
        moved = (weight - plain.before[name]).norm()
        assert (found[name] - weight).norm() <= 1e-4 * moved, name


def test_the_rate_of_each_step_is_in_the_metrics(tmp_path: Path) -> None:
    recipe = load([recipe_file(tmp_path), "train.save=false", "eval.batches=0"])
    run(recipe, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    cosine = [0.2 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]
    assert [line["lr"] for line in lines] == pytest.approx([0.1, 0.2, *cosine])


def test_perplexity_is_of_the_mean_loss_of_all_batches(tmp_path: Path) -> None:
    recipe = load([recipe_file(tmp_path), "train.save=false", "task.loss.label_smoothing=0"])
    validation = run(recipe, tmp_path).validation
    assert validation["perplexity"] == pytest.approx(math.exp(validation["loss"]), rel=1e-6)


def test_averages_follow_the_weights_are_evaluated_and_written(tmp_path: Path) -> None:
    """With the rate 0 from the second step on, the weights stand still and the average nears."""
    schedule = "optim.schedule={name: MultiStepLR, milestones: [1], gamma: 0.0}"
    always = [recipe_file(tmp_path), "optim.warmup_steps=0", schedule]
    losses = {}
    for ema, ema_eval in ((0.5, True), (0.5, False), (0.0, True)):
        settings = [f"optim.ema={ema}", f"optim.ema_eval={ema_eval}"]
        recipe = load([*always, *settings, "train.steps=3"])
        folder = tmp_path / f"{ema}{ema_eval}"
        losses[ema, ema_eval] = run(recipe, folder).validation["loss"]
    weights = load_file(tmp_path / "0.5True" / "weights.safetensors")
    averages = load_file(tmp_path / "0.5True" / "ema.safetensors")
    assert set(weights) == set(averages)
    for name, before in Job(recipe).materials.initial.items():
        expected = before + (1 - 0.5**3) * (weights[name] - before)
        torch.testing.assert_close(averages[name], expected)
    assert losses[0.5, False] == losses[0.0, True] != losses[0.5, True]
    assert not (tmp_path / "0.0True" / "ema.safetensors").exists()


OWN = """
import torch

def signed(param, grad, seen, *, lr, scale=2.0):
    seen = seen + grad.abs()
    return param - lr * scale * grad.sign() * (seen > 0), seen
"""


def test_a_function_in_the_working_directory_updates_the_weights(tmp_path: Path) -> None:
    (tmp_path / "my_signed_optim.py").write_text(OWN)
    text = RECIPE.partition("\noptim:")[0].replace("/optim: sgd, ", "")
    text += "\noptim: {lr: 0.001, update: {_target_: my_signed_optim.signed, scale: 3}}\n"
    text += "train: {steps: 3}\neval: {batches: 0}\n"
    recipe = load([recipe_file(tmp_path, text)])
    run(recipe, tmp_path)
    before, after = Job(recipe).materials.initial, load_file(tmp_path / "weights.safetensors")
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before]) / 0.003
    torch.testing.assert_close(moved, moved.round(), atol=2e-3, rtol=0)
    assert set(moved.round().int().tolist()) >= {-3, -1, 1, 3}


def test_named_optimizers_take_their_numbers_from_the_recipe(tmp_path: Path) -> None:
    every = {
        "lion": {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
        "lamb": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.01},
        "adagrad": {"eps": 1e-10, "weight_decay": 0.0},
    }
    for name, numbers in every.items():
        made = optimizer_of(load(["model=mlp", "data=digits", f"optim={name}"]).optim, steps=1)
        assert {key: value for key, value in made.arguments if key != "lr"} == numbers
        assert made.name == name and made.function is not None


def test_betas_of_a_group_stand_for_both() -> None:
    groups = "optim.groups={hidden*: {betas: [0.5, 0.6]}}"
    made = optimizer_of(load(["model=mlp", "data=digits", groups]).optim, steps=1)
    assert made.groups == (ParameterGroup("hidden*", (("beta1", 0.5), ("beta2", 0.6))),)


# override -> (where inside of its key, what is said)
WRONG = {
    "optim.groups={output*: {weight_decya: 0}}": (".output*.weight_decya", "the update takes no"),
    "optim.groups={output*: 3}": (".output*", "only a mapping"),
    "optim.groups={output*: {lr: fast}}": (".output*.lr", "is not a number"),
}


@pytest.mark.parametrize("override", WRONG)
def test_what_cannot_be_is_a_located_error(override: str) -> None:
    inside, problem = WRONG[override]
    with pytest.raises(RecipeError, match=problem) as error:
        optimizer_of(load(["model=mlp", "data=digits", override]).optim, steps=1)
    assert error.value.where == override.partition("=")[0] + inside


def test_the_mirrored_view_reports_the_validation_of_each_rank(tmp_path: Path) -> None:
    """A function of the mean (perplexity) is of each rank's own."""
    changes = ["view=mirrored", "train.save=false", "train.steps=2", "task.loss.label_smoothing=0"]
    run(load([recipe_file(tmp_path), *changes]), tmp_path)
    found = json.loads((tmp_path / "report.json").read_text())["validation"]
    one, other = found["loss_by_rank"]
    assert one != other and (one + other) / 2 == pytest.approx(found["loss"])
    assert found["perplexity_by_rank"] == pytest.approx([math.exp(one), math.exp(other)])
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


def test_evaluation_reads_a_batch_as_training_does() -> None:
    """One sample on 2 ranks: each has half of its tokens."""
    keys = ["model.depth=1", "train.batch_size=1", "train.micro_batches=1", "engine.cache=false"]
    pins = ["placement.axes={data: 2}", "sbp={batch.*: {data: S1}, blocks.*: {out: {data: S1}}}"]
    job = Job(load(["recipe=gpt_dp", *keys, *pins]), values=False)
    for found in job.plans.compiled:
        assert found is not None
        graph = found.plan.graph
        fields = [f for f in graph.feeds if not f.field.startswith("@")]
        assert {f.nd_sbp for f in fields} == {(S(1),)}
        assert [op.out_sbp[0] for op in graph.ops if op.target == "flow.pin"] == [(S(1),)]
