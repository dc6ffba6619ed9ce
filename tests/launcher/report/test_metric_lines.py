import json
from pathlib import Path

from flowrun.launcher.report.metric_lines import Losses, read_losses


def test_losses_are_read_without_those_that_are_not_finite(tmp_path: Path) -> None:
    lines = (
        {"step": 0, "loss": 3.0},
        {"step": 1, "loss": None},
        {"step": 1, "validation": {"loss": 2.5}},
        {"step": 2, "loss": 1.0},
    )
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "lo')
    assert read_losses(file) == Losses([(0, 3.0), (2, 1.0)], [(1, 2.5)])
    assert read_losses(tmp_path / "none") == Losses([], [])
