"""The tokenizer that a recipe names: a folder that transformers reads, or a tokenizer.json file."""

from __future__ import annotations

import hashlib
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrun.engine.errors import ArgumentError, RecipeError
from flowrun.engine.ir.files import replace_bytes
from flowrun.launcher.urls.url_cache import on_disk

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER = "tokenizer.json"
_CONFIGS = ("tokenizer_config.json", "config.json")
# the files of a folder that a tokenizer may be made of
_FILES = ("*token*.json", "vocab*", "merges.txt", "*.model", "chat_template*", "config.json")


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a folder or of a tokenizer.json file, without truncation or padding.

    Raise ArgumentError if nothing is there, and for one that has no fast form.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    where = _existing(path)
    loaded: Any
    if file := _lone_file(where):
        loaded = PreTrainedTokenizerFast(tokenizer_file=str(file))
    else:
        loaded = AutoTokenizer.from_pretrained(
            str(where), local_files_only=True, trust_remote_code=False
        )
    if not loaded.is_fast:
        raise ArgumentError(
            "tokenizer", f"{path}: a {type(loaded).__name__} has no fast form ({TOKENIZER})."
        )
    loaded.backend_tokenizer.no_truncation()
    loaded.backend_tokenizer.no_padding()
    return loaded  # type: ignore[no-any-return]


def digest_tokenizer(path: str) -> str:
    """Return a digest of the bytes of all files that a tokenizer is made of."""
    hashed = hashlib.sha256()
    for file in _files_of(_existing(path)):
        content = file.read_bytes()
        hashed.update(f"{file.name} {len(content)}\n".encode() + content)
    return hashed.hexdigest()


def copy_tokenizer(path: str, to: Path) -> None:
    """Copy the files of a tokenizer to a folder, from which load_tokenizer reads the same one.

    Nothing is copied of a folder with a link that leads out of it, to what may be no tokenizer's.
    Raise ArgumentError if there is none.
    """
    where = _existing(path)
    files = _files_of(where)
    if where.is_dir() and not all(_stays(file, where) for file in files):
        return
    to.mkdir(parents=True, exist_ok=True)
    for file in files:
        copy = to / (TOKENIZER if where.is_file() else file.name)
        if not (copy.exists() and copy.samefile(file)):
            replace_bytes(copy, file.read_bytes())


def digest_ids(path: str) -> str:
    """Return a digest of what ids of a tokenizer stand for, its chat template left out."""
    where = _existing(path)
    file = where / TOKENIZER if where.is_dir() else where
    return (
        hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else digest_tokenizer(path)
    )


def vocabulary_of(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the number of ids, which is the highest id plus one, added tokens included."""
    return max(tokenizer.get_vocab().values()) + 1


def find_beginning(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the ids that a tokenizer puts in front of a text, such as a begin-of-text token."""
    backend = tokenizer.backend_tokenizer
    written = backend.encode("a")
    ids = zip(written.ids, written.special_tokens_mask, strict=True)
    return [k for k, _ in takewhile(lambda pair: pair[1], ids)]


def put_beginning(beginning: list[int], ids: list[int]) -> list[int]:
    """Return the ids of a document with its beginning, unless its text has written that already."""
    return ids if ids[: len(beginning)] == beginning else [*beginning, *ids]


def _files_of(where: Path) -> list[Path]:
    """Return the files that a tokenizer is made of, sorted.  where: its folder or file."""
    if where.is_file():
        return [where]
    return sorted({file for one in _FILES for file in where.glob(one) if file.is_file()})


def _stays(file: Path, where: Path) -> bool:
    """Return False for a link that leads out of the folder `where`."""
    roots = [where.resolve()]
    if roots[0].parent.name == "snapshots":  # of the hub's cache, whose links lead to its blobs
        roots.append(roots[0].parents[1] / "blobs")
    return any(file.resolve().is_relative_to(root) for root in roots)


def _lone_file(where: Path) -> Path | None:
    """Return the file of a tokenizer that has no config; None for a folder that has one."""
    if where.is_dir() and any((where / name).exists() for name in _CONFIGS):
        return None
    file = where / TOKENIZER if where.is_dir() else where
    return file if file.is_file() else None


def _existing(path: str) -> Path:
    try:
        where = on_disk(path, "tokenizer")
    except RecipeError as error:
        raise ArgumentError("tokenizer", error.problem, error.instead) from error
    if not where.exists() or (where.is_dir() and not any(where.glob("*token*.json"))):
        raise ArgumentError(
            "tokenizer",
            f"there is no tokenizer at {path}.",
            f"Give a folder with {TOKENIZER}, or such a file; flowrun tokenizer trains one, and "
            "save_pretrained of transformers writes one.",
        )
    return where
