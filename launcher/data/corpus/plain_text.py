"""Text files as documents: each file is one, begun as the tokenizer begins a text, and followed by
its end-of-text token.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.corpus.documents import LOG, DocumentPart, Documents, keep_documents
from flowrun.launcher.data.corpus.tokenizer import find_beginning, put_beginning
from flowrun.launcher.urls.url_cache import data_on_disk

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PIECE_BYTES = 1 << 18  # about, up to the end of a line: pieces of a long file are encoded in turn
_AT_ONCE = 32  # pieces; the tokenizer encodes them on all cores
Shares = Sequence[tuple[Path, int]]  # files, and how many bytes of each are read


def tokenise_files(
    name: str, files: Sequence[Path], max_bytes: int | None, tokenizer: str, strict: bool = True
) -> Documents:
    """Return text files as documents, tokenised once.

    name: of the text, for a person.  max_bytes: of all files that are read; None: all.  strict:
    raise ValueError for a file that is not UTF-8; False: what is not becomes U+FFFD.
    """
    shares = [*share_bytes(files, max_bytes)]
    errors = "strict" if strict else "replace"
    LOG.info("reading %s", name)
    digest = _digest(shares, f"text, begun, {_PIECE_BYTES} {errors}")
    return keep_documents(
        name, digest, tokenizer, lambda loaded: _encode(shares, errors, name, loaded)
    )


def share_bytes(files: Sequence[Path], max_bytes: int | None) -> Iterator[tuple[Path, int]]:
    """Yield files until max_bytes are reached, each with how many of its bytes count."""
    left = sys.maxsize if max_bytes is None else max_bytes
    for file in files:
        if num_bytes := min(left, file.stat().st_size):
            yield file, num_bytes
            left -= num_bytes


def _digest(shares: Shares, settings: str) -> str:
    hashed = hashlib.sha256(f"{settings}\n".encode())
    for file, num_bytes in shares:
        hashed.update(f"{num_bytes}\n".encode())
        with file.open("rb") as stream:
            while num_bytes and (block := stream.read(min(num_bytes, 1 << 20))):
                hashed.update(block)
                num_bytes -= len(block)
    return hashed.hexdigest()


def _encode(
    shares: Shares, errors: str, name: str, tokenizer: PreTrainedTokenizerFast
) -> Iterator[DocumentPart]:
    end, backend = tokenizer.eos_token_id, tokenizer.backend_tokenizer
    beginning, begins = find_beginning(tokenizer), True
    total, read = sum(num_bytes for _, num_bytes in shares), 0
    pieces = (piece for file, num_bytes in shares for piece in _pieces(file, num_bytes, errors))
    while some := [*islice(pieces, _AT_ONCE)]:
        LOG.info("tokenising %s: %.1f of %.1f MB", name, read / 1e6, total / 1e6)
        encodings = backend.encode_batch_fast([text for text, *_ in some], add_special_tokens=False)
        for encoding, (_, last, num_bytes) in zip(encodings, some, strict=True):
            tail = [end] if last and end is not None else []
            ids = put_beginning(beginning, encoding.ids) if begins else encoding.ids
            yield DocumentPart(ids=[*ids, *tail], last=last)
            read, begins = read + num_bytes, last


def _pieces(file: Path, num_bytes: int, errors: str) -> Iterator[tuple[str, bool, int]]:
    """Yield (text, whether the file ends with it, its bytes) of the first bytes of a file.

    A character that is cut there is left out.
    """
    left, whole = num_bytes, num_bytes == file.stat().st_size
    with file.open("rb") as stream:
        while left and (lines := stream.readlines(min(left, _PIECE_BYTES))):
            block = b"".join(lines)[:left]
            left -= len(block)
            try:
                text, _ = codecs.utf_8_decode(block, errors, whole or left > 0)
            except UnicodeDecodeError as error:
                at = num_bytes - left - len(block) + error.start
                raise ValueError(
                    f"{file} is not UTF-8 text: byte {at} is {block[error.start]:#x}"
                ) from None
            yield text, not left, len(block)


def find_text_files(path: str | None) -> list[Path]:
    """Return a file, or the visible files of a folder, sorted; None: Python's standard library."""
    if path is None:
        return sorted(_find_standard_library())
    root = data_on_disk(path)
    if root.is_dir():
        return sorted(find_visible_files(root))
    if not root.exists():
        raise ArgumentError("path", f"there is no file or folder {path}.")
    return [root]


def find_visible_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of those in it, without hidden ones and `__pycache__`."""
    for file in folder.rglob("*"):
        if file.is_file() and is_visible(file.relative_to(folder)):
            yield file


def is_visible(name: PurePath) -> bool:
    """Return False for a hidden file, one in a hidden folder, or in `__pycache__`."""
    return not any(part.startswith(".") or part == "__pycache__" for part in name.parts)


def _find_standard_library() -> Iterator[Path]:
    """Yield Python's own source files, without those of installed packages."""
    others = {"site-packages", "dist-packages", "__pycache__"}
    for folder, inner, files in os.walk(sysconfig.get_paths()["stdlib"]):
        inner[:] = [name for name in inner if name not in others]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))
