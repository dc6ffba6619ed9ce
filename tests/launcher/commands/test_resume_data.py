"""`flowrun resume` and the content of data: a run goes on with the documents that it had."""

import json
import shutil
from pathlib import Path

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.resume import checkpoint_of, compose_resumed
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from flowrun.launcher.store.checkpoint import ABOUT, About
from support.runs.saved_run import TINY
from support.samples.small_tokenizer import save_tokenizer

DATA = ("data.path=notes.txt", "data.tokenizer=bpe", "model.vocabulary=280")
RUN = (*TINY, *DATA, "launch=virtual", "placement.axes.data=1", "engine.check_capture=false")
SAVED = ("train.save_every=2", "train.steps=2", "eval.sample=false")


@pytest.fixture
def trained(workplace: Path) -> Path:
    """The folder of a run of 2 steps on notes.txt, by the tokenizer bpe."""
    save_tokenizer(workplace / "bpe")
    (workplace / "notes.txt").write_text("the cat sat on the mat\n" * 40)
    run(load([*RUN, *SAVED]), workplace / "run")
    return workplace / "run"


def resume(folder: Path) -> None:
    start = checkpoint_of(folder)
    run(compose_resumed(start, ["train.steps=3"]), folder, start=start)


def test_other_documents_are_refused_by_name(trained: Path) -> None:
    Path("notes.txt").write_text("the dog sat on the mat\n" * 60)
    with pytest.raises(
        RecipeError, match=r"notes\.txt was \w{12} \(sha256\), and is \w{12}; "
    ) as bad:
        resume(trained)
    assert bad.value.where == "data.path"
    assert "samples, and are" in bad.value.problem and "model.weights=" in bad.value.instead
    with pytest.raises(RecipeError, match="whose content has changed"):
        run(load([*RUN, *SAVED, "train.steps=3", "train.resume=auto"]), trained)


def test_another_tokenizer_is_refused_by_name(trained: Path) -> None:
    shutil.rmtree("bpe")
    save_tokenizer(Path("bpe"), vocabulary=279)
    with pytest.raises(RecipeError, match=r"bpe was \w{12} \(sha256\), and is") as caught:
        resume(trained)
    assert caught.value.where == "data.tokenizer"


@pytest.mark.thorough
def test_a_checkpoint_that_knows_no_digest_goes_on(trained: Path) -> None:
    file = checkpoint_of(trained).folder / ABOUT
    about = About.from_json(file.read_text())
    assert set(about.digests) == {"notes.txt", "bpe"} and about.samples
    file.write_text(About(**{**vars(about), "digests": {}, "samples": None}).to_json())
    Path("notes.txt").write_text("the dog sat on the mat\n" * 60)
    resume(trained)
    assert json.loads((trained / "report.json").read_text())["first_step"] == 2
