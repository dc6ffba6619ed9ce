"""A suite that sweeps: every layout of a modest set and the one that auto.placement picks, each
foreseen and measured.

    suite -> trials (model, ranks, candidate) -> rounds of runs, the picks in the last of them
          -> finals -> rows -> table, sweep.json
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from flowrun.engine.errors import FlowrunError
from flowrun.launcher.bench.bench import machine, sigterm_as_ctrl_c
from flowrun.launcher.bench.process import Sample, execute
from flowrun.launcher.bench.results import step_seconds
from flowrun.launcher.bench.runs import FLOWRUN, Run
from flowrun.launcher.bench.suite import Suite, Sweep
from flowrun.launcher.job.job import Job
from flowrun.launcher.place.captures import Captures
from flowrun.launcher.place.place import place_by
from flowrun.launcher.place.planner import Planner
from flowrun.launcher.place.space import Candidate, Space
from flowrun.launcher.recipe.compose import compose, load
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.report.report import strict
from flowrun.launcher.terminal.units import seconds

FILE = "sweep.json"
RunResult = tuple[Sample, Mapping[str, Any]]  # of one run, and its report.json


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial: one layout of a model.  picked: auto.placement chose it."""

    experiment: str
    ranks: int
    candidate: Candidate
    picked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The result of a trial: time of a step, and memory of the rank that takes most (live tensors).

    place: by measured time among the trials of the model and ranks, 1 = the fastest.
    problem: why nothing was measured.
    """

    trial: Trial
    foreseen_s: float = 0.0
    measured_s: float = 0.0
    foreseen_bytes: int = 0
    measured_bytes: int = 0
    place: int = 0
    behind: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Sums:
    """A summary of all rows.

    time_off, memory_off: median of how far foreseen is from measured, relative.  worst: how far the
    worst pick is behind the fastest layout measured.
    """

    time_off: float
    memory_off: float
    worst: float


def sweep(
    suite: Suite, folder: Path, console: Console, config_dir: str | None = None
) -> tuple[TrialResult, ...]:
    """Run the suite, print its table to `console`, fill `folder`; results are written after each
    run.

    Models come one after another, each from its ops to its last run: a machine that others share is
    slower in one hour than in another, and what was foreseen with the figures of one hour is not
    what another measures.  config_dir: the user's own groups.
    Raises RecipeError if a recipe cannot be composed; nothing was started then.
    """
    from flowrun.launcher.bench.sweep_profile import Profile, measured_machine
    from flowrun.launcher.bench.sweep_show import table

    for name in suite.rows:
        compose(suite.recipe_of(suite.experiments[name]), config_dir)
    folder.mkdir(parents=True, exist_ok=True)
    assert suite.sweep is not None
    named = any(text.startswith("hardware=") for text in suite.overrides)
    finished: dict[Trial, list[RunResult]] = {}
    try:
        with sigterm_as_ctrl_c():
            calibrated = suite.sweep.calibrate and config_dir is None and not named
            hardware = measured_machine(console) if calibrated else None
            for name in suite.rows:
                one, groups, measure = suite, config_dir, _nothing
                if hardware is not None:
                    profile = Profile(hardware, suite, name, folder)
                    one, groups, measure = profile.suite, str(profile.groups), profile.measure
                _rounds(one, folder, console, groups, name, finished, measure)
    finally:
        measured = rows(suite, finished)
        if measured:
            console.print()
            console.print(table(suite, measured))
            console.print(f"the same in {folder}: {FILE}", highlight=False, soft_wrap=True)
    return measured


def _rounds(
    suite: Suite,
    folder: Path,
    console: Console,
    config_dir: str | None,
    name: str,
    finished: dict[Trial, list[RunResult]],
    measure: Callable[[Console], None],
) -> None:
    """Run the rounds of one row.

    measure: measures what foresees the row, before every round but the finals.  The pick is made
    before the last of these rounds, by all that was measured, as all that the table foresees is.  A
    trial that failed once is not tried again.
    """
    assert suite.sweep is not None
    measure(console)
    turn: Sequence[Trial] = list(trials(suite, name, config_dir))
    begun, done = time.monotonic(), 0
    last = suite.rounds + suite.sweep.finals
    for number in range(last):
        if 0 < number < suite.rounds:
            measure(console)
        if number == suite.rounds - 1:
            turn = join_picks(turn, picks(suite, name, console, config_dir), finished)
        elif number == suite.rounds:
            turn = finalists(suite, turn, rows(suite, finished))
        for k, trial in enumerate(turn):
            before = finished.get(trial, [])
            if before and before[-1][0].problem:
                continue
            where = folder / "runs" / f"{number}_{k:03}_{trial.experiment}"
            console.print(
                f"round {number + 1}/{last}  run {k + 1}/{len(turn)}"
                f"  {trial.experiment}, {trial.ranks} ranks: {trial.candidate} …",
                end=" ",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
            final = number >= suite.rounds
            count = final_steps(suite, trial, before) if final else suite.steps
            sample = execute(run_of(suite, trial, count), where, suite.timeout_s, config_dir)
            file = where / "report.json"
            report = json.loads(file.read_text()) if file.exists() else {}
            finished[trial] = [*before, (sample, report)]
            write(suite, rows(suite, finished), folder / FILE)
            steps, done = step_seconds(suite, sample), done + 1
            told = seconds(statistics.median(steps)) if steps else sample.problem
            end = suite.rounds if number < suite.rounds else last
            runs = (end - number) * len(turn) - k - 1
            left = f"{(time.monotonic() - begun) / done * runs:.0f} s left of this model"
            left += ", then the fastest again" if end < last else ""
            console.print(f"{told}; {left}", highlight=False, markup=False)


def _nothing(console: Console) -> None:
    """The profile is what it is."""


def finalists(
    suite: Suite, found: Sequence[Trial], measured: Sequence[TrialResult]
) -> tuple[Trial, ...]:
    """Choose among the trials found those that may be the fastest by what was measured, and the
    picks; all trials of a close comparison have equally many rounds.  suite: says what is close.
    """
    assert suite.sweep is not None
    near = {
        row.trial
        for row in measured
        if not row.problem and (row.behind <= suite.sweep.near or row.trial.picked)
    }
    return tuple(trial for trial in found if trial in near)


def trials(suite: Suite, name: str, config_dir: str | None = None) -> Iterator[Trial]:
    """Yield the modest set of row `name` of the suite, for every number of ranks.

    config_dir: the user's own groups.
    """
    assert suite.sweep is not None
    recipe = _placed_by_auto(suite, name, config_dir)
    for ranks in suite.sweep.ranks:
        for candidate in candidates(recipe, ranks, suite.sweep):
            yield Trial(name, ranks, candidate)


def picks(
    suite: Suite, name: str, console: Console, config_dir: str | None = None
) -> Iterator[Trial]:
    """Yield what auto.placement picks, if anything, for row `name` of the suite and every number of
    ranks.

    console: takes a line for each search.  config_dir: the user's own groups.
    """
    assert suite.sweep is not None
    captures = Captures(Job(_placed_by_auto(suite, name, config_dir), values=False))
    for ranks in suite.sweep.ranks:
        try:
            pick = place_by(Planner(captures, ranks)).best.candidate
        except FlowrunError as error:
            said = f"{name}, {ranks} ranks: nothing is picked. {error}"
        else:
            said = f"{name}, {ranks} ranks: picked {pick}"
            yield Trial(name, ranks, pick, picked=True)
        console.print(said, highlight=False, markup=False, soft_wrap=True)


def _placed_by_auto(suite: Suite, name: str, config_dir: str | None) -> Recipe:
    return load([*suite.recipe_of(suite.experiments[name]), "auto.placement=true"], config_dir)


def join_picks(
    modest: Sequence[Trial], found: Iterable[Trial], finished: dict[Trial, list[RunResult]]
) -> list[Trial]:
    """Join the modest set and the picks `found`; a pick takes its layout's run of `finished`."""
    by_layout = {replace(trial, picked=False): trial for trial in modest}
    for pick in found:
        plain = replace(pick, picked=False)
        by_layout[plain] = pick
        if plain in finished:
            finished[pick] = finished.pop(plain)
    return sorted(by_layout.values(), key=lambda trial: trial.ranks)


