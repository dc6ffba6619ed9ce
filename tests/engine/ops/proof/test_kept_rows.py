from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowrun.engine.ir.own_files import read_own
from flowrun.engine.ir.table import FoundRow, parse_found_row
from flowrun.engine.ops.proof import kept_rows as module
from flowrun.engine.ops.proof.call_form import CallForm
from flowrun.engine.ops.proof.in_child import experiments
from flowrun.engine.ops.proof.kept_rows import (
    SHIPPED,
    TORCH,
    KeptRow,
    KeptRows,
    read_rows,
    rows_text,
    shipped_rows,
)
from support.plans.parse_form import parse_form

# The gradient of max pooling writes at positions that it does not check: a wrong row, as most are
# that are tried, writes beyond a piece.
SAMPLE = sorted(key for key in shipped_rows() if "max_pool" not in key)[::12]
HARDSWISH = "aten.hardswish.default(float[a,b])"  # has a table by hand, so it does not ship
BOTH = (parse_found_row("S(0) -> S(0)"), parse_found_row("S(1) -> S(1)"))


def form(key: str) -> CallForm:
    return parse_form(key, {"a": 6, "b": 8})


def untrue(entries: dict[str, KeptRow]) -> list[str]:
    """Forms whose rows are not those that hold."""
    actual = experiments([parse_form(key, entry.sizes) for key, entry in entries.items()])
    return [
        key for (key, entry), rows in zip(entries.items(), actual, strict=True)
        if set(entry.rows) != set(rows)
    ]  # fmt: skip


def test_rows_ship_for_the_torch_that_made_them() -> None:
    text = SHIPPED.read_text()
    made_with = text.split('"')[3]
    assert len(read_rows(text, made_with)) > 100
    assert bool(shipped_rows()) == (made_with == TORCH)


@pytest.mark.skipif(not SAMPLE, reason=f"rows for {TORCH} do not ship")
def test_a_sample_of_the_rows_that_ship_holds() -> None:
    assert untrue({key: shipped_rows()[key] for key in SAMPLE}) == []


@pytest.mark.skipif(not SAMPLE, reason=f"rows for {TORCH} do not ship")
def test_a_wrong_row_planted_in_the_file_that_ships_is_reported() -> None:
    key = next(key for key in SAMPLE if len(shipped_rows()[key].rows) > 1)
    good = shipped_rows()[key]
    first = good.rows[0]
    wrong = replace(first, means=(0,) if not first.means else ())
    text = rows_text({key: replace(good, rows=(wrong, *good.rows[1:]))})
    assert untrue(read_rows(text)) == [key]


def test_what_is_kept_is_read_as_it_was_written() -> None:
    rows = (
        parse_found_row("B, S(0) -> S(0) | local n, size[1] | mean 0"),
        parse_found_row("P, B -> P"),
    )
    entries = {"aten.x.default(float[a,b])": KeptRow({"a": 6, "b": 8}, rows)}
    assert read_rows(rows_text(entries)) == entries
    assert read_rows(rows_text(entries, "torch 2.99")) == {}


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Forms that were tried."""
    names: list[str] = []

    def spy(forms: Sequence[CallForm]) -> list[tuple[FoundRow, ...]]:
        names.extend(map(str, forms))
        return [BOTH for _ in forms]

    monkeypatch.setattr(module, "experiments", spy)
    return names


def learn(file: Path | None, key: str = HARDSWISH) -> KeptRows:
    kept = KeptRows(file)
    kept.learn([form(key)])
    assert kept.table([form(key)]) is not None
    return kept


def test_the_next_run_tries_nothing(tmp_path: Path, tried: list[str]) -> None:
    learn(tmp_path / "found_rows")
    learn(tmp_path / "found_rows")
    assert tried == [HARDSWISH]


@pytest.mark.parametrize("kind", ["damaged", "another prover"])
def test_what_cannot_be_trusted_is_tried_again(
    kind: str, tmp_path: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "found_rows"
    learn(file)
    if kind == "damaged":
        file.write_bytes(file.read_bytes().replace(b"S(1) -> S(1)", b"S(1) -> S(0)"))
    else:
        monkeypatch.setattr(module, "_prover", lambda: "another")
    learn(file)
    assert tried == [HARDSWISH, HARDSWISH]
    learn(file)  # and kept again
    assert len(tried) == 2


def test_rows_of_custom_ops_do_not_outlive_the_process(tmp_path: Path, tried: list[str]) -> None:
    def negate(x: torch.Tensor) -> torch.Tensor:
        return -x

    torch.library.custom_op("kept_rows::negate", negate, mutates_args=())
    key = "kept_rows.negate.default(float[a,b])"
    for _ in range(2):
        learn(tmp_path / "found_rows", key)
    assert tried == [key, key]
    assert b"negate" not in read_own(tmp_path / "found_rows")
