"""Documents of which answers alone are trained on: conversations, prompts with answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.corpus.documents import LOG, DocumentPart, Documents, keep_documents
from flowrun.launcher.data.corpus.packed import PackedDocuments
from flowrun.launcher.data.corpus.row_source import Fields, PlacedRow, RowSource
from flowrun.launcher.data.corpus.special_tokens import EncodedText, SpecialTokens, TextSpans
from flowrun.launcher.data.corpus.tokenizer import find_beginning, put_beginning
from flowrun.launcher.data.stacked import Numbers, StackedDataset
from flowrun.models.losses import IGNORED

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


class AnsweredDocuments(StackedDataset):
    """A document a sample: {tokens (T,), targets (T,)}, int64, targets one id ahead; or, packed,
    several, with positions and documents (packed.py).

    Targets are -100 where the next id holds no character of an answer, and after the end.
    documents: with their answers.  length: T; shorter ones are padded.
    long: what becomes of longer ones: cut or drop; None: they are refused.
    pack: several documents make a sample.  most_documents: of a packed sample; see PackedDocuments.
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
        self.documents, self.length, self.vocabulary = documents, length, documents.vocabulary
        self.ids_digest = documents.ids_digest
        starts, ends = documents.starts[:-1], documents.starts[1:]
        sizes = ends - starts
        too_long = sizes > length + 1
        if too_long.any() and long is None:
            raise ArgumentError(
                "length",
                f"{too_long.sum():,} of {len(sizes):,} documents have more than the {length + 1} "
                f"ids of length={length}.",
                f"Write length={sizes.max() - 1}, or long={CUT} or {DROP}.",
            )
        kept = ~too_long if long == DROP else np.ones_like(too_long)
        self.sizes = np.minimum(sizes, length + 1)
        answered = _have_answers(documents, starts + 1, starts + self.sizes)
        self.chosen = np.flatnonzero(kept & answered)
        counts = {
            f"are cut to {length + 1} ids (data.long={CUT})": (too_long & (long == CUT)).sum(),
            f"have more than {length + 1} ids, and are left out (data.long={DROP})": (~kept).sum(),
            "have no answer to train on, and are left out": (kept & ~answered).sum(),
        }
        lines = [f"{n:,} of {len(sizes):,} documents {what}" for what, n in counts.items() if n]
        self.notes = (*documents.notes, *lines)
        if not len(self.chosen):
            raise ArgumentError(
                "path",
                "\n".join(f"{line}." for line in ("no document is left to train on", *lines)),
            )
        self.packed: PackedDocuments | None = None
        if pack:
            chosen = (starts[self.chosen], self.sizes[self.chosen])
            self.packed = PackedDocuments(documents, *chosen, length, most_documents)
            self.notes += self.packed.notes

    def __len__(self) -> int:
        return len(self.chosen if self.packed is None else self.packed)

    def stacked(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the items, by one gather."""
        if self.packed is not None:
            return self.packed.stacked(indices)
        chosen = self.chosen[indices.numpy()]
        steps = np.arange(self.length + 1)
        inside = steps < self.sizes[chosen, None]
        at = np.where(inside, self.documents.starts[chosen, None] + steps, 0)
        assert self.documents.answers is not None
        ids = np.where(inside, self.documents.ids[at], self.documents.end or 0).astype(np.int64)
        answers = self.documents.answers[at] & inside
        return {
            "tokens": torch.from_numpy(ids[:, :-1]),
            "targets": torch.from_numpy(np.where(answers, ids, IGNORED)[:, 1:]),
        }


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

    source: the rows.  tokenizer: folder or file.  settings: all else that `write` depends on.
    write: makes the text of a row.  begin: a document begins with what the tokenizer puts in front
    of a text; False: the text has all of it.
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
        for text, encoded in zip(texts, _encode_texts(rows, texts, special), strict=True):
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
    except Exception as error:  # of a format, too
        raise ArgumentError("path", f"{row.place}: {error}.") from error


def _encode_texts(
    rows: Sequence[PlacedRow], texts: Sequence[AnsweredText], special: SpecialTokens
) -> list[EncodedText]:
    """Return the ids of texts; an error names the place of the row."""
    try:
        return special.encode([each.text for each in texts], [each.letters for each in texts])
    except ValueError as error:
        for row, text in zip(rows, texts, strict=True):
            try:
                special.encode([text.text], [text.letters])
            except ValueError as own:
                raise ArgumentError("path", f"{row.place}: {own}.") from own
        raise ArgumentError("path", f"{rows[0].place} and those after it: {error}.") from error


def _mark(places: list[tuple[int, int]], spans: TextSpans) -> list[bool]:
    """Return whether each id, at a place in the text, holds a character of a span."""
    starts = np.array([start for start, _ in places], np.int64)
    ends = np.array([end for _, end in places], np.int64)
    marked = np.zeros(len(places), bool)
    for start, end in spans:
        marked |= (starts < end) & (ends > start)
    return [*map(bool, marked)]
