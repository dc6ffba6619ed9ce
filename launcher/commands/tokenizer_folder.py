"""`flowrun tokenizer`: a byte-level BPE tokenizer, trained on text files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.corpus.plain_text import find_text_files
from flowrun.launcher.data.corpus.train_tokenizer import (
    LEAST_VOCABULARY,
    MOST_VOCABULARY,
    train_tokenizer,
)
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.terminal import doing


def make_tokenizer(paths: Sequence[str], vocabulary: int, to: Path) -> int:
    """Train on files, and write the tokenizer's folder; return the number of its ids.

    paths: files and folders; empty: the source of Python's standard library.  vocabulary: the
    number of ids that is asked for.  to: the folder, which must not be there.  Raises RecipeError
    for a path that is missing, or is no text, a folder that has something in it, and a vocabulary
    that is too small or too large.
    """
    if not LEAST_VOCABULARY <= vocabulary <= MOST_VOCABULARY:
        least = f"every byte is an id, and every special token: {LEAST_VOCABULARY} are the least."
        raise CommandLineError(
            f"--vocabulary {vocabulary}",
            f"{MOST_VOCABULARY} ids are the most." if vocabulary > MOST_VOCABULARY else least,
            "Usual are 8192 for a few megabytes of text, 32768 to 262144 for gigabytes.",
        )
    if to.is_file() or (to.is_dir() and any(to.iterdir())):
        raise CommandLineError(
            f"--to {to}",
            "it is there already, and what was trained with it could not be read any more.",
            "Name a folder that is not there.",
        )
    try:
        files = [file for path in paths or (None,) for file in find_text_files(path)]
    except ArgumentError as error:
        raise CommandLineError("--from", error.problem) from None
    if paths:
        _check_text(files)
    try:
        with doing.show_log("flowrun.launcher.data"):
            return train_tokenizer(files, vocabulary, to)
    except (ChildProcessError, ValueError) as error:
        raise CommandLineError("--from", str(error)) from error


def _check_text(files: Sequence[Path]) -> None:
    """Raise PlacedError for files that are not UTF-8, which data=text refuses too, and for no text
    at all.
    """
    if not any(file.stat().st_size for file in files):
        raise CommandLineError("--from", "the files hold no text.")
    for file in files:
        done = 0
        with file.open("rb") as stream:
            for line in stream:
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    at, wrong = done + error.start, line[error.start]
                    problem = f"{file} is not UTF-8 text: byte {at} is {wrong:#x}."
                    raise CommandLineError("--from", problem) from None
                done += len(line)
