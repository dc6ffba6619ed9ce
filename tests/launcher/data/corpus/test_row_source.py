import json
from pathlib import Path

import datasets
import pytest

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.corpus.row_source import RowSource
from flowrun.launcher.data.corpus.text_rows import TextRows

ROWS = [{"text": f"the cat {k}", "n": k} for k in range(5)]


def write(folder: Path, kind: str) -> str:
    made = datasets.Dataset.from_list(ROWS)
    path = folder / ("saved" if kind == "saved" else f"a.{kind}")
    if kind == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    elif kind == "parquet":
        made.to_parquet(path)
    elif kind == "csv":
        made.to_csv(path)
    elif kind == "saved":
        made.save_to_disk(path)
    else:
        for k in (0, 1):
            lines = "".join(f"{json.dumps(row)}\n" for row in ROWS[2 * k : 2 + 9 * k])
            (folder / f"{k}.jsonl").write_text(lines)
        return str(folder)
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "saved", "a folder"])
def test_rows_of_every_kind_are_the_same(tmp_path: Path, kind: str) -> None:
    source = RowSource(write(tmp_path, kind))
    assert [len(rows) for rows in source.batches(2)][:2] == [2, 2]
    rows = [row.fields for rows in source.batches(2) for row in rows]
    assert rows == ([{**row, "n": str(row["n"])} for row in ROWS] if kind == "csv" else ROWS)


def test_a_saved_data_set_with_splits_needs_the_name_of_one(tmp_path: Path) -> None:
    made = {k: datasets.Dataset.from_list(ROWS[:n]) for k, n in (("train", 4), ("test", 1))}
    datasets.DatasetDict(made).save_to_disk(tmp_path / "saved")
    one, other = (RowSource(str(tmp_path / "saved"), split) for split in ("train", "test"))
    assert [len(next(each.batches(9))) for each in (one, other)] == [4, 1]
    assert one.digest() != other.digest()
    with pytest.raises(ValueError, match="split: it must be one of train, test, not None"):
        next(RowSource(str(tmp_path / "saved")).batches(1))


def test_a_saved_data_set_of_one_split_has_no_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="saved has no splits, so split=nonsense cannot be read"):
        next(RowSource(write(tmp_path, "saved"), "nonsense").batches(1))
    split = datasets.Dataset.from_list(ROWS, split=datasets.Split.TRAIN)
    split.save_to_disk(tmp_path / "train")
    assert len(next(RowSource(str(tmp_path / "train"), "train").batches(9))) == 5
    with pytest.raises(ValueError, match="holds the split train alone, so split=test cannot be"):
        next(RowSource(str(tmp_path / "train"), "test").batches(1))


def write_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{json.dumps({'text': name})}\n")


def names_read(path: Path, split: str | None) -> list[str]:
    return [row.fields["text"] for rows in RowSource(str(path), split).batches(9) for row in rows]


SHARDS = ("data/test-00000-of-00001.jsonl", "data/train-00000-of-00001.jsonl")


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (SHARDS, "train", [SHARDS[1]]),
        (SHARDS, "test", [SHARDS[0]]),
        (SHARDS, "all", [*SHARDS]),
        (("my_train_1.jsonl", "my_dev.jsonl"), "validation", ["my_dev.jsonl"]),
        (("my_train_1.jsonl", "my_dev.jsonl"), "dev", ["my_dev.jsonl"]),
        (("train/a.jsonl", "val/b.jsonl"), "train", ["train/a.jsonl"]),
        (("extra-00000-of-00001.jsonl", "train.jsonl"), "extra", ["extra-00000-of-00001.jsonl"]),
        (("train_1.jsonl", "train_2.jsonl"), None, ["train_1.jsonl", "train_2.jsonl"]),
        (("constrained.jsonl", "protest.jsonl"), None, ["constrained.jsonl", "protest.jsonl"]),
        ((".cache/b.jsonl", ".a.jsonl", "a.jsonl"), None, ["a.jsonl"]),
    ],
)
def test_names_of_files_say_the_split(
    tmp_path: Path, names: tuple[str, ...], split: str | None, expected: list[str]
) -> None:
    write_files(tmp_path / "rows", *names)
    assert names_read(tmp_path / "rows", split) == expected


@pytest.mark.parametrize(
    ("names", "split", "error"),
    [
        (SHARDS, None, "say the splits test, train. Write data.split=train, or data.split=all"),
        (("a.jsonl", "test.jsonl"), None, "say the splits test and that of a.jsonl none. Write"),
        (SHARDS, "nonsense", r"no split 'nonsense'; .* say test, train. Write data.split=test|tr"),
        (("a.jsonl",), "train", "no split 'train'; names of files say none. Write data.split=all"),
    ],
)
def test_a_split_that_cannot_be_read_is_refused(
    tmp_path: Path, names: tuple[str, ...], split: str | None, error: str
) -> None:
    write_files(tmp_path / "rows", *names)
    with pytest.raises(ValueError, match=error):
        RowSource(str(tmp_path / "rows"), split).digest()


def test_a_file_has_the_split_that_its_name_says(tmp_path: Path) -> None:
    write_files(tmp_path / "test", "train.jsonl", "a.jsonl")
    assert names_read(tmp_path / "test" / "train.jsonl", "train") == ["train.jsonl"]
    with pytest.raises(ValueError, match=r"there is no split 'train'; names of files say none"):
        RowSource(str(tmp_path / "test" / "a.jsonl"), "train").digest()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_a_file_without_rows_is_named(tmp_path: Path, name: str) -> None:
    if name == "a.parquet":
        datasets.Dataset.from_dict({"text": []}).to_parquet(tmp_path / name)
    else:
        (tmp_path / name).write_text({"a.csv": "text\n", "a.json": " []"}.get(name, "\n"))
        (tmp_path / f"0.{name[2:]}").write_text("text\nx\n" if name == "a.csv" else "{}")
    with pytest.raises(ValueError, match=f"{name} holds no row"):
        [*RowSource(str(tmp_path)).batches(9)]


def test_what_has_no_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"folder squad with rows\. Of a data set of the hub"):
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
    said = r"a\.jsonl, line 1: there is no 'body' in it; it has text"
    with pytest.raises(ValueError, match=said):
        TextRows(write(tmp_path, "jsonl"), bpe, field="body")


def test_a_field_that_is_no_text_is_refused(tmp_path: Path, bpe: str) -> None:
    with pytest.raises(ValueError, match=r"a\.parquet, row 1: 'n' is not text: int 0"):
        TextRows(write(tmp_path, "parquet"), bpe, field="n")
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    with pytest.raises(ValueError, match=r"b\.jsonl, line 2: 'text' is null"):
        TextRows(str(tmp_path / "b.jsonl"), bpe)
