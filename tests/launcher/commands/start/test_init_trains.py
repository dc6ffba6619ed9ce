"""What strangers write, from `flowrun init` to a falling loss, and a sentence where that cannot be.

`--thorough` runs all of them.
"""

import io
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from flowrun.engine.errors import FlowrunError
from flowrun.launcher.commands import try_recipe as module
from flowrun.launcher.commands.plan_recipe import plan
from flowrun.launcher.commands.start.guess_task import fit_loss
from flowrun.launcher.commands.start.init_recipe import WrittenRecipe, show_written, write_recipe
from flowrun.launcher.commands.try_recipe import try_recipe
from flowrun.launcher.job import forked
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe_errors import explain
from flowrun.launcher.run import run
from support.checks.thorough import few
from support.runs.command import Command
from support.strangers.items import HEADER, ITEMS
from support.strangers.refused import GAPS, REFUSED
from support.strangers.tasks import TASKS

STRANGERS = {**ITEMS, **TASKS}
OFTEN = ("samples_of_a_dataclass", "pil_images", "nested_inputs")
VIRTUAL = "launch=virtual"


def write(name: str, source: str, words: str = "") -> WrittenRecipe:
    Path(f"{name}.py").write_text(HEADER + source)
    return write_recipe(f"{name}.py", None, None, words.split(), force=True)


@pytest.mark.parametrize("name", few(STRANGERS, OFTEN))
def test_the_loss_of_what_a_stranger_wrote_falls(place: Path, name: str) -> None:
    """Each step reads all training samples, so that training alone makes its loss another one."""
    source, words, loss = STRANGERS[name]
    written = write(f"of_{name}", source, words)
    assert written.missing == []
    assert try_recipe(written.file, run, [VIRTUAL]).startswith("tried: a step is foreseen to take")
    recipe = load([f"recipe={written.file}"])
    of_model = not recipe.task.loss or recipe.task.loss["_target_"].endswith("model_loss")
    assert loss == "the model" if of_model else recipe.task.loss["_target_"].endswith(f".{loss}")
    items = int(re.search(r"# (\d+) items", written.file.read_text())[1])
    batch = f"train.batch_size={items - items // 20}"
    run(load([f"recipe={written.file}", VIRTUAL, "train.steps=30", batch]), Path("out"))
    steps = map(json.loads, Path("out/metrics.jsonl").read_text().splitlines())
    losses = [step["loss"] for step in steps if "loss" in step]
    assert len(losses) == 30 and losses[-1] < losses[0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stacked_gets_a_sentence(place: Path, name: str) -> None:
    source, sentence = REFUSED[name]
    with pytest.raises(FlowrunError) as refused:
        write(f"of_{name}", source)
    said = explain(refused.value, [])
    assert said.startswith(f"command line  of_{name}.") and sentence in said
    assert not Path("recipes/net.yaml").exists()


@pytest.mark.parametrize("name", GAPS)
def test_what_cannot_be_guessed_is_left_open(place: Path, name: str) -> None:
    source, missing, sentence = GAPS[name]
    written = write(f"of_{name}", source)
    assert written.missing == missing and any(sentence in note for note in written.notes)
    out = io.StringIO()
    show_written(written, Console(file=out, width=80))
    assert f"Write instead of ???: {missing[0]}" in out.getvalue()


N = 8
CLASSES, REAL = torch.arange(N) % 3, torch.arange(N) / N


@pytest.mark.parametrize(
    ("target", "output", "expected"),
    [
        (CLASSES, (3,), ("cross_entropy", {})),
        (CLASSES.int(), (3,), ("cross_entropy", {})),
        (CLASSES.float()[:, None], (3,), ("cross_entropy", {})),
        (CLASSES, (1,), ("squared_error", {})),
        (CLASSES, (), ("squared_error", {})),
        (CLASSES > 0, (1,), ("binary_cross_entropy", {})),
        (CLASSES > 0, (2,), ("cross_entropy", {})),
        ((CLASSES > 0).float(), (), ("binary_cross_entropy", {})),
        (REAL, (1,), ("squared_error", {})),
        (REAL[:, None] * torch.ones(4), (4,), ("squared_error", {})),
        (torch.ones(N, 4).int(), (4,), ("binary_cross_entropy", {})),
        (CLASSES.expand(6, N).T, (6, 4), ("cross_entropy", {})),
        (CLASSES.expand(6, N).T, (4, 6), ("cross_entropy", {"class_dim": 1})),
        (CLASSES.expand(5, 6, N).movedim(-1, 0), (4, 5, 6), ("cross_entropy", {"class_dim": 1})),
        (torch.tensor([0, 1, -100] * 4).view(N // 2, 3), (3, 2), ("cross_entropy", {})),
        (REAL, (3,), None),
        (torch.tensor([0, 1, -100] * 4), (), None),
        (torch.arange(12), (3,), None),
        (CLASSES - 1, (3,), None),
        (REAL[:, None] * torch.ones(4), (3,), None),
    ],
)
def test_a_loss_fits_target_and_output(
    target: torch.Tensor, output: tuple[int, ...], expected: tuple[str, object] | None
) -> None:
    fit = fit_loss(target, torch.zeros(2, *output))
    assert (fit and fit[:2]) == expected


def test_an_output_that_the_loss_would_squash_again_is_named() -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    advice = ", after a {}, which the loss applies again: leave it out"
    assert fit_loss(CLASSES, logits.softmax(-1))[2].endswith(advice.format("softmax"))
    assert fit_loss(CLASSES > 0, logits[:, :1].sigmoid())[2].endswith(advice.format("sigmoid"))
    assert not fit_loss(CLASSES, logits.log_softmax(-1))[2].endswith("out")


def test_a_torch_for_gpus_plans_what_is_tried_in_a_fork(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank that is forked later could run autograd, as one process of an init showed."""
    monkeypatch.setattr(forked, "forks_autograd", lambda: True)
    here: list[object] = []
    monkeypatch.setattr(module, "plan", lambda recipe: here.append(recipe) or plan(recipe))
    written = write("planned_there", ITEMS["pairs"][0])
    assert "the loss of the first" in try_recipe(written.file, run, [VIRTUAL])
    assert here == []


@pytest.mark.processes
def test_init_ends_with_the_loss_of_a_step_or_with_why_there_is_none(place: Path) -> None:
    source = ITEMS["pairs"][0]
    Path("mine.py").write_text(HEADER + source)
    Path("wrong.py").write_text(HEADER + source.replace("Linear(8", "Linear(7"))
    tried = Command(place, "init", "mine", "--to", "mine.yaml").end()
    assert tried.status == 0 and "the loss of the first is 1.2" in tried.out
    wrong = Command(place, "init", "wrong", "--to", "wrong.yaml").end()
    assert wrong.status == 2 and Path("wrong.yaml").exists()
    assert "wrong.yaml:6:3  model" in wrong.err and "mat1 and mat2 shapes" in wrong.err
    left_out = Command(place, "init", "wrong", "--no-try", "--to", "wrong.yaml", "--force").end()
    assert left_out.status == 0 and "tried" not in left_out.out
