"""Many prompts, from a file, and what is written after each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.corpus.row_source import PARSERS, PlacedRow, RowSource, text_of
from flowrun.launcher.recipe.recipe_errors import CommandLineError, PlacedError

_FIELD = "prompt"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt is a text to continue.  place: where it stands, for errors."""

    place: str
    text: str


@dataclass(frozen=True, slots=True)
class WrittenText:
    """A text was written after a prompt.  stopped_by: see Continuation."""

    prompt: str
    text: str
    stopped_by: str


def collect_prompts(
    given: Sequence[str], file: Path | None, chat: bool, as_json: bool
) -> list[Prompt]:
    """Return the prompts of a command line and those of a file; without any the empty text, or
    none, where somebody types them.  Raises PlacedError.
    """
    found = [Prompt(f"--prompt {text[:40]!r}", text) for text in given]
    found += read_prompts(file) if file else []
    if chat and as_json and not found:
        problem, instead = "what is typed has no JSON.", "--prompt or --prompts says what is asked."
        raise CommandLineError("--chat", problem, instead)
    return found or ([] if chat else [Prompt("", "")])


def read_prompts(file: Path) -> list[Prompt]:
    """Read the field `prompt` of each row of a file (jsonl, JSON, CSV, Parquet), or each line of
    one with another suffix; empty lines are skipped.  Raises PlacedError.
    """
    if not file.is_file():
        raise CommandLineError(f"--prompts {file}", "there is no such file.")
    try:
        if file.suffix in PARSERS:
            rows = [*chain.from_iterable(RowSource(str(file)).batches(1000))]
        else:
            lines = enumerate(file.read_text(encoding="utf-8-sig").split("\n"), 1)
            rows = [PlacedRow(f"{file}, line {n}", {_FIELD: line}) for n, line in lines if line]
    except ValueError as error:
        problem = error.problem if isinstance(error, ArgumentError) else f"{error}."
        raise CommandLineError(f"--prompts {file}", problem) from error
    if not rows:
        raise CommandLineError(f"--prompts {file}", "it holds no prompt.")
    found = []
    for row in rows:
        try:
            found.append(Prompt(row.place, text_of(row.fields, _FIELD)))
        except ValueError as error:
            raise PlacedError(row.place, "", f"{error}.") from error
    return found
