"""The tokenizer that a recipe names: a folder that transformers reads, or a tokenizer.json file."""

from __future__ import annotations

import hashlib
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER = "tokenizer.json"
# the files of a folder that a tokenizer may be made of
_FILES = ("*token*.json", "vocab*", "merges.txt", "*.model", "chat_template*", "config.json")


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a folder or of a tokenizer.json file, without truncation or padding.

    Raise ValueError for one that has no fast form, FileNotFoundError if nothing is there.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    where = _existing(path)
    found: Any
    if where.is_file():
        found = PreTrainedTokenizerFast(tokenizer_file=str(where))
    else:
        found = AutoTokenizer.from_pretrained(str(where), local_files_only=True)
    if not found.is_fast:
        raise ValueError(f"{path}: a {type(found).__name__} has no fast form ({TOKENIZER})")
    found.backend_tokenizer.no_truncation()
    found.backend_tokenizer.no_padding()
    return found  # type: ignore[no-any-return]


def digest_tokenizer(path: str) -> str:
    """Return a digest of the bytes of all files that a tokenizer is made of."""
    where, hashed = _existing(path), hashlib.sha256()
    files = [where] if where.is_file() else {file for one in _FILES for file in where.glob(one)}
    for file in sorted(files):
        content = file.read_bytes()
        hashed.update(f"{file.name} {len(content)}\n".encode() + content)
    return hashed.hexdigest()


def digest_ids(path: str) -> str:
    """Return a digest of what the ids of a tokenizer stand for; its chat template is no part of it.

    path: a folder or a file.
    """
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
    """Return the ids of a document with its beginning, unless its text has written that already.

    beginning: what the tokenizer puts there.  ids: of the text.
    """
    return ids if ids[: len(beginning)] == beginning else [*beginning, *ids]


def _existing(path: str) -> Path:
    where = Path(path).expanduser()
    if not where.exists() or (where.is_dir() and not any(where.glob("*token*.json"))):
        raise FileNotFoundError(
            f"there is no tokenizer at {path}: give a folder with {TOKENIZER}, or such a file; "
            "flowrun tokenizer trains one, and save_pretrained of transformers writes one"
        )
    return where
