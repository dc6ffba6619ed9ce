import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrun.launcher.bench.process import Sample
from flowrun.launcher.bench.results import FinishedRun, ResultLine, distance, lines
from flowrun.launcher.bench.suite import FLOWRUN, Suite, parse

TREE = {
    **{"name": "two", "note": "", "recipe": "gpt_bench", "overrides": [], "rows": ["data"]},
    **{"modes": ["eager"], "rounds": 2, "steps": 4, "warmup": 1, "loss_tolerance": 1e-4},
    **{"timeout_s": 9, "efficiency_of": "single", "settings": {"as is": {}}, "mode_overrides": {}},
    "experiments": {
        "single": {"ranks": 1},
        "data": {"peers": {"DDP": {"kind": "ddp"}}, "at_most": {"as is": 0.6}, "efficiency": 0.9},
    },
}
SUITE: Suite = parse(TREE)
SINGLE, OURS = ("single", FLOWRUN, "eager", ""), ("data", FLOWRUN, "eager", "")
THEIRS = ("data", "DDP", "eager", "as is")


def sample(*step_s: float, losses: tuple[float, ...] = (4.0, 3.0)) -> Sample:
    """The first step is warm-up."""
    taken = {"peak_bytes": 100, "sent_bytes": 8.0, "work": 40.0, "unit": "tokens"}
    return Sample(step_s=(9.0, *step_s), losses=losses, **taken)


def lines_of(*records: FinishedRun) -> tuple[ResultLine, ResultLine]:
    """Of what was asked for; the rank that efficiency is counted from has the first line."""
    single, ours, theirs = lines(SUITE, records)
    assert (single.experiment, single.side) == ("single", FLOWRUN)
    return ours, theirs


def test_the_median_is_over_the_steps_of_all_rounds_without_warm_up() -> None:
    ours, _ = lines_of(FinishedRun(0, OURS, sample(1, 2, 3)), FinishedRun(1, OURS, sample(5, 7, 8)))
    assert (ours.median_s, ours.min_s, ours.rounds) == (4.0, 1, 2)
    assert (ours.peak_bytes, ours.sent_bytes, ours.per_s, ours.unit) == (100, 8.0, 10.0, "tokens")


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio"),
    [
        pytest.param((4, 1), (8, 4), 0.375, id="4 / 8 in a slow round, then 1 / 4"),
        pytest.param((4, 1), (5,), 0.8, id="a round that one side has not"),
    ],
)
def test_a_ratio_is_the_median_of_the_rounds_own(
    ours: tuple[float, ...], theirs: tuple[float, ...], ratio: float
) -> None:
    records = [FinishedRun(k, OURS, sample(step_s)) for k, step_s in enumerate(ours)]
    records += [FinishedRun(k, THEIRS, sample(step_s)) for k, step_s in enumerate(theirs)]
    _, line = lines_of(*records)
    assert line.ratio == pytest.approx(ratio)
    assert line.at_most == 0.6 and line.holds is (ratio < 0.6)


def test_efficiency_is_one_rank_over_ranks_times_time() -> None:
    one = FinishedRun(0, SINGLE, sample(3, 3, 3))
    ours, _ = lines_of(one, FinishedRun(0, OURS, sample(2, 2, 2)))
    assert ours.efficiency == pytest.approx(0.75)
    assert ours.at_least == 0.9 and ours.holds is False


def test_without_one_rank_there_is_no_efficiency() -> None:
    ours, theirs = lines_of(FinishedRun(0, OURS, sample(2, 2, 2)))
    assert ours.efficiency is None and ours.holds is None
    assert theirs.median_s is None and theirs.rounds == 0 and theirs.holds is None


def test_a_failed_run_is_a_reason_and_no_number() -> None:
    failed = FinishedRun(0, THEIRS, Sample(problem="no such schedule"))
    _, theirs = lines_of(FinishedRun(0, OURS, sample(2, 2, 2)), failed)
    assert theirs.problem == "no such schedule"
    assert theirs.median_s is None and theirs.ratio is None and theirs.agree is None


@pytest.mark.parametrize(("loss", "agree"), [(3.0002, True), (3.001, False), (math.nan, False)])
def test_losses_agree_within_the_tolerance(loss: float, agree: bool) -> None:
    ours = FinishedRun(0, OURS, sample(2, losses=(4.0, loss)))
    _, theirs = lines_of(ours, FinishedRun(0, THEIRS, sample(2)))
    assert theirs.agree is agree


def test_losses_of_unlike_length_are_infinitely_apart() -> None:
    assert distance([1.0], [1.0, 2.0]) == math.inf


FACTORS = st.floats(0.1, 10)


@given(st.lists(FACTORS, min_size=1, max_size=5), FACTORS, FACTORS)
def test_a_slower_machine_changes_no_ratio(
    steps: list[float], factor: float, slower: float
) -> None:
    """Both sides of a round, by the same factor."""

    def ratio(times: float) -> float | None:
        ours, theirs = (sample(*(s * each * times for s in steps)) for each in (factor, 1.0))
        return lines_of(FinishedRun(0, OURS, ours), FinishedRun(0, THEIRS, theirs))[1].ratio

    assert ratio(slower) == pytest.approx(ratio(1.0)) == pytest.approx(factor)


def test_another_layout_of_flowrun_is_compared_as_a_peer_is() -> None:
    experiment = {"others": {"by hand": ["parallel=manual"]}, "at_most": {"by hand": 0.6}}
    given = parse({**TREE, "experiments": {"data": experiment}, "efficiency_of": None})
    by_hand = FinishedRun(0, ("data", "by hand", "eager", ""), sample(2, 2, 2))
    ours, theirs = lines(given, [FinishedRun(0, OURS, sample(1, 1, 1)), by_hand])
    assert (ours.side, ours.ratio) == (FLOWRUN, None)
    assert (theirs.side, theirs.ratio, theirs.holds, theirs.agree) == ("by hand", 0.5, True, True)
