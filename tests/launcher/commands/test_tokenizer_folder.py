from pathlib import Path

import pytest

from flowrun.launcher.cli import main
from flowrun.launcher.data.corpus.text import Text


def end(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["tokenizer", *arguments])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, words in {"a": "the cat sat on the mat", "b": "the dog sat on the log"}.items():
        (tmp_path / name).write_text(f"{words}\n" * 20)
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def test_files_become_a_folder_that_data_reads(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "bpe"
    code, out, _ = end(capsys, "--from", *files, "--vocabulary", "270", "--to", str(to))
    assert code == 0 and out == f"{to}: 270 ids; data.tokenizer={to} model.vocabulary=270 take it\n"
    assert Text(files[1], length=4, tokenizer=str(to)).vocabulary == 270


def test_hidden_files_of_a_folder_are_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    for name, content in {
        "a.txt": b"the cat sat on the mat\n" * 20,
        ".git/index": b"\xff",
        "inner/__pycache__/a.pyc": b"\xa7",
        ".DS_Store": b"\xfe",
    }.items():
        (texts / name).parent.mkdir(parents=True, exist_ok=True)
        (texts / name).write_bytes(content)
    code, _, err = end(capsys, "--from", str(texts), "--to", str(tmp_path / "bpe"))
    assert (code, err) == (0, "")
    assert len(Text(str(texts), length=4).stream) == 23 * 20


def test_fewer_ids_than_were_asked_for_are_said(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = end(capsys, "--from", files[0], "--to", str(tmp_path / "bpe"))
    assert code == 0 and " ids, for the text has not 8,192; data.tokenizer=" in out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the files hold no text"),
        ("é".encode() * 600_000 + b"\xff", "odd is not UTF-8 text: byte 1200000 is 0xff"),
        (b"abc\xc3", "odd is not UTF-8 text: byte 3 is 0xc3"),
    ],
)
def test_what_is_no_text_is_refused(
    content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd").write_bytes(content)
    code, _, err = end(capsys, "--from", str(tmp_path / "odd"), "--to", str(tmp_path / "bpe"))
    assert code == 2 and words in err and not (tmp_path / "bpe").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--vocabulary", "100"], "command line  --vocabulary 100\n  every byte is an id"),
        (["--vocabulary", "100000000"], "--vocabulary 100000000\n  1048576 ids are the most"),
        (["--from", "nowhere"], "there is no file or folder nowhere"),
        (["--size", "3"], "there is no such option"),
    ],
)
def test_mistakes_are_refused(
    change: list[str],
    words: str,
    files: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = end(capsys, "--from", *files, "--to", str(tmp_path / "bpe"), *change)
    assert code == 2 and words in err and not (tmp_path / "bpe").exists()


def test_a_folder_that_is_there_stays(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = end(capsys, "--from", files[0], "--to", str(tmp_path))
    assert code == 2 and "Name a folder that is not there" in err
