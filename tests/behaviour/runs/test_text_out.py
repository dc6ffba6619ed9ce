"""A run on text, and what one does with it: text, a folder for others, its metrics."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console

from flowrun.launcher.commands.evaluate import evaluate
from flowrun.launcher.commands.export_folder import export_folder
from flowrun.launcher.commands.load_run import load_run
from flowrun.launcher.commands.write_text import open_writer
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.report.progress import Progress
from flowrun.launcher.run import run
from flowrun.launcher.text.generate import Drawing

RECIPE = (
    "recipe=gpt_hybrid launch=virtual model.depth=2 model.width=16 model.heads=2 data.length=8"
    " data.max_bytes=20000 train.batch_size=4 train.micro_batches=2 train.steps=4"
    " train.save_every=2 train.keep=0 eval.every=2 eval.batches=3 optim.ema=0.5 optim.lr=0.05"
    " engine.check_capture=false"
)
SHORT = Drawing(tokens=12, temperature=0)
SAME = 1e-5


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with `out`, a run in stages 2 x tensor 2, and what it `shown`."""
    place = tmp_path_factory.mktemp("text")
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        run(load(RECIPE.split()), place / "out", Progress(Console(file=shown, width=200)))
        (place / "shown").write_text(shown.getvalue())
        yield place


def evaluations(place: Path) -> dict[int, dict[str, float]]:
    """Steps done -> the results that the run found itself."""
    lines = map(json.loads, (place / "out" / "metrics.jsonl").read_text().splitlines())
    return {line["step"] + 1: line["validation"] for line in lines if "validation" in line}


def test_it_ends_with_text(place: Path) -> None:
    before = (place / "shown").read_text().partition("it now writes:\n")[0]
    assert "everything of this run" in before
    shown = (place / "shown").read_text().partition("it now writes:\n")[2]
    kept = json.loads((place / "out" / "samples.jsonl").read_text())
    assert len(shown) > 100 and kept["step"] == max(evaluations(place))
    assert kept["prompt"].splitlines()[0] in shown and len(kept["text"]) > 50


def test_text_is_of_the_step_that_is_asked_for(place: Path) -> None:
    writers = (open_writer(place / "out", step) for step in (None, 2))
    last, named = ("".join(writer.continue_text("def ", SHORT)) for writer in writers)
    folder = place / "out" / "checkpoints" / "step_00000002"
    assert "".join(open_writer(folder).continue_text("def ", SHORT)) == named != last


@torch.no_grad()
@pytest.mark.parametrize("step", [None, 2])
def test_its_folder_has_the_logits_of_the_step(place: Path, step: int | None) -> None:
    written = export_folder(place / "out", place / f"hf{step}", step=step)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(written.folder)
    tokens = torch.tensor([list(b"import t")])
    ours = load_run(place / "out", step).model(tokens)
    assert (theirs(tokens).logits - ours).abs().max() < SAME
    assert written.step == (step or 4)


@pytest.mark.parametrize("step", [None, 2])
def test_its_metrics_are_those_that_it_found_itself(place: Path, step: int | None) -> None:
    found = evaluate(place / "out", step=step)
    assert found.step == (step or 4)
    assert found.results == pytest.approx(evaluations(place)[found.step], rel=SAME)
    assert (found.samples, found.notes) == (12, ())


def test_more_than_was_held_out_is_noted(place: Path) -> None:
    found = evaluate(place / "out", ["eval.fraction=0.5", "train.batch_size=2"])
    said = "the run trained on some of these samples: it held out 5% of them"
    assert said in found.notes
    assert str(found).startswith("step 4: loss ") and found.samples == 6
