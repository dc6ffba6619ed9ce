import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from flowrun.launcher.data.clicks import ClickLog
from flowrun.launcher.data.corpus.tokens import Tokens, tokenise, write_tokens
from flowrun.launcher.data.huggingface import HuggingFace

# ---- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_targets_are_one_token_ahead(tmp_path: Path, dtype: str) -> None:
    assert write_tokens(tmp_path / "t.bin", [[1, 2, 3], [], [4, 60000, 6, 7]], dtype) == 7
    data = Tokens(str(tmp_path / "t.bin"), length=3, dtype=dtype)
    assert len(data) == 2
    assert data[1]["tokens"].tolist() == [4, 60000, 6] and data[1]["targets"].tolist()[-1] == 7


def test_texts_are_tokenised_one_after_the_other_with_an_end_between(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("ab")
    (tmp_path / "b").write_text("c")
    made = tokenise([tmp_path / "a", tmp_path / "b"], tmp_path / "t", lambda s: [*s.encode()], 256)
    assert made == 5
    assert np.fromfile(tmp_path / "t", dtype="<u2").tolist() == [97, 98, 256, 99, 256]


def test_an_id_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="70000 does not fit uint16"):
        write_tokens(tmp_path / "t", [[70000]])


def test_files_that_are_no_token_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"3 bytes of .* are not a whole number of uint16"):
        Tokens(str(tmp_path / "odd"))
    with pytest.raises(ValueError, match="one of uint16, uint32, not 'int8'"):
        Tokens(str(tmp_path / "odd"), dtype="int8")
    write_tokens(tmp_path / "short", [[1, 2]])
    with pytest.raises(ValueError, match=r"2 tokens of .* do not fill a window of 2 \+ 1"):
        Tokens(str(tmp_path / "short"), length=2)


# ---- clicks --------------------------------------------------------------------------------------

CSV = "click,site,user,price\n1,a,7,3\n0,b,7,\n0,a,,-2\n"


def test_cells_become_ids_numbers_and_clicks(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(CSV)
    data = ClickLog(str(tmp_path / "log.csv"), "click", ["site", "user"], ["price"], ids=20)
    assert len(data) == 3 and [float(data[k]["clicks"]) for k in range(3)] == [1, 0, 0]
    ids = torch.stack([data[k]["ids"] for k in range(3)])
    assert ids.shape == (3, 2) and ids[:, 0].max() < 10 <= ids[:, 1].min() and ids.max() < 20
    assert ids[0, 0] == ids[2, 0] and ids[0, 1] == ids[1, 1]
    numbers = torch.cat([data[k]["numbers"] for k in range(3)])
    torch.testing.assert_close(
        numbers, torch.tensor([1 + 3.0, 1, 1]).log() - torch.tensor([0, 0, 2.0])
    )


def test_cells_that_look_like_numbers_are_texts_of_a_category(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("click,user\n1,007\n0,7\n\n1,NA\n1,\n")
    data = ClickLog(str(tmp_path / "log.csv"), "click", ["user"], ids=1_000_000)
    texts = ("007", "7", "NA", "")
    expected = [zlib.crc32(text.encode()) % 1_000_000 for text in texts]
    assert [int(data[k]["ids"]) for k in range(4)] == expected


def test_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("click,user\n1,7\nyes,7\n")
    with pytest.raises(ValueError, match="conversion error to double: invalid value 'yes'"):
        ClickLog(str(tmp_path / "log.csv"), "click", ["user"])


def test_parquet_reads_as_csv_does(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    import pyarrow.parquet

    (tmp_path / "log.csv").write_text(CSV)
    columns = {
        "click": [1, 0, 0],
        "site": ["a", "b", "a"],
        "user": [7, 7, None],
        "price": [3.0, None, -2.0],
    }
    table = arrow.table(columns)
    pyarrow.parquet.write_table(table, tmp_path / "log.parquet")
    coded = table.set_column(2, "user", table["user"].dictionary_encode())
    pyarrow.parquet.write_table(coded, tmp_path / "coded.parquet")
    first, *others = [
        ClickLog(str(tmp_path / name), "click", ["site", "user"], ["price"])
        for name in ("log.csv", "log.parquet", "coded.parquet")
    ]
    for other in others:
        assert all(torch.equal(first.fields[name], other.fields[name]) for name in first.fields)


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(CSV)
    with pytest.raises(ValueError, match="no column 'sites'; it has click, site, user, price"):
        ClickLog(str(tmp_path / "log.csv"), "click", ["sites"])


# ---- Hugging Face --------------------------------------------------------------------------------


def test_columns_of_a_saved_data_set_are_fields(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `huggingface` is not installed")
    rows = {"input_ids": [[1, 2], [3, 4]], "label": [0, 1], "score": [0.5, 1.5]}
    table = datasets.table.InMemoryTable(pytest.importorskip("pyarrow").table(rows))
    train = datasets.Dataset(table, fingerprint="rows")  # some pairs of libraries can not make one
    datasets.DatasetDict({"train": train}).save_to_disk(tmp_path / "d")
    data = HuggingFace(str(tmp_path / "d"), "train", {"tokens": "input_ids", "score": "score"})
    assert len(data) == 2 and set(data[0]) == {"tokens", "score"}
    assert data[1]["tokens"].tolist() == [3, 4] and data[1]["score"].dtype == torch.float32
    with pytest.raises(ValueError, match="split: it must be one of train, not 'test'"):
        HuggingFace(str(tmp_path / "d"), "test")