def candidates(recipe: Recipe, ranks: int, wanted: Sweep) -> Iterator[Candidate]:
    """Yield all grids of `ranks` ranks for a recipe, as the sweep `wanted` asks: no more stages
    than micro-batches, and the default schedule alone.
    """
    tree: Any = OmegaConf.to_container(OmegaConf.create(recipe.text))
    space = Space.of(tree, ranks)
    for branch in space.branches():
        if branch.micro_batches in wanted.micro_batches and branch.stages <= branch.micro_batches:
            for leaf in space.leaves(branch):
                if leaf.zero in wanted.zero and leaf.in_flight == "auto":
                    yield leaf


def final_steps(suite: Suite, trial: Trial, finished: Sequence[RunResult]) -> int:
    """Return the number of steps of a trial's run in the finals, by its runs before (`finished`).

    suite: says how many seconds a run takes.
    """
    assert suite.sweep is not None
    row = _row(suite, trial, finished)
    if row.problem:
        return suite.steps
    return max(suite.steps, suite.warmup + math.ceil(suite.sweep.final_s / row.measured_s))


def run_of(suite: Suite, trial: Trial, steps: int) -> Run:
    """Make the run of a trial of the suite with a number of steps: flowrun alone."""
    overrides = (
        *replace(suite, steps=steps).recipe_of(suite.experiments[trial.experiment]),
        *trial.candidate.overrides,
    )
    return Run(
        experiment=trial.experiment,
        side=FLOWRUN,
        mode=suite.modes[0],
        setting="",
        overrides=overrides,
        environment={},
        ranks=trial.ranks,
    )


