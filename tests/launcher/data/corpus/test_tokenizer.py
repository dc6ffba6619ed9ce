import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from flowrun.launcher.data.corpus.chat import Chat, Instructions
from flowrun.launcher.data.corpus.text import Text
from flowrun.launcher.data.corpus.text_rows import TextRows
from flowrun.launcher.data.corpus.tokenizer import (
    copy_tokenizer,
    digest_tokenizer,
    find_beginning,
    load_tokenizer,
)
from flowrun.launcher.text.codec import read_tokenizer
from support.samples.row_files import write_rows as write

BEGIN = "<|system|>"  # any special token


@pytest.fixture(scope="module")
def begun(bpe: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tokenizer that puts BEGIN in front of a text, and the end after it."""
    folder = tmp_path_factory.mktemp("begun")
    tokenizer = AutoTokenizer.from_pretrained(bpe)
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in (BEGIN, "<|end|>")]
    backend: Any = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A <|end|>", pair=f"{BEGIN} $A $B", special_tokens=ids
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_beginning_is_what_sampling_reads(bpe: str, begun: str) -> None:
    beginning = find_beginning(load_tokenizer(begun))
    plain, read = (read_tokenizer(Path(name)).encode("the cat") for name in (bpe, begun))
    assert beginning == read[:1] and read == [*beginning, *plain]
    assert find_beginning(load_tokenizer(bpe)) == []


def test_a_prompt_is_read_in_training_as_in_sampling(tmp_path: Path, bpe: str, begun: str) -> None:
    rows = ({"prompt": "the cat?", "answer": "sat"}, {"prompt": "the dog?", "answer": "sat"})
    path = write(tmp_path, *rows)
    data = Instructions(path, begun, length=20)
    prompt = read_tokenizer(Path(begun)).encode("the cat?\n")
    assert data[0]["tokens"][: len(prompt)].tolist() == prompt
    assert (data[0]["targets"][: len(prompt) - 1] == -100).all()
    plain = Instructions(path, bpe, length=20)  # the targets are those without a beginning
    targets = [each[0]["targets"] for each in (data, plain)]
    assert targets[0][targets[0] >= 0].tolist() == targets[1][targets[1] >= 0].tolist()
    assert data[0]["tokens"][1:].tolist() == plain[0]["tokens"][:-1].tolist()


def test_every_text_begins(tmp_path: Path, bpe: str, begun: str) -> None:
    codec, end = read_tokenizer(Path(begun)), load_tokenizer(begun).eos_token_id
    texts = ("the cat sat", "the dog sat")
    expected = [k for text in texts for k in (*codec.encode(text), end)]
    rows = TextRows(write(tmp_path, *({"text": text} for text in texts)), begun, length=2)
    (tmp_path / "texts").mkdir()
    for k, text in enumerate(texts):
        (tmp_path / "texts" / f"{k}.txt").write_text(text)
    files = Text(str(tmp_path / "texts"), length=2, tokenizer=begun)
    assert files.stream.tolist() == expected
    assert rows[0]["tokens"].tolist() == expected[:2]
    plain = Text(str(tmp_path / "texts"), length=2, tokenizer=bpe)
    assert plain.stream.tolist() == [k for k in expected if k != expected[0]]


def test_only_the_first_piece_of_a_file_begins(
    tmp_path: Path, begun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrun.launcher.data.corpus.plain_text._PIECE_BYTES", 1)
    (tmp_path / "a.txt").write_text("the cat\nsat\non the mat\n")
    found = Text(str(tmp_path / "a.txt"), length=2, tokenizer=begun).stream.tolist()
    assert found.count(found[0]) == 1 and [found[0]] == find_beginning(load_tokenizer(begun))


def test_what_a_text_or_a_template_writes_itself_is_not_put_twice(
    tmp_path: Path, bpe: str, begun: str
) -> None:
    path = write(tmp_path, *({"prompt": text, "answer": text} for text in ("sat", "mat")))
    data = Instructions(path, begun, length=20, prompt=f"{BEGIN}{{prompt}}\n")
    [begin] = find_beginning(load_tokenizer(begun))
    assert data[0]["tokens"].tolist().count(begin) == 1
    talk = [{"role": "user", "content": "the cat?"}, {"role": "assistant", "content": "sat"}]
    talks = write(tmp_path, {"messages": talk}, {"messages": talk})
    one, other = (Chat(talks, name, length=30)[0]["tokens"].tolist() for name in (bpe, begun))
    assert one == other


def test_code_that_a_tokenizer_brings_never_runs(
    tmp_path: Path, bpe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(bpe, tmp_path / "evil")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # of somebody who is asked
    (tmp_path / "evil" / "evil.py").write_text("open('ran', 'w')\n")
    config = {"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}, "tokenizer_class": "Evil"}
    (tmp_path / "evil" / "tokenizer_config.json").write_text(json.dumps(config))
    with contextlib.suppress(ValueError):  # it is refused, or read without the code
        load_tokenizer("evil")
    assert not Path("ran").exists()


@pytest.mark.parametrize("leaves", [False, True])
def test_a_link_that_leaves_the_folder_is_not_copied(
    tmp_path: Path, bpe: str, leaves: bool
) -> None:
    shutil.copytree(bpe, tmp_path / "words")
    secret = tmp_path / "secret" if leaves else tmp_path / "words" / "tokenizer_config.json"
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "words" / "vocab_x.txt").symlink_to(secret)
    copy_tokenizer(str(tmp_path / "words"), tmp_path / "run")
    assert (tmp_path / "run").exists() != leaves


def test_a_folder_of_the_hub_s_cache_is_copied(tmp_path: Path, bpe: str) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    shutil.copytree(bpe, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    copy_tokenizer(str(snapshot), tmp_path / "run")
    assert digest_tokenizer(str(tmp_path / "run")) == digest_tokenizer(bpe)
