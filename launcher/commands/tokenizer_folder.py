"""`flowrun tokenizer`: a byte-level BPE tokenizer, trained on text files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from flowrun.engine.errors import ArgumentError
from flowrun.engine.ir.files import making_folder
from flowrun.engine.runtime.process.own_process import run_in_child
from flowrun.launcher.data.corpus.documents import LOG
from flowrun.launcher.data.corpus.plain_text import find_text_files
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.terminal import doing

END, USER, ASSISTANT, SYSTEM = "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIAL = (END, USER, ASSISTANT, SYSTEM)
LEAST_VOCABULARY = 256 + len(SPECIAL)  # every byte is a token
MOST_VOCABULARY = 1 << 20  # the largest in use have a quarter of it
# What a message is, and which of it the assistant answers: its text and the end after it.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + eos_token -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""
_LINES_BYTES = 1 << 20


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


def train_tokenizer(files: Sequence[Path], vocabulary: int, folder: Path) -> int:
    """Train on text files, write the folder, whole or not at all, and return the number of ids.

    vocabulary: ids, special tokens included, at most MOST_VOCABULARY; less are made where the text
    has not as many words.  What is not UTF-8 does not count.  Raises ChildProcessError if the
    library ends its process.
    """
    with making_folder(folder) as unfinished:
        return run_in_child(
            lambda: _train(files, vocabulary, unfinished), "training a tokenizer", LOG
        )


def _train(files: Sequence[Path], vocabulary: int, folder: Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trained.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(_read(files), trainer)
    LOG.info("writing %s", folder)
    saved = PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )
    saved.chat_template = CHAT_TEMPLATE
    saved.save_pretrained(str(folder))
    return trained.get_vocab_size()


def _read(files: Sequence[Path]) -> Iterator[str]:
    total = sum(file.stat().st_size for file in files)
    read, shown = 0, 0
    for file in files:
        with file.open(encoding="utf-8", errors="ignore", newline="") as stream:
            while lines := stream.readlines(_LINES_BYTES):
                yield "".join(lines)
        read += file.stat().st_size
        if read - shown > _LINES_BYTES:
            LOG.info("reading %.1f of %.1f MB", read / 1e6, total / 1e6)
            shown = read