def rows(suite: Suite, finished: Mapping[Trial, Sequence[RunResult]]) -> tuple[TrialResult, ...]:
    """A row a trial, those of one model and number of ranks together, the fastest first: first
    those that were measured in the finals, as the machine's speed changes by the hour; then the
    rest.
    """
    groups: dict[tuple[str, int], list[TrialResult]] = {}
    for trial, each in finished.items():
        groups.setdefault((trial.experiment, trial.ranks), []).append(_row(suite, trial, each))
    out: list[TrialResult] = []
    for group in groups.values():
        well = sorted(
            (row for row in group if not row.problem),
            key=lambda row: (len(finished[row.trial]) <= suite.rounds, row.measured_s),
        )
        for number, row in enumerate(well, 1):
            behind = row.measured_s / well[0].measured_s - 1
            out.append(replace(row, place=number, behind=behind))
        out += [row for row in group if row.problem]
    return tuple(out)


def _row(suite: Suite, trial: Trial, each: Sequence[RunResult]) -> TrialResult:
    """Over all rounds; foreseen is by what had been measured before the last."""
    well = [(sample, report) for sample, report in each if not sample.problem]
    if not well:
        return TrialResult(trial=trial, problem=each[-1][0].problem)
    foreseen, measured = well[-1][1]["foreseen"], well[-1][1]["measured"]
    steps = [step for sample, _ in well for step in step_seconds(suite, sample)]
    return TrialResult(
        trial=trial,
        foreseen_s=foreseen["step_s"],
        measured_s=statistics.median(steps),
        foreseen_bytes=max(foreseen["peak_bytes"].values()),
        measured_bytes=max(measured["peak_bytes"].values()),
    )


def sums(measured: Sequence[TrialResult]) -> Sums:
    """Summarise all that was measured."""
    well = [row for row in measured if not row.problem]
    picks = [row.behind for row in well if row.trial.picked]
    return Sums(
        statistics.median(abs(row.foreseen_s / row.measured_s - 1) for row in well),
        statistics.median(abs(row.foreseen_bytes / row.measured_bytes - 1) for row in well),
        max(picks, default=0.0),
    )


def write(suite: Suite, measured: Sequence[TrialResult], file: Path) -> None:
    """Write all that was measured so far in the suite to `file`."""
    text = {"suite": asdict(suite), "machine": machine(), "rows": [asdict(r) for r in measured]}
    file.write_text(json.dumps(strict(text), indent=1) + "\n")
