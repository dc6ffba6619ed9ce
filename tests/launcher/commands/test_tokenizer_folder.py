from pathlib import Path

import pytest

from flowrun.launcher.data.corpus.text import Text
from support.runs.workplace import End


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, words in {"a": "the cat sat on the mat", "b": "the dog sat on the log"}.items():
        (tmp_path / name).write_text(f"{words}\n" * 20)
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def test_files_become_a_folder_that_data_reads(files: list[str], end: End) -> None:
    code, out, _ = end("tokenizer", "--from", *files, "--vocabulary", "270", "--to", "bpe")
    assert code == 0 and out == "bpe: 270 ids; data.tokenizer=bpe model.vocabulary=270 take it\n"
    assert Text(files[1], length=4, tokenizer="bpe").vocabulary == 270


def test_hidden_files_of_a_folder_are_not_read(tmp_path: Path, end: End) -> None:
    texts = tmp_path / "texts"
    for name, content in {
        "a.txt": b"the cat sat on the mat\n" * 20,
        ".git/index": b"\xff",
        "inner/__pycache__/a.pyc": b"\xa7",
        ".DS_Store": b"\xfe",
    }.items():
        (texts / name).parent.mkdir(parents=True, exist_ok=True)
        (texts / name).write_bytes(content)
    code, _, err = end("tokenizer", "--from", "texts", "--to", "bpe")
    assert (code, err) == (0, "")
    assert len(Text("texts", length=4).stream) == 23 * 20


def test_fewer_ids_than_were_asked_for_are_said(files: list[str], end: End) -> None:
    code, out, _ = end("tokenizer", "--from", files[0], "--to", "bpe")
    assert code == 0 and " ids, for the text has not 8,192; data.tokenizer=" in out


ODD = {
    "nothing": (b"", "the files hold no text"),
    "a byte": ("é".encode() * 600_000 + b"\xff", "odd is not UTF-8 text: byte 1200000 is 0xff"),
    "half a letter": (b"abc\xc3", "odd is not UTF-8 text: byte 3 is 0xc3"),
}


@pytest.mark.parametrize(("content", "words"), ODD.values(), ids=ODD)
def test_what_is_no_text_is_refused(content: bytes, words: str, tmp_path: Path, end: End) -> None:
    (tmp_path / "odd").write_bytes(content)
    code, _, err = end("tokenizer", "--from", "odd", "--to", "bpe")
    assert code == 2 and words in err and not (tmp_path / "bpe").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--vocabulary", "100"], "command line  --vocabulary 100\n  every byte is an id"),
        (["--vocabulary", "100000000"], "--vocabulary 100000000\n  1048576 ids are the most"),
        (["--from", "nowhere"], "there is no file or folder nowhere"),
        (["--size", "3"], "there is no such option"),
        (["--to", "."], "Name a folder that is not there"),
    ],
)
def test_mistakes_are_refused(
    change: list[str], words: str, files: list[str], tmp_path: Path, end: End
) -> None:
    code, _, err = end("tokenizer", "--from", *files, "--to", "bpe", *change)
    assert code == 2 and words in err and not (tmp_path / "bpe").exists()
