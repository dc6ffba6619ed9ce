"""Documents as token ids: made once, kept by content in flowrun's cache, mapped into memory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrun.engine.errors import ArgumentError
from flowrun.engine.ir.own_files import cache_folder, own_folder
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
_PREFIX, _ABOUT, _IDS, _ANSWERS, _STARTS = "tokens-", "about.json", "ids", "answers", "starts"
_FORM = "1"  # of the files; another one makes them anew


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


def keep_documents(
    name: str,
    made_of: str,
    tokenizer: str,
    make: Callable[[PreTrainedTokenizerFast], Iterator[DocumentPart]],
) -> Documents:
    """Return the documents of this content, from the cache or made and then kept there.

    name: of the source, for a person.  made_of: digest of all that `make` reads, its settings
    included.  tokenizer: folder or file.  make: tokenizer -> pieces.  Raise ValueError if they hold
    no id.
    """
    DIGESTS.get({}).update({name: made_of, tokenizer: (read := digest_tokenizer(tokenizer))})
    key = hashlib.sha256(f"{_FORM} {made_of} {read}".encode()).hexdigest()
    folder = own_folder(cache_folder())
    where = folder / f"{_PREFIX}{key[:32]}"
    notes: tuple[str, ...] = ()
    if where.is_dir():
        os.utime(where)
    else:
        notes = _make(where, name, tokenizer, make)
        _tidy(folder, where)
    about = json.loads((where / _ABOUT).read_text())
    return Documents(
        ids=np.memmap(where / _IDS, np.dtype(about["dtype"]), "r"),
        answers=np.memmap(where / _ANSWERS, np.bool_, "r") if about["answers"] else None,
        starts=np.fromfile(where / _STARTS, np.int64),
        vocabulary=about["vocabulary"],
        ids_digest=digest_ids(tokenizer),
        end=about["end"],
        notes=notes,
    )


def _make(
    where: Path,
    name: str,
    tokenizer: str,
    make: Callable[[PreTrainedTokenizerFast], Iterator[DocumentPart]],
) -> tuple[str, ...]:
    """Write a folder of the cache, all of it or nothing; return notes for the user.

    where: the folder.  name: of the source.  tokenizer: folder or file.  make: loaded tokenizer ->
    parts of documents.
    """
    began = time.monotonic()
    LOG.info("loading the tokenizer %s", tokenizer)
    loaded = load_tokenizer(tokenizer)
    vocabulary, end = vocabulary_of(loaded), loaded.eos_token_id
    dtype = "<u2" if vocabulary <= 1 << 16 else "<u4"
    with tempfile.TemporaryDirectory(
        dir=where.parent, prefix=_PREFIX, ignore_cleanup_errors=True
    ) as unfinished:
        made = Path(unfinished, "made")
        made.mkdir()
        starts = _write_pieces(made, make(loaded), dtype)
        if not starts[-1]:
            raise ArgumentError("path", f"{name} holds no text.")
        np.array(starts, np.int64).tofile(made / _STARTS)
        answers = (made / _ANSWERS).stat().st_size > 0
        about = {"vocabulary": vocabulary, "end": end, "dtype": dtype, "answers": answers}
        (made / _ABOUT).write_text(json.dumps(about))
        try:
            made.rename(where)
        except OSError:
            if not where.is_dir():  # another process was first
                raise
    seconds = time.monotonic() - began
    done = f"{name} is tokenised: {starts[-1]:,} ids in {seconds:.1f} s, kept in {where}"
    without = f"{tokenizer} names no end-of-text token: nothing separates documents"
    return (done,) if end is not None else (done, without)


def _write_pieces(made: Path, pieces: Iterator[DocumentPart], dtype: str) -> list[int]:
    """Write ids and answers; return where documents start, and the end of the last."""
    starts, total = [0], 0
    with (made / _IDS).open("wb") as ids, (made / _ANSWERS).open("wb") as answers:
        for piece in pieces:
            ids.write(np.asarray(piece.ids, dtype).tobytes())
            answers.write(bytes(piece.answers or ()))
            total += len(piece.ids)
            if piece.last and total > starts[-1]:
                starts.append(total)
    return starts


def _tidy(folder: Path, newest: Path) -> None:
    """Remove what was not used for longest until the rest is within MOST_BYTES."""
    total = 0
    for each in sorted(folder.glob(f"{_PREFIX}*"), key=_last_use, reverse=True):
        with suppress(OSError):  # another process is at it
            total += sum(file.stat().st_size for file in each.rglob("*"))
        if total > MOST_BYTES and each != newest:
            shutil.rmtree(each, ignore_errors=True)


def _last_use(folder: Path) -> float:
    """Return when a folder was used last; 0 if another process has removed it."""
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0
