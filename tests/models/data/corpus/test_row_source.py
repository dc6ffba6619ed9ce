"""Rows of files of several kinds, and of saved data sets."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from flowrun.models.data.corpus.row_source import RowSource
from flowrun.models.data.corpus.text_rows import TextRows

ROWS = [{"text": f"the cat {k}", "n": k} for k in range(5)]


def write(folder: Path, kind: str) -> str:
    """Write ROWS; return the path."""
    made = datasets.Dataset.from_list(ROWS)
    if kind == "jsonl":
        (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
        return str(folder / "a.jsonl")
    if kind == "parquet":
        made.to_parquet(folder / "a.parquet")
        return str(folder / "a.parquet")
    if kind == "csv":
        made.to_csv(folder / "a.csv")
        return str(folder / "a.csv")
    if kind == "saved":
        made.save_to_disk(folder / "saved")
        return str(folder / "saved")
    for k in (0, 1):
        lines = "".join(f"{json.dumps(row)}\n" for row in ROWS[2 * k : 2 + 9 * k])
        (folder / f"{k}.jsonl").write_text(lines)
    return str(folder)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "saved", "a folder"])
def test_rows_of_every_kind_are_the_same(tmp_path: Path, kind: str) -> None:
    source = RowSource(write(tmp_path, kind))
    assert [len(rows) for rows in source.batches(2)][:2] == [2, 2]
    assert [row for rows in source.batches(2) for row in rows] == ROWS


def test_a_saved_data_set_with_splits_needs_the_name_of_one(tmp_path: Path) -> None:
    both = datasets.DatasetDict(
        {name: datasets.Dataset.from_list(ROWS[:k]) for name, k in (("train", 4), ("test", 1))}
    )
    both.save_to_disk(tmp_path / "saved")
    one, other = (RowSource(str(tmp_path / "saved"), split) for split in ("train", "test"))
    assert [len(next(each.batches(9))) for each in (one, other)] == [4, 1]
    assert one.digest() != other.digest()
    with pytest.raises(ValueError, match="split must be one of train, test, not None"):
        next(RowSource(str(tmp_path / "saved")).batches(1))


def test_what_has_no_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file or folder squad with rows; of the hub"):
        RowSource("squad").digest()
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "b.csv").write_text("a")
    with pytest.raises(ValueError, match=r"files must be of one kind, of \.jsonl"):
        next(RowSource(str(tmp_path)).batches(1))


def test_a_field_is_a_stream_of_documents(tmp_path: Path, bpe: str) -> None:
    from transformers import AutoTokenizer

    data = TextRows(write(tmp_path, "parquet"), bpe, length=3)
    tokenizer = AutoTokenizer.from_pretrained(bpe)
    windows = [*data[0]["tokens"].tolist(), *data[1]["tokens"].tolist()]
    whole = tokenizer.encode("<|end|>".join(row["text"] for row in ROWS))
    assert windows == whole[:6] and data.vocabulary == 288


def test_a_row_without_the_field_is_named(tmp_path: Path, bpe: str) -> None:
    with pytest.raises(ValueError, match=r"a\.jsonl, row 0: there is no 'body' in it; it has text"):
        TextRows(write(tmp_path, "jsonl"), bpe, field="body")
