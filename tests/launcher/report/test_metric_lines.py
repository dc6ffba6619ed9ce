import json
from pathlib import Path

import pytest

from flowrun.launcher.report.metric_lines import parse_metric_line, read_losses


def test_losses_are_read_without_those_that_are_not_finite(tmp_path: Path) -> None:
    lines = (
        {"step": 0, "loss": 3.0},
        {"step": 1, "loss": None},
        {"step": 1, "validation": {"loss": 2.5}},
        {"step": 2, "loss": 1.0},
    )
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "lo')
    assert read_losses(file) == {"loss": [(0, 3.0), (2, 1.0)], "validation": [(1, 2.5)]}
    assert read_losses(tmp_path / "none") == {"loss": [], "validation": []}


@pytest.mark.parametrize(
    "line",
    [
        '{"step": Infinity, "loss": 1.0}',
        '{"step": NaN}',
        f'{{"step": 1, "loss": 1{"0" * 400}}}',
        '{"step": 1, "validation": [1.0]}',
        '{"step": 1, "validation": {"loss": [1.0]}}',
        "[" * 100_000,
        '"validation"',
        "7",
    ],
    ids=lambda line: line[:20],
)
def test_a_damaged_line_is_none(line: str) -> None:
    assert parse_metric_line(line) is None
