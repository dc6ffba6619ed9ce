"""A sweep's trials, rows and sums."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flowrun.engine.errors import RecipeError
from flowrun.launcher.bench.process import Sample
from flowrun.launcher.bench.suite import Suite, Sweep, load_suite
from flowrun.launcher.bench.sweep import (
    Trial,
    candidates,
    final_steps,
    finalists,
    join_picks,
    rows,
    run_of,
    sums,
    sweep,
)
from flowrun.launcher.bench.sweep_profile import recipes_to_time
from flowrun.launcher.bench.sweep_show import table
from flowrun.launcher.place.space import Branch, Candidate
from flowrun.launcher.recipe.compose import load

SUITE, _ = load_suite(["suite=auto", "suite.steps=3", "suite.warmup=1"])
PLAIN = Candidate(Branch((("data", 2), ("tensor", 1)), 1, 1))
SHARDED = Candidate(Branch((("data", 2), ("tensor", 1)), 1, 4), zero=2)
FAILED: tuple[Sample, dict[str, Any]] = Sample(problem="it broke"), {}


def heard(step_s: float, foreseen_s: float, peak: int) -> tuple[Sample, dict[str, Any]]:
    report = {
        "foreseen": {"step_s": foreseen_s, "peak_bytes": {"0": 90, "1": 80}},
        "measured": {"peak_bytes": {"0": peak, "1": peak - 1}},
    }
    return Sample(step_s=(9.0, step_s, step_s)), report


def test_rows_are_ranked_by_what_was_measured_and_tell_how_far_behind_they_are() -> None:
    trials = {
        Trial("gpt_small", 2, PLAIN, picked=True): [heard(1.1, 1.0, 100), heard(1.1, 1.0, 100)],
        Trial("gpt_small", 2, SHARDED): [heard(1.0, 1.2, 90), heard(1.0, 1.2, 90)],
    }
    first, second = rows(SUITE, trials)
    assert (first.trial.candidate, first.place, first.behind) == (SHARDED, 1, 0.0)
    assert second.place == 2 and second.behind == pytest.approx(0.1)
    assert (second.foreseen_bytes, second.measured_bytes) == (90, 100)
    found = sums((first, second))
    assert found.worst == pytest.approx(0.1)
    assert found.time_off == pytest.approx((0.2 + (1 - 1 / 1.1)) / 2)
    assert found.memory_off == pytest.approx(0.05)


def test_what_was_measured_in_the_first_round_alone_is_ranked_behind() -> None:
    """The hour of the finals was slower."""
    trials = {
        Trial("gpt_small", 2, SHARDED): [heard(1.2, 1.0, 90)],
        Trial("gpt_small", 2, PLAIN, picked=True): [
            heard(1.0, 1.0, 90),
            *[heard(1.3, 1.0, 90)] * 4,
        ],
    }
    first, second = rows(SUITE, trials)
    assert (first.trial.picked, first.place, first.behind) == (True, 1, 0.0)
    assert second.behind < 0


def test_a_pick_takes_over_what_was_heard_of_its_layout_or_joins() -> None:
    trials = [Trial("gpt_small", ranks, PLAIN) for ranks in (2, 4)]
    heard_of = {trial: [heard(1.0 * trial.ranks, 1.0, 90)] for trial in trials}
    known, late = (Trial("gpt_small", 2, each, picked=True) for each in (PLAIN, SHARDED))
    assert join_picks(trials, [late], heard_of) == [trials[0], late, trials[1]]
    assert join_picks(trials, [known], heard_of) == [known, trials[1]]
    assert heard_of[known] == [heard(2.0, 1.0, 90)] and trials[0] not in heard_of


def test_a_pick_that_joined_late_is_ranked_with_the_others_of_the_finals() -> None:
    assert SUITE.rounds == 2
    finals = [heard(1.2, 1.0, 90)] * 3
    late = Trial("gpt_small", 2, SHARDED, picked=True)
    found = rows(
        SUITE,
        {
            Trial("gpt_small", 2, PLAIN): [heard(1.3, 1.0, 90)] * 5,
            late: [heard(1.2, 1.0, 90), *finals],
        },
    )
    assert found[0].trial == late and found[1].behind > 0


def test_a_run_that_failed_is_a_row_with_its_reason() -> None:
    trials = {
        Trial("gpt_small", 2, PLAIN): [heard(1.0, 1.0, 100)],
        Trial("gpt_small", 2, SHARDED): [FAILED],
    }
    found = rows(SUITE, trials)
    assert [row.problem for row in found] == ["", "it broke"]
    text = io.StringIO()
    Console(file=text, width=160).print(table(SUITE, found))
    assert "it broke" in text.getvalue()


def test_finalists_are_what_may_be_the_fastest_and_the_picks() -> None:
    times = {0: 1.0, 1: 1.1, 2: 1.3, 3: 1.5}  # ZeRO -> measured
    trials = {
        Trial("gpt_small", ranks, replace(PLAIN, zero=zero), picked=zero == 3): [
            heard(step_s * ranks, 1.0, 100)
        ]
        for ranks in (2, 4)
        for zero, step_s in times.items()
    }
    broken = Trial("gpt_small", 2, SHARDED, picked=True)
    found = finalists(SUITE, [*trials, broken], rows(SUITE, {**trials, broken: [FAILED]}))
    assert [trial.candidate.zero for trial in found] == [0, 1, 3, 0, 1, 3]


@pytest.mark.parametrize(("step_s", "steps"), [(0.01, 1 + 600), (0.7, 1 + 9), (9.0, 3)])
def test_a_run_of_the_finals_takes_its_seconds(step_s: float, steps: int) -> None:
    """Its warm-up comes on top; it has no fewer steps than the others."""
    assert SUITE.sweep is not None and SUITE.sweep.final_s == 6
    trial = Trial("gpt_small", 2, PLAIN)
    assert final_steps(SUITE, trial, [heard(step_s, 1.0, 100)]) == steps


def test_the_modest_set_has_every_grid_and_no_more_stages_than_micro_batches() -> None:
    recipe = load(["recipe=gpt_bench", "train.batch_size=16"])
    found = list(candidates(recipe, 4, Sweep((4,), (1, 4), (0, 2))))
    assert len(found) == len(set(found))
    assert len({each.branch.grid for each in found}) == 6
    assert all(each.branch.stages <= each.branch.micro_batches for each in found)
    assert {each.zero for each in found} == {0, 2}


@pytest.mark.parametrize("candidate", [PLAIN, SHARDED])
def test_a_run_trains_the_candidate(candidate: Candidate) -> None:
    recipe = load(list(run_of(SUITE, Trial("gpt_small", 2, candidate), 5).overrides))
    assert recipe.train.steps == 5
    assert recipe.train.micro_batches == candidate.branch.micro_batches
    assert recipe.zero.stage == candidate.zero
    assert recipe.num_ranks == 2


def test_a_wrong_recipe_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    wrong, _ = load_suite(["suite=auto", "suite.experiments.wide_deep.recipe=wide_and_deep"])
    assert isinstance(wrong, Suite)
    with pytest.raises(RecipeError, match="wide_and_deep"):
        sweep(wrong, tmp_path / "out", Console(file=io.StringIO()))
    assert not (tmp_path / "out").exists()


def test_ops_are_timed_on_one_rank_and_on_all_grids_of_most_of_them() -> None:
    found = {
        (*sorted(dict(recipe.placements[0].axes).items()), recipe.train.micro_batches)
        for recipe in recipes_to_time(SUITE, "gpt_small")
        if recipe.zero.stage == 0 and len(recipe.placements) == 1
    }
    data, tensor, both = (("data", 4),), (("tensor", 4),), (("data", 2), ("tensor", 2))
    assert found == {(*grid, m) for grid in ((), data, tensor, both) for m in (1, 4)}
