"""Documents as samples: one in each, or several, so that few tokens are padding."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import torch
from torch import Tensor

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.corpus.documents import Documents
from flowrun.launcher.data.stacked import DOCUMENTS, POSITIONS, Numbers, StackedDataset
from flowrun.models.losses import IGNORED


class DocumentSamples(StackedDataset):
    """{tokens (T,), targets (T,)}, int64, targets one id ahead: a piece of a document a sample, or
    several, with {positions (T,), documents (N,)}.

    documents: the ids.  starts, sizes: (D,) of the pieces, in ids; each has one token less, as its
    last id is only a target.  length: T.
    pack: a sample holds several pieces.  most: N, the most of them; None: as many as the fullest
    sample has.

    `documents` of a sample has the tokens of each piece, in order, and 0 after the last; the rest
    is padding; it is counted into the last document.  Positions count from 0 in each piece.
    Targets are -100 where an id is of no answer, and on padding; none is the id of another piece.

    A sample is filled by its number alone: pieces go, in their order, where they leave the least
    room (best fit), and samples are numbered in the order in which they were begun.
    """

    def __init__(
        self,
        documents: Documents,
        starts: Numbers,
        sizes: Numbers,
        length: int,
        pack: bool,
        most: int | None = None,
    ) -> None:
        if most is not None and most < 1:
            raise ArgumentError("most_documents", f"it must be 1 or more, not {most}.")
        if not len(sizes):
            raise ArgumentError("path", "no document has two ids, of which one could be a target.")
        self.documents, self.length, self.pack = documents, length, pack
        self.vocabulary, self.ids_digest = documents.vocabulary, documents.ids_digest
        self.notes = documents.notes
        tokens = sizes - 1
        packed = _fill(tokens.tolist(), length, most if pack else 1)
        counts = np.array([len(each) for each in packed])
        self.most = int(counts.max() if most is None or not pack else most)
        self.ends = np.cumsum(counts)
        order = np.concatenate(packed).astype(np.int64)
        self.starts, self.tokens = starts[order], tokens[order]
        if not pack:
            self.lengths = np.minimum(self.tokens + 1, length)  # what is not padding
        else:
            share, before = (tokens.sum() / (n * length) for n in (len(packed), len(tokens)))
            self.notes += (
                f"{len(tokens):,} documents are packed into {len(packed):,} samples of {length} "
                f"tokens, which are {share:.1%} full; with one document each they would be "
                f"{before:.1%}",
            )

    def __len__(self) -> int:
        return len(self.ends)

    def stacked(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the items, by one gather."""
        numbers = indices.numpy()
        ends = self.ends[numbers]
        firsts = np.where(numbers > 0, self.ends[numbers - 1], 0)
        slots = np.arange(self.most)
        used = slots < (ends - firsts)[:, None]
        piece = np.where(used, firsts[:, None] + slots, 0)
        lengths = np.where(used, self.tokens[piece], 0)  # (B, N)
        total = lengths.sum(1)
        last = ends - firsts - 1
        lengths[np.arange(len(numbers)), last] += self.length - total
        steps = np.arange(self.length)
        slot = np.stack([np.repeat(slots, each) for each in lengths])  # (B, T)
        begins = np.cumsum(lengths, 1) - lengths
        positions = steps - np.take_along_axis(begins, slot, 1)
        inside = steps < total[:, None]
        shown = inside if self.pack else steps <= total[:, None]  # alone, with its last id
        at = np.where(shown, self.starts[np.take_along_axis(piece, slot, 1)] + positions, 0)
        ids, answers = self.documents.ids, self.documents.answers
        tokens = np.where(shown, ids[at], self.documents.end or 0)
        wanted = inside if answers is None else inside & answers[at + inside]
        targets = np.where(wanted, ids[at + inside].astype(np.int64), IGNORED)
        fields = {"tokens": tokens, "targets": targets}
        if self.pack:
            fields |= {POSITIONS: positions, DOCUMENTS: lengths}
        return {name: torch.from_numpy(values.astype(np.int64)) for name, values in fields.items()}


def _fill(sizes: list[int], length: int, most: int | None) -> list[list[int]]:
    """Return for each sample the numbers of the pieces, of 1 to `length` tokens, that are in it."""
    packed: list[list[int]] = []
    open_samples: list[tuple[int, int]] = []  # (room left, number), sorted
    for piece, size in enumerate(sizes):
        fitting = bisect_left(open_samples, (size, 0))
        if fitting < len(open_samples):
            room, sample = open_samples.pop(fitting)
        else:
            room, sample = length, len(packed)
            packed.append([])
        packed[sample].append(piece)
        if room > size and len(packed[sample]) != most:
            insort(open_samples, (room - size, sample))
    return packed


def cut_documents(documents: Documents, length: int) -> tuple[Numbers, Numbers]:
    """Return starts and sizes, in ids, of documents of two ids or more, in pieces of `length`
    tokens.

    A piece begins with the id that the one before has as its last target.
    """
    first, end = documents.starts[:-1], documents.starts[1:]
    pieces = np.maximum(-(-(end - first - 1) // length), 0)
    number = np.repeat(np.arange(len(first)), pieces)
    within = np.arange(len(number)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = first[number] + within * length
    return starts, np.minimum(end[number] - starts, length + 1)
