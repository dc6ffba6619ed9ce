"""Documents as token ids: made once, kept by content in flowrun's cache, mapped into memory.

A folder of the cache has the SHA-256 of each of its files, which is compared whenever it is read:
one that a disk or a killed process has damaged is made again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrun.engine.errors import ArgumentError
from flowrun.engine.ir import own_files
from flowrun.engine.ir.files import drop_partial, make, making_folder, remove
from flowrun.engine.runtime.process.own_process import run_in_child
from flowrun.launcher.data.corpus.tokenizer import (
    digest_ids,
    digest_tokenizer,
    load_tokenizer,
    vocabulary_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LOG = logging.getLogger(__name__)  # what is being done; the launcher shows it on the terminal
DIGESTS: ContextVar[dict[str, str]] = ContextVar("DIGESTS")  # by name, of all that was read
MOST_BYTES = 1 << 35  # what the cache may hold of ids; the longest unused goes first
_PREFIX, _ABOUT, _IDS, _ANSWERS, _STARTS = "tokens-", "about", "ids", "answers", "starts"
_FORM = "2"  # of the files; those of another are not read


@dataclass(frozen=True)
class DocumentPart:
    """A document, or a part of it that is encoded by itself.

    ids: of the piece.  answers: for each id whether it is a part of an answer; None: that was
    not asked.
    last: the document ends with it.
    """

    ids: Sequence[int]
    answers: Sequence[bool] | None = None
    last: bool = True


@dataclass(frozen=True, kw_only=True)
class Documents:
    """All documents, one after the other.

    ids: (N,) uint16, or uint32 for vocabularies above 65536.
    answers: (N,) bool: whether an id is a part of an answer; None: that was not asked.
    starts: (D + 1,) int64: document d is ids[starts[d] : starts[d + 1]].
    vocabulary: number of ids of the tokenizer.  ids_digest: of what they stand for.  end: id of its
    end-of-text token; None: it has none.  notes: for the user, if they were made now.
    """

    ids: np.ndarray[Any, Any]
    answers: np.ndarray[Any, Any] | None
    starts: np.ndarray[Any, Any]
    vocabulary: int
    ids_digest: str
    end: int | None
    notes: tuple[str, ...]


PieceMaker = Callable[["PreTrainedTokenizerFast"], Iterator[DocumentPart]]


def keep_documents(name: str, made_of: str, tokenizer: str, make_pieces: PieceMaker) -> Documents:
    """Return the documents of this content, from the cache or made and then kept there.

    name: of the source, for a person.  made_of: digest of all that `make_pieces` reads, its
    settings included.  make_pieces runs in a process of its own.  Raises ArgumentError if they hold
    no id.
    """
    DIGESTS.get({}).update({name: made_of, tokenizer: (read := digest_tokenizer(tokenizer))})
    key = hashlib.sha256(f"{_FORM} {made_of} {read}".encode()).hexdigest()
    folder = own_files.own_folder(own_files.cache_folder())
    where = folder / f"{_PREFIX}{key[:32]}"
    notes: tuple[str, ...] = ()
    try:
        about = _read_about(where)
        os.utime(where)
    except (own_files.Unusable, OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError) or where.exists():
            notes = (f"{name} is tokenised again: what was kept is damaged ({error})",)
            remove(where)
            if os.path.lexists(where):
                problem = "it is damaged and cannot be removed"
                raise OSError(errno.ENOTEMPTY, problem, str(where)) from error
        drop_partial(folder)
        own_files.drop_unused(folder, f"{_PREFIX}*", MOST_BYTES)
        notes += _make(where, name, tokenizer, make_pieces)
        about = _read_about(where)
    return Documents(
        ids=np.memmap(where / _IDS, np.dtype(about["dtype"]), "r"),
        answers=np.memmap(where / _ANSWERS, np.bool_, "r") if about["answers"] else None,
        starts=np.fromfile(where / _STARTS, np.int64),
        vocabulary=about["vocabulary"],
        ids_digest=digest_ids(tokenizer),
        end=about["end"],
        notes=notes,
    )


def _read_about(where: Path) -> dict[str, Any]:
    """Return what a folder says of its files, which are as they were written.

    Raises FileNotFoundError if it is not there, Unusable or another OSError if it is damaged.
    """
    about: dict[str, Any] = json.loads(own_files.read_own(where / _ABOUT))
    for name, digest in about["files"].items():
        if digest_file(where / name) != digest:
            raise own_files.Unusable(f"{where / name}: its SHA-256 does not fit")
    return about


def digest_file(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _make(where: Path, name: str, tokenizer: str, make_pieces: PieceMaker) -> tuple[str, ...]:
    """Write a folder of the cache, all of it or nothing; return notes for the user."""
    began = time.monotonic()
    try:
        with making_folder(where) as made:
            num_ids, end = run_in_child(
                lambda: _write(made, name, tokenizer, make_pieces), f"tokenising {name}", LOG
            )
    except ChildProcessError as error:
        raise ArgumentError("tokenizer", str(error)) from error
    seconds = time.monotonic() - began
    done = f"{name} is tokenised: {num_ids:,} ids in {seconds:.1f} s, kept in {where}"
    without = f"{tokenizer} names no end-of-text token: nothing separates documents"
    return (done,) if end is not None else (done, without)


def _write(
    made: Path, name: str, tokenizer: str, make_pieces: PieceMaker
) -> tuple[int, int | None]:
    """Write the files of a folder; return the number of ids, and the id that ends a text."""
    LOG.info("loading the tokenizer %s", tokenizer)
    loaded = load_tokenizer(tokenizer)
    vocabulary, end = vocabulary_of(loaded), loaded.eos_token_id
    dtype = "<u2" if vocabulary <= 1 << 16 else "<u4"
    starts = _write_pieces(made, make_pieces(loaded), dtype)
    if not starts[-1]:
        raise ArgumentError("path", f"{name} holds no text.")
    with open(make(made / _STARTS), "wb") as opened:
        opened.write(np.array(starts, np.int64).tobytes())
    about = {
        "vocabulary": vocabulary,
        "end": end,
        "dtype": dtype,
        "answers": (made / _ANSWERS).stat().st_size > 0,
        "files": {each: digest_file(made / each) for each in (_IDS, _ANSWERS, _STARTS)},
    }
    own_files.write_own(made / _ABOUT, json.dumps(about).encode())
    return starts[-1], end


def _write_pieces(made: Path, pieces: Iterator[DocumentPart], dtype: str) -> list[int]:
    """Write ids and answers; return where documents start, and the end of the last."""
    starts, total = [0], 0
    with open(make(made / _IDS), "wb") as ids, open(make(made / _ANSWERS), "wb") as answers:
        for piece in pieces:
            ids.write(np.asarray(piece.ids, dtype).tobytes())
            answers.write(bytes(piece.answers or ()))
            total += len(piece.ids)
            if piece.last and total > starts[-1]:
                starts.append(total)
    return starts
