from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.corpus.parquet_rows import ParquetRows
from flowrun.launcher.urls.object_store import ObjectStore

ROWS = [{"x": [[k / 2, 1.0], [0.0, k]], "label": k % 3, "on": k % 2 == 0} for k in range(50)]


def write(file: Path, rows: list[dict[str, Any]], group: int = 8) -> None:
    file.parent.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=group)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "rows" / "train-00000-of-00002.parquet", ROWS[:30])
    write(tmp_path / "rows" / "train-00001-of-00002.parquet", ROWS[30:])
    write(tmp_path / "rows" / "test-00000-of-00001.parquet", ROWS[:3])
    return tmp_path / "rows"


@pytest.mark.parametrize("held_bytes", [0, 1 << 28])
def test_samples_are_rows_of_all_files_from_disk_and_url(folder: Path, held_bytes: int) -> None:
    store = ObjectStore.open(f"memory://{folder}/there", "x")
    for file in folder.iterdir():
        store.put(file.name, file)
    for path in (str(folder), store.url):
        data = ParquetRows(path, "train", {"images": "x", "labels": "label"}, held_bytes=held_bytes)
        assert len(data) == 50 and len(data.groups) == 4 + 3
        chosen = torch.tensor([49, 0, 31, 8, 30, 0])
        batch = data.stacked(chosen)
        assert torch.equal(batch["labels"], chosen % 3)
        assert torch.equal(batch["images"], torch.tensor([ROWS[k]["x"] for k in chosen]))
    every = ParquetRows(str(folder), "test")
    assert every[2]["on"].dtype is torch.bool and {*every[2]} == {"x", "label", "on"}


def test_row_groups_in_memory_are_bounded_and_read_once_a_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    data = ParquetRows(str(folder), "train", {"x": "x"}, held_bytes=2 * 8 * 16)
    get = data._read

    def count(file: Any, number: int) -> Any:
        read.append(number)
        return get(file, number)

    monkeypatch.setattr(data, "_read", count)
    data.stacked(torch.tensor([0, 9, 1, 10]))
    assert read == [0, 1]
    data.stacked(torch.tensor([0]))
    data.stacked(torch.tensor([20]))  # in the place of group 1
    data.stacked(torch.tensor([0, 9]))
    assert read == [0, 1, 2, 1]


@pytest.mark.parametrize(
    ("rows", "fields", "said"),
    [
        ([{"x": "text"}], None, "row group 0: string with 0 nulls makes no column of numbers"),
        ([{"x": 1}, {"x": None}], None, "row group 0: int64 with 1 nulls makes no column"),
        ([{"x": [1]}, {"x": [1, 2]}], None, r"row group 0: lists .* lengths \[1, 2\]"),
        ([{"x": {"y": 1}}], None, "makes no column of numbers"),
        ([{"x": 1}], {"a": "b"}, "fields: .* has no column 'b'; it has x"),
    ],
)
def test_columns_that_are_no_numbers_are_refused(
    tmp_path: Path, rows: list[dict[str, Any]], fields: dict[str, str] | None, said: str
) -> None:
    write(tmp_path / "a.parquet", rows)
    with pytest.raises(ValueError, match=said):
        ParquetRows(str(tmp_path / "a.parquet"), fields=fields).stacked(torch.tensor([0]))


def test_files_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "rows" / "a.parquet", [{"x": 1}])
    write(tmp_path / "rows" / "b.parquet", [{"x": 1.5}])
    with pytest.raises(ArgumentError, match=r"b\.parquet has no column 'x' of int64"):
        ParquetRows(str(tmp_path / "rows"))
    (tmp_path / "rows" / "b.parquet").write_bytes(b"PAR1 and more PAR1")
    with pytest.raises(ArgumentError, match=r"path: .*b\.parquet cannot be read: "):
        ParquetRows(str(tmp_path / "rows"))
