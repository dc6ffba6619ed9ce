"""A tokenizer that the tests of a session share."""

import pytest

from flowrun.launcher.commands.tokenizer_folder import train_tokenizer

TEXT = "the cat sat on the mat; the dog sat on the log.\nönly ünïcode – here\n" * 20


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small byte-level BPE tokenizer."""
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "text").write_text(TEXT, encoding="utf-8")
    train_tokenizer([folder / "text"], 288, folder / "made")
    return str(folder / "made")
