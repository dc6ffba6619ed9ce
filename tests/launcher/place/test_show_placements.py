from dataclasses import replace

import pytest
from rich.console import Console

from flowrun.launcher.place.outcome import Outcome, Spent
from flowrun.launcher.place.placement_search import PlacementResult
from flowrun.launcher.place.show_placements import table
from flowrun.launcher.place.space import Branch, Candidate


def outcome(stages: int, step_s: float, spent: Spent, missing: int = 0) -> Outcome:
    axes = (("data", 3072 // 8 // stages), ("tensor", 8))
    candidate = Candidate(Branch(axes, stages, 192), stages, 1, ("blocks.*",), keep=("matmul",))
    return Outcome(
        candidate,
        step_s,
        70 * 10**9,
        missing,
        rank=2880,
        stage=15,
        sent_bytes=5e14,
        bubble=0.4,
        spent=spent,
        extrapolated=True,
    )


@pytest.mark.parametrize("width", [80, 100, 120])
def test_reasons_can_be_read_at_any_width_and_told_is_compared_with_told(width: int) -> None:
    estimate = outcome(16, 9.0, Spent(6.0, 0.5, 1.0, 1.5))
    best = replace(estimate, step_s=10.0, extrapolated=False, estimate=estimate)
    slower = outcome(24, 9.9, Spent(6.0, 0.5, 1.0, 2.4))
    lacking = outcome(48, 8.0, Spent(6.0, 0.5, 1.0, 0.5), missing=31 * 10**9)
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table(PlacementResult(outcomes=(best, slower, lacking))))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24, "a squeezed column makes a tower of letters"
    said = " ".join(" ".join(lines).split())
    assert "10.00 s ~9.00 s 70.0 GB" in said
    assert "- the best" in said
    assert (
        "- 10.0% slower: bubble +900.0 ms" in said
    )  # than the 9.0 s that were estimated for the best
    assert "- rank 2880 (stage 15) lacks 31.0 GB" in said
