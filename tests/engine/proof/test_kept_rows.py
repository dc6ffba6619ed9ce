"""The rows that ship are proved again, and a wrong one is told."""

from __future__ import annotations

import pytest

from flowrun.engine.ops.table import parse_found
from flowrun.engine.proof.call_form import parse_form
from flowrun.engine.proof.in_child import experiments
from flowrun.engine.proof.kept_rows import SHIPPED, TORCH, Entry, read_rows, write_rows

SHIPPED_ROWS = read_rows(SHIPPED)
SAMPLE = sorted(SHIPPED_ROWS)[::12]


@pytest.mark.skipif(not SHIPPED_ROWS, reason=f"rows for torch {TORCH} do not ship")
def test_a_sample_of_the_rows_that_ship_holds() -> None:
    forms = [parse_form(key, SHIPPED_ROWS[key].sizes) for key in SAMPLE]
    for key, rows in zip(SAMPLE, experiments(forms), strict=True):
        assert set(SHIPPED_ROWS[key].rows) == set(rows), key


def test_a_planted_row_is_no_row_that_holds() -> None:
    key, planted = "aten.glu.default(float[a,b], 1)", parse_found("S(1) -> S(1)")
    (rows,) = experiments([parse_form(key, {"a": 6, "b": 8})])
    assert planted not in rows


def test_what_is_kept_is_read_as_it_was_written(tmp_path: object) -> None:
    from pathlib import Path

    file = Path(str(tmp_path)) / "rows.json"
    rows = (parse_found("B, S(0) -> S(0) | local n, size[1] | mean 0"), parse_found("P, B -> P"))
    write_rows(file, {"aten.x.default(float[a,b])": Entry({"a": 6, "b": 8}, rows)})
    assert read_rows(file) == {"aten.x.default(float[a,b])": Entry({"a": 6, "b": 8}, rows)}
