"""Text as bytes, or as the ids of a tokenizer: any file or folder, by default the Python standard
library's own source.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flowrun.launcher.data.corpus.plain_text import find_text_files, share_bytes, tokenise_files
from flowrun.launcher.data.corpus.tokens import Windows
from flowrun.launcher.data.stacked import BYTES


class Text(Windows):
    """Windows of a stream of ids: {tokens (T,), targets (T,)}, int64, targets one id ahead.

    path: a file, or a folder whose files are read in sorted order, without hidden ones and
    __pycache__; None: the Python standard
    library's own .py files.
    length: T; windows do not overlap.  max_bytes: bytes of the text that are read; None: all.
    tokenizer: a folder that transformers reads, or a tokenizer.json file (pip install
    flowrun[text]); the text is tokenised once, each file begun as the tokenizer begins a text, and
    followed by the end-of-text token; None: ids are the bytes.
    """

    def __init__(
        self,
        path: str | None = None,
        length: int = 64,
        max_bytes: int | None = 8_000_000,
        tokenizer: str | None = None,
    ) -> None:
        files = find_text_files(path)
        self.notes = _note_cut(path, files, max_bytes)
        if tokenizer is None:
            stream = b"".join(_read_start(*share) for share in share_bytes(files, max_bytes))
            self.stream: NDArray[np.integer] = np.frombuffer(stream, dtype=np.uint8)
            self.vocabulary, self.ids_digest = 256, BYTES
        else:
            name = "the standard library" if path is None else path
            documents = tokenise_files(name, files, max_bytes, tokenizer, strict=path is not None)
            self.stream, self.vocabulary = documents.ids, documents.vocabulary
            self.ids_digest = documents.ids_digest
            self.notes += documents.notes
        super().__init__(
            self.stream, length, f"{'bytes' if tokenizer is None else 'tokens'} of {path}"
        )


def _note_cut(path: str | None, files: list[Path], max_bytes: int | None) -> tuple[str, ...]:
    """Return a note where a file or folder is not read to its end; max_bytes: the most."""
    total = sum(file.stat().st_size for file in files)
    if path is None or max_bytes is None or total <= max_bytes:
        return ()
    return (f"data.max_bytes={max_bytes} reads that many of the {total:,} bytes of {path}",)


def _read_start(file: Path, num_bytes: int) -> bytes:
    with file.open("rb") as stream:
        return stream.read(num_bytes)
