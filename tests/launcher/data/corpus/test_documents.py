import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flowrun.engine.ir.own_files import cache_folder
from flowrun.launcher.data.corpus.text import Text

DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "a flipped bit": ("ids", lambda held: bytes([held[0] ^ 1, *held[1:]])),
    "cut ids": ("ids", lambda held: held[: len(held) // 3]),
    "empty ids": ("ids", lambda _: b""),
    "cut starts": ("starts", lambda held: held[:8]),
    "an empty about": ("about", lambda _: b""),
    "a cut about": ("about", lambda held: held[:40]),
}


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text").write_text("the cat sat on the mat\n" * 50)
    return str(tmp_path / "text")


def kept() -> Path:
    [folder] = cache_folder().glob("tokens-*")
    return folder


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_cache_is_made_again(name: str, text: str, bpe: str) -> None:
    whole = np.array(Text(text, tokenizer=bpe).stream)
    file, damage = DAMAGES[name]
    before = (kept() / file).read_bytes()
    (kept() / file).write_bytes(damage(before))
    again = Text(text, tokenizer=bpe)
    assert np.array_equal(again.stream, whole)
    assert any("is tokenised again: what was kept is damaged" in note for note in again.notes)
    assert (kept() / file).read_bytes() == before
    assert not any("again" in note for note in Text(text, tokenizer=bpe).notes)


def test_a_missing_file_of_the_cache_is_made_again(text: str, bpe: str) -> None:
    whole = np.array(Text(text, tokenizer=bpe).stream)
    (kept() / "about").unlink()
    assert np.array_equal(Text(text, tokenizer=bpe).stream, whole)


def test_what_a_killed_process_was_making_is_removed(text: str, bpe: str) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    cache_folder().mkdir(parents=True, mode=0o700)
    name, node = "tokens-0123", platform.node()
    dead, living = (
        cache_folder() / f"{name}.{node}-{pid}-0.partial" for pid in (ended.pid, os.getpid())
    )
    for folder in (dead, living):
        folder.mkdir()
        (folder / "ids").touch()
    Text(text, tokenizer=bpe)
    assert not dead.exists() and living.exists()
