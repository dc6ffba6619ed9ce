from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.corpus.text import Text
from flowrun.launcher.data.corpus.text_rows import TextRows
from flowrun.launcher.data.corpus.tokens import Tokens, write_tokens
from flowrun.launcher.urls.object_store import ObjectStore
from support.samples.row_files import write_rows
from support.samples.small_tokenizer import save_tokenizer

ROWS = [{"text": f"the cat sat on the mat {k}"} for k in range(40)]


def write(folder: Path, kind: str) -> Path:
    """A file of data, or a folder of files."""
    if kind == "tokens":
        write_tokens(folder / "ids.bin", [[7 * k % 300 for k in range(500)]])
        return folder / "ids.bin"
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
        return folder / "rows.parquet"
    if kind == "folder":
        (folder / "rows").mkdir()
        for name in ("a.jsonl", "b.jsonl"):
            write_rows(folder / "rows", *ROWS, name=name)
        return folder / "rows"
    return Path(write_rows(folder, *ROWS))


def read(path: str, kind: str, tokenizer: Path) -> Any:
    if kind == "tokens":
        return Tokens(path, length=16)
    if kind == "text":
        return Text(path, length=16)
    return TextRows(path, str(tokenizer), length=16)


@pytest.mark.parametrize("kind", ["tokens", "parquet", "jsonl", "folder", "text"])
def test_samples_of_a_url_are_those_of_the_disk(tmp_path: Path, kind: str) -> None:
    file, tokenizer = write(tmp_path, kind), tmp_path / "bpe"
    save_tokenizer(tokenizer)
    store = ObjectStore.open(f"memory://{tmp_path}/there", "x")
    for each in file.rglob("*") if file.is_dir() else [file]:
        store.put(each.relative_to(tmp_path).as_posix(), each)
    found = read(f"{store.url}/{file.name}", kind, tokenizer)
    expected = read(str(file), kind, tokenizer)
    assert len(found) == len(expected) > 4
    every = torch.arange(len(expected))
    for name, value in expected.stacked(every).items():
        assert torch.equal(found.stacked(every)[name], value)


def test_a_url_that_cannot_be_read_is_an_error_of_the_path(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"path: there is no object at memory://.*none"):
        Tokens(f"memory://{tmp_path}/none")
    with pytest.raises(ArgumentError, match="path: foo://x cannot be opened: Protocol not known"):
        Tokens("foo://x")
