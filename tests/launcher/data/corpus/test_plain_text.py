import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from flowrun.engine.errors import ArgumentError
from flowrun.engine.ir.own_files import cache_folder
from flowrun.launcher.data.corpus import documents, plain_text
from flowrun.launcher.data.corpus.plain_text import tokenise_files
from flowrun.launcher.data.corpus.text import Text


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("the cat sat\non the mat\n")
    (folder / "b.txt").write_text("the dög")
    return folder


def kept() -> list[Path]:
    return sorted(cache_folder().glob("tokens-*"))


def test_files_are_documents_that_end_with_the_end_of_text(texts: Path, bpe: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bpe)
    one, two = (tokenizer.encode((texts / name).read_text()) for name in ("a.txt", "b.txt"))
    end = tokenizer.eos_token_id
    found = Text(str(texts), length=4, tokenizer=bpe)
    assert found.stream.tolist() == [*one, end, *two, end]
    assert isinstance(found.stream, np.memmap) and found.stream.dtype == np.uint16
    assert found.vocabulary == 288
    item = found[1]
    assert item["tokens"].tolist() == found.stream[4:8].tolist()
    assert item["targets"].tolist() == found.stream[5:9].tolist()


def test_documents_know_where_they_start(texts: Path, bpe: str) -> None:
    found = tokenise_files("texts", sorted(texts.iterdir()), None, bpe)
    ends = [*np.flatnonzero(found.ids == found.end) + 1]
    assert found.starts.tolist() == [0, *ends] and found.answers is None


def test_text_is_tokenised_once(texts: Path, bpe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Text(str(texts), length=4, tokenizer=bpe)
    assert "is tokenised" in first.notes[0] and len(kept()) == 1
    monkeypatch.setattr(documents, "load_tokenizer", pytest.fail)
    again = Text(str(texts), length=4, tokenizer=bpe)
    assert again.stream.tolist() == first.stream.tolist() and again.notes == ()


def test_another_text_tokenizer_or_setting_is_tokenised_anew(
    texts: Path, bpe: str, tmp_path: Path
) -> None:
    Text(str(texts), length=4, tokenizer=bpe)
    Text(str(texts), length=4, tokenizer=f"{bpe}/tokenizer.json")
    Text(str(texts), length=4, tokenizer=bpe, max_bytes=20)
    (texts / "b.txt").write_text("the dog")
    Text(str(texts), length=4, tokenizer=bpe)
    assert len(kept()) == 4


def test_a_tokenizer_without_an_end_is_told(texts: Path, bpe: str) -> None:
    found = Text(str(texts), length=4, tokenizer=f"{bpe}/tokenizer.json")
    assert "names no end-of-text token" in found.notes[-1]


@pytest.mark.parametrize("piece_bytes", [1, 16, 1000])
def test_pieces_of_a_long_file_are_whole_lines(
    tmp_path: Path, bpe: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the cat sat on the mat\r\n\nöther  lines\n" * 30
    (tmp_path / "long.txt").write_text(text, newline="")
    monkeypatch.setattr(plain_text, "_PIECE_BYTES", piece_bytes)
    found = tokenise_files("long", [tmp_path / "long.txt"], None, bpe)
    tokenizer = AutoTokenizer.from_pretrained(bpe)
    assert tokenizer.decode(found.ids[:-1].tolist()) == text
    assert found.starts.tolist() == [0, len(found.ids)]


def test_a_cap_cuts_between_characters_and_is_told(tmp_path: Path, bpe: str) -> None:
    (tmp_path / "a.txt").write_text("the mööt")
    found = Text(str(tmp_path / "a.txt"), length=2, tokenizer=bpe, max_bytes=7)
    decoded = AutoTokenizer.from_pretrained(bpe).decode(found.stream.tolist())
    assert decoded == "the mö<|end|>" or decoded == "the mö"
    assert "data.max_bytes=7 reads that many of the 10 bytes" in found.notes[0]


def test_text_that_is_not_utf8_is_refused_with_its_place(tmp_path: Path, bpe: str) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text: byte 3 is 0xe9"):
        Text(str(tmp_path / "a.txt"), length=2, tokenizer=bpe)
    assert kept() == []


def test_what_is_no_tokenizer_is_refused(texts: Path, tmp_path: Path) -> None:
    for path in ("gpt2", str(texts)):
        with pytest.raises(ArgumentError, match=rf"there is no tokenizer at {path}\. Give a f"):
            Text(str(texts), length=4, tokenizer=path)


def test_a_text_without_ids_is_refused(tmp_path: Path, bpe: str) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="holds no text"):
        Text(str(tmp_path / "empty.txt"), length=4, tokenizer=bpe)


def test_the_cache_keeps_what_was_used_last(
    texts: Path, bpe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MOST_BYTES", 1)
    Text(str(texts), length=4, tokenizer=bpe)
    Text(str(texts), length=4, tokenizer=bpe, max_bytes=20)
    assert len(kept()) == 1


def test_a_tokenizer_is_known_by_its_ids(texts: Path, bpe: str, tmp_path: Path) -> None:
    """A folder and its file have the same ids; another tokenizer of as many has others."""
    file = Path(bpe, "tokenizer.json")
    other = tmp_path / "other.json"
    made = json.loads(file.read_text())
    ids = made["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    other.write_text(json.dumps(made))
    one, same, unlike = (
        Text(str(texts), length=4, tokenizer=str(path)) for path in (bpe, file, other)
    )
    assert one.ids_digest == same.ids_digest != unlike.ids_digest
    assert one.vocabulary == unlike.vocabulary
