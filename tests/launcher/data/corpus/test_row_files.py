import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from flowrun.launcher.data.corpus.row_source import PARSERS, PlacedRow

# What readers that infer types make dates, numbers and nulls of.
TEXTS = ["2020-01-09", "007", "1.10", "NA", "null", "", "true", "2020-01-09T10:00:00Z", 'a,\n"b"']


def read(file: Path) -> list[dict[str, Any]]:
    return [row.fields for row in PARSERS[file.suffix](file)]


@pytest.mark.parametrize("suffix", [*PARSERS])
def test_text_stays_text(tmp_path: Path, suffix: str) -> None:
    import csv

    rows, file = [{"a": text, "b": "x"} for text in TEXTS], tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif suffix == ".csv":
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, ["a", "b"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    assert read(file) == rows


def test_a_json_file_may_be_a_list(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('\ufeff\n [{"a": "1"},\n {"a": null}]', encoding="utf-8")
    assert read(tmp_path / "a.json") == [{"a": "1"}, {"a": None}]
    (tmp_path / "a.json").write_text('[{"a": "1"},\n {"a" null}]')
    with pytest.raises(ValueError, match=r"a\.json, line 2, column 7 is not JSON: Expecting ':' d"):
        read(tmp_path / "a.json")


def test_fields_may_come_and_change_at_any_line(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"a": "x"}] * 3000 + [{"a": "x", "b": {"c": 1}}, {"a": 3}]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert read(tmp_path / "a.jsonl") == rows


def test_rows_know_their_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\r\n\n  \n{"a": "\u2028"}\n')
    (tmp_path / "a.csv").write_text('a,b\n"1\n2",3\n\n4,5\n')
    lines = PARSERS[".jsonl"](tmp_path / "a.jsonl")
    cells = PARSERS[".csv"](tmp_path / "a.csv")
    assert [row.place.split(", ")[-1] for row in lines] == ["line 1", "line 4"]
    assert [row.place.split(", ")[-1] for row in cells] == ["line 3", "line 5"]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        (
            "a.jsonl",
            b'{"a": 1}\n{"a" 1}\n',
            r"a\.jsonl, line 2, column 6 is not JSON: Expecting ':'",
        ),
        ("a.jsonl", b'{"a": 1}\n[1]\n', r"a\.jsonl, line 2 is not an object .*: list \[1\]"),
        ("a.jsonl", b'\n{"a": "\xe9"}\n', r"a\.jsonl, line 2 is not UTF-8 text: byte 7 is 0xe9"),
        ("a.jsonl", b'{"a": "\\ud8f0|end|>"}', r"line 1: \\ud8f0 alone is half of a character"),
        ("a.json", b'{\n"a": 1\n}', r"a\.json, line 1, column 2 is not JSON: .* a line of its own"),
        ("a.csv", b"a,b\n1,2\n3\n", r"a\.csv, line 3: a row has a cell for each of a, b"),
        ("a.csv", b"a,b,a\n1,2,3\n", r"a\.csv has more than one column a"),
        ("a.csv", b'a,b\n1,2\n3,"4\n', r"a\.csv, line 3 is not CSV: unexpected end of data"),
        ("a.csv", b"a,b\n1,\xe9\n", r"a\.csv, line 1 or later is not UTF-8 text: a byte is 0xe9"),
        ("a.parquet", b"no", r"a\.parquet cannot be read after row 0: "),
    ],
)
def test_what_cannot_be_read_is_named_by_file_and_line(
    tmp_path: Path, name: str, content: bytes, error: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=error):
        read(tmp_path / name)


def test_two_halves_are_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "\\ud83d\\ude00"}')
    assert read(tmp_path / "a.jsonl") == [{"a": "\U0001f600"}]


@given(st.lists(st.dictionaries(st.text(), st.text() | st.none() | st.integers()), max_size=4))
def test_any_rows_of_json_are_themselves(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    file = tmp_path_factory.mktemp("rows") / "a.jsonl"
    file.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), "utf-8")
    expected = [PlacedRow(f"{file}, line {number}", row) for number, row in enumerate(rows, 1)]
    assert [*PARSERS[".jsonl"](file)] == expected
