"""Plain text in a field of rows, as a stream of ids."""

from __future__ import annotations

from torch import Tensor

from flowrun.launcher.data.corpus.answers import AnsweredText, tokenise_rows
from flowrun.launcher.data.corpus.packed import DocumentSamples, cut_documents
from flowrun.launcher.data.corpus.row_source import Fields, RowSource, text_of
from flowrun.launcher.data.corpus.special_tokens import SpecialTokens
from flowrun.launcher.data.corpus.tokens import Windows
from flowrun.launcher.data.stacked import StackedDataset


class TextRows(StackedDataset):
    """Windows of a stream of ids: {tokens (T,), targets (T,)}, int64, targets one id ahead; or,
    packed, whole texts, with positions and documents (packed.py).

    path, split: rows (row_source.py).  tokenizer: folder or file.
    field: of a row, which holds its text; each text begins as the tokenizer begins one, and is
    followed by the end-of-text token.
    length: T; windows do not overlap.
    pack: several texts make a sample and see nothing of each other; those of more than T tokens are
    cut into pieces.  most_documents: of a packed sample; see DocumentSamples.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str,
        length: int = 1024,
        field: str = "text",
        split: str | None = None,
        pack: bool = False,
        most_documents: int | None = None,
    ) -> None:
        source = RowSource(path, split)

        def write(row: Fields, special: SpecialTokens) -> AnsweredText:
            return AnsweredText(text_of(row, field) + (special.tokenizer.eos_token or ""), None)

        documents = tokenise_rows(source, tokenizer, f"text {field}", write)
        self.vocabulary, self.ids_digest = documents.vocabulary, documents.ids_digest
        self.notes = documents.notes
        self.samples: StackedDataset
        if pack:
            pieces = cut_documents(documents, length)
            self.samples = packed = DocumentSamples(
                documents, *pieces, length, True, most_documents
            )
            self.notes = packed.notes
        else:
            self.samples = Windows(documents.ids, length, f"ids of {path}")

    def __len__(self) -> int:
        return len(self.samples)

    def stacked(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the items, by one gather."""
        return self.samples.stacked(indices)
