from pathlib import Path

import pytest

from flowrun.launcher.data.corpus.tokenizer import digest_ids, load_tokenizer
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.store.run_tokenizer import TOKENIZER_FOLDER, keep_tokenizer, use_own_tokenizer
from support.samples.small_tokenizer import save_tokenizer


@pytest.mark.parametrize("named", ["words", "words/tokenizer.json"])
def test_the_copy_gives_the_same_ids(tmp_path: Path, named: str) -> None:
    save_tokenizer(tmp_path / "words")
    path = str(tmp_path / named)
    for _ in range(2):  # of a run that goes on, too
        keep_tokenizer({"tokenizer": path}, tmp_path / "run")
    recipe = use_own_tokenizer(load(["recipe=gpt_hybrid"]), tmp_path / "run")
    copy = str(recipe.data["tokenizer"])
    assert digest_ids(copy) == digest_ids(path)
    text = "the cat sat, naïve"
    assert load_tokenizer(copy)(text).input_ids == load_tokenizer(path)(text).input_ids
    keep_tokenizer(recipe.data, tmp_path / "run")  # its own copy
    assert digest_ids(copy) == digest_ids(path)


def test_checkpoints_in_a_run_use_its_copy(tmp_path: Path) -> None:
    recipe, inside = load(["recipe=gpt_hybrid"]), tmp_path / "run" / "checkpoints" / "step_1"
    inside.mkdir(parents=True)
    assert use_own_tokenizer(recipe, inside) == recipe
    (tmp_path / "run" / TOKENIZER_FOLDER).mkdir()
    own = use_own_tokenizer(recipe, inside).data["tokenizer"]
    assert own == str(tmp_path / "run" / TOKENIZER_FOLDER)


@pytest.mark.parametrize("named", [None, "hub/name", {"a": 1}, "."])
def test_what_is_no_tokenizer_is_left_alone(tmp_path: Path, named: object) -> None:
    keep_tokenizer({"tokenizer": named}, tmp_path)
    assert not (tmp_path / TOKENIZER_FOLDER).exists()
