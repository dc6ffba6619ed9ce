"""Plain text in a field of rows, as a stream of ids."""

from __future__ import annotations

from typing import Any

from flowrun.models.data.corpus.answers import AnsweredText, tokenise_rows
from flowrun.models.data.corpus.row_source import RowSource, field_of
from flowrun.models.data.corpus.special_tokens import SpecialTokens
from flowrun.models.data.windows import Windows


class TextRows(Windows):
    """Windows of a stream of ids: {tokens (T,), targets (T,)}, int64, targets one id ahead.

    path, split: rows (row_source.py).  tokenizer: folder or file.
    field: of a row, which holds its text; each text is followed by the end-of-text token.
    length: T; windows do not overlap.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str,
        length: int = 1024,
        field: str = "text",
        split: str | None = None,
    ) -> None:
        source = RowSource(path, split)

        def write(row: dict[str, Any], special: SpecialTokens) -> AnsweredText:
            return AnsweredText(field_of(row, field) + (special.tokenizer.eos_token or ""), None)

        found = tokenise_rows(source, tokenizer, f"text {field}", write)
        self.vocabulary, self.notes = found.vocabulary, found.notes
        if len(found.ids) <= length:
            raise ValueError(f"{path}: {len(found.ids)} ids do not fill a window of {length} + 1")
        super().__init__(found.ids, length)
