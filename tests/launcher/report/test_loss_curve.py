"""The curve of a run's loss, as SVG and as text."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from flowrun.launcher.report.loss_curve import (
    LossCurve,
    average,
    draw,
    loss_axis,
    plot_text,
    read_curve,
    write_curve,
)


def write(folder: Path, *lines: object) -> Path:
    """metrics.jsonl with these lines, and one that is cut off."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 9, "lo')
    return folder / "metrics.jsonl"


def test_losses_are_read_without_those_that_are_no_number(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {"step": 0, "loss": 3.0},
        {"step": 1, "loss": None},
        {"step": 1, "validation": {"loss": 2.5}},
        {"step": 2, "loss": 1.0},
    )
    curve = read_curve(file)
    assert curve == LossCurve([(0, 3.0), (2, 1.0)], [(1, 2.5)])
    assert (curve.best, curve.best_validation) == ((2, 1.0), (1, 2.5))
    assert read_curve(tmp_path / "none") == LossCurve([], [])


def test_a_long_run_is_drawn_by_means() -> None:
    points = [(float(k), float(k % 2)) for k in range(10_001)]
    drawn = average(points)
    assert len(drawn) <= 600
    assert all(abs(value - 0.5) < 0.1 for _, value in drawn)


@pytest.mark.parametrize(
    ("losses", "log", "ticks"),
    [
        ([1.0, 2.0], False, [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]),
        ([0.01, 2.0], True, [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2]),
        ([0.0, 100.0], False, [0, 20, 40, 60, 80, 100]),
        ([3.0, 3.0], False, [2.7, 2.8, 2.9, 3.0, 3.1, 3.2, 3.3]),
    ],
)
def test_axes_have_round_labels(losses: list[float], log: bool, ticks: list[float]) -> None:
    axis = loss_axis(losses)
    assert axis.log == log
    assert axis.ticks() == pytest.approx(ticks)


@pytest.mark.parametrize("steps", [[0], [50], [0, 1], range(1000)])
def test_the_picture_is_svg_within_its_frame(steps: list[int], tmp_path: Path) -> None:
    lines = [{"step": k, "loss": 1 + 1 / (k + 1)} for k in steps]
    write(tmp_path, *lines, {"step": steps[-1], "validation": {"loss": 1.5}})
    write_curve(tmp_path, "a < b")
    root = ElementTree.parse(tmp_path / "loss.svg").getroot()
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "a < b" and {"step", "training", "validation"} <= set(texts)
    for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 760 and 0 <= y <= 380


def test_a_run_without_steps_has_no_picture(tmp_path: Path) -> None:
    write_curve(tmp_path, "nothing")
    assert not (tmp_path / "loss.svg").exists()
    assert "validation" not in draw(LossCurve([(0, 1.0)], []), "one step")


def test_two_curves_as_text_fill_the_width() -> None:
    curves = [[(float(k), 3.0 - k / 50) for k in range(100)], [(float(k), 3.0) for k in range(50)]]
    lines = plot_text(curves, width=60, height=5)
    assert all(len(line) <= 60 for line in lines) and len(lines) == 7
    text = "\n".join(lines)
    assert text.count("●") > 40 and text.count("○") >= 20 and "step 99" in lines[-1]
