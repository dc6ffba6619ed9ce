"""Documents of which answers alone are trained on: conversations, prompts with answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.corpus.documents import LOG, DocumentPart, Documents, keep_documents
from flowrun.launcher.data.corpus.packed import DocumentSamples
from flowrun.launcher.data.corpus.row_source import Fields, PlacedRow, RowSource
from flowrun.launcher.data.corpus.special_tokens import SpecialTokens, TextSpans
from flowrun.launcher.data.corpus.tokenizer import find_beginning, put_beginning
from flowrun.launcher.data.stacked import Numbers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CUT, DROP = "cut", "drop"
_AT_ONCE = 1000  # rows


@dataclass(frozen=True)
class AnsweredText:
    """A document as text.

    spans: of answers; None: all of it is trained on.  letters: places of special tokens that are
    none, as somebody wrote them.
    """

    text: str
    spans: TextSpans | None
    letters: TextSpans = ()


RowWriter = Callable[[Fields, SpecialTokens], AnsweredText]


class AnsweredDocuments(DocumentSamples):
    """Documents as samples (packed.py) of which answers alone are targets.

    documents: with their answers.  length: T; shorter ones are padded.
    long: what becomes of longer ones: cut or drop; None: they are refused.
    pack, most_documents: several documents make a sample, and how many at most.
    Documents without a target, also those whose answers were cut off, are left out, and counted in
    `notes`.
    """

    def __init__(
        self,
        documents: Documents,
        length: int,
        long: str | None,
        pack: bool = False,
        most_documents: int | None = None,
    ) -> None:
        if long not in (None, CUT, DROP):
            raise ArgumentError("long", f"it must be {CUT}, {DROP} or null, not {long!r}.")
        starts, sizes = documents.starts[:-1], np.diff(documents.starts)
        too_long = sizes > length + 1
        if too_long.any() and long is None:
            raise ArgumentError(
                "length",
                f"{too_long.sum():,} of {len(sizes):,} documents have more than the {length + 1} "
                f"ids of length={length}.",
                f"Write length={sizes.max() - 1}, or long={CUT} or {DROP}.",
            )
        kept = ~too_long if long == DROP else np.ones_like(too_long)
        cut = np.minimum(sizes, length + 1)
        answered = _have_answers(documents, starts + 1, starts + cut)
        counts = {
            f"are cut to {length + 1} ids (data.long={CUT})": (too_long & (long == CUT)).sum(),
            f"have more than {length + 1} ids, and are left out (data.long={DROP})": (~kept).sum(),
            "have no answer to train on, and are left out": (kept & ~answered).sum(),
        }
        lines = [f"{n:,} of {len(sizes):,} documents {what}" for what, n in counts.items() if n]
        chosen = kept & answered
        if not chosen.any():
            raise ArgumentError(
                "path",
                "\n".join(f"{line}." for line in ("no document is left to train on", *lines)),
            )
        super().__init__(documents, starts[chosen], cut[chosen], length, pack, most_documents)
        self.notes += tuple(lines)


def _have_answers(documents: Documents, first: Numbers, end: Numbers) -> NDArray[np.bool_]:
    """Return for each document whether an id from `first`, and before `end`, is of an answer."""
    assert documents.answers is not None
    places = np.append(np.flatnonzero(documents.answers), len(documents.answers))
    answered: NDArray[np.bool_] = places[np.searchsorted(places, first)] < end
    return answered


def tokenise_rows(
    source: RowSource, tokenizer: str, settings: str, write: RowWriter, begin: bool = True
) -> Documents:
    """Return rows as documents, tokenised once.

    settings: all else that `write` depends on.  begin: a document begins with what the tokenizer
    puts in front of a text; False: the text has all of it.
    """
    LOG.info("reading %s", source.path)
    digest = hashlib.sha256(f"{source.digest()} {settings} {begin=}".encode()).hexdigest()
    return keep_documents(
        source.path, digest, tokenizer, lambda loaded: _encode_rows(source, loaded, write, begin)
    )


def _encode_rows(
    source: RowSource, tokenizer: PreTrainedTokenizerFast, write: RowWriter, begin: bool
) -> Iterator[DocumentPart]:
    """Yield rows as ids.  source, tokenizer, write, begin: see tokenise_rows."""
    beginning = find_beginning(tokenizer) if begin else []
    tokenizer.backend_tokenizer.post_processor = None  # it may trim spaces off the places of ids
    special, done = SpecialTokens(tokenizer), 0
    for rows in source.batches(_AT_ONCE):
        LOG.info("tokenising %s: row %s", source.path, f"{done:,}")
        texts = [_write_row(row, write, special) for row in rows]
        try:
            encodings = special.encode(
                [each.text for each in texts],
                [each.letters for each in texts],
                [f"{row.place}: " for row in rows],
            )
        except ValueError as error:
            raise ArgumentError("path", f"{error}.") from error
        for text, encoded in zip(texts, encodings, strict=True):
            answers = None if text.spans is None else _mark(encoded.places, text.spans)
            ids = put_beginning(beginning, encoded.ids)
            if answers is not None:
                answers = [False] * (len(ids) - len(encoded.ids)) + answers
            yield DocumentPart(ids=ids, answers=answers)
        done += len(rows)


def _write_row(row: PlacedRow, write: RowWriter, special: SpecialTokens) -> AnsweredText:
    """Return the text of a row; an error names its place."""
    try:
        return write(row.fields, special)
    except ArgumentError as error:
        problem = f"{row.place}: {error.problem}"
        raise ArgumentError(error.argument, problem, error.instead) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # of a format, too
        raise ArgumentError("path", f"{row.place}: {error}.") from error


def _mark(places: list[tuple[int, int]], spans: TextSpans) -> list[bool]:
    """Return whether each id, at a place in the text, holds a character of a span."""
    starts = np.array([start for start, _ in places], np.int64)
    ends = np.array([end for _, end in places], np.int64)
    marked = np.zeros(len(places), bool)
    for start, end in spans:
        marked |= (starts < end) & (ends > start)
    return [*map(bool, marked)]
