from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from flowrun.launcher.place.outcome import Bound, Outcome
from flowrun.launcher.place.placement_search import PlacementResult, order, search
from flowrun.launcher.place.space import Branch, Candidate

TIMES = st.integers(1, 30).map(float)
COST = st.tuples(TIMES, st.integers(1, 20))  # seconds, bytes


@dataclass
class Made:
    """A PlanSource of made-up costs.  small: seconds, bytes of the smaller twins."""

    costs: dict[Candidate, tuple[float, int]]
    small: dict[Candidate, tuple[float, int]]
    limit: int
    planned: list[Candidate] = field(default_factory=list)

    def branches(self) -> Iterator[tuple[Branch, Bound]]:
        for branch in dict.fromkeys(candidate.branch for candidate in self.costs):
            found = [cost for each, cost in self.all.items() if each.branch == branch]
            seconds, bytes_ = min(s for s, _ in found), min(b for _, b in found)
            yield branch, Bound(seconds, bytes_, seconds * 1.5)

    def open(self, branch: Branch) -> Iterator[tuple[Candidate, Bound]]:
        for candidate in (each for each in self.costs if each.branch == branch):
            costs = [self.costs[candidate], self.small.get(candidate, self.costs[candidate])]
            seconds, bytes_ = min(s for s, _ in costs), min(b for _, b in costs)
            yield candidate, Bound(seconds, bytes_, seconds * 1.2)

    def smaller(self, candidate: Candidate) -> Iterator[Candidate]:
        if candidate in self.small:
            yield twin(candidate)

    def plan(self, candidate: Candidate) -> Outcome:
        self.planned.append(candidate)
        seconds, bytes_ = self.all[candidate]
        missing = max(0, bytes_ - self.limit) if self.limit else 0
        return Outcome(candidate, seconds, bytes_, missing, expected_s=seconds * 0.8)

    @property
    def all(self) -> dict[Candidate, tuple[float, int]]:
        return {**self.costs, **{twin(each): cost for each, cost in self.small.items()}}


def twin(candidate: Candidate) -> Candidate:
    return Candidate(candidate.branch, zero=candidate.zero, recompute=("blocks.*",))


@st.composite
def sources(draw: st.DrawFn) -> Made:
    branches = [
        Branch((("data", data),), stages, micro_batches)
        for data in (1, 2)
        for stages in (1, 2)
        for micro_batches in (1, 2, 4)
    ]
    leaves = [Candidate(branch, zero=zero) for branch in branches for zero in (0, 1)]
    chosen = draw(st.lists(st.sampled_from(leaves), min_size=1, unique=True))
    costs = {candidate: draw(COST) for candidate in chosen}
    small = {
        candidate: (seconds + 1, max(1, bytes_ - draw(st.integers(0, 10))))
        for candidate, (seconds, bytes_) in costs.items()
        if draw(st.booleans())
    }
    return Made(costs, small, draw(st.sampled_from([0, 1, 5, 12, 20])))


@given(sources(), st.integers(1, 4))
def test_the_best_are_those_of_looking_at_everything(made: Made, shown: int) -> None:
    """A twin that recomputes is looked at where the original lacks memory, and nowhere else."""
    found = search(made, made.limit, 1000, shown)
    every = Made(made.costs, made.small, made.limit)
    outcomes = [every.plan(candidate) for candidate in made.costs]
    outcomes += [
        every.plan(twin(o.candidate))
        for o in outcomes
        if o.missing and every.small.get(o.candidate)
    ]
    fit = sorted((outcome for outcome in outcomes if outcome.fits), key=order)
    got = [outcome for outcome in found.outcomes if outcome.fits]
    assert [o.step_s for o in got[:shown]] == [o.step_s for o in fit[:shown]]
    if not fit:
        assert found.closest and found.closest.missing == min(o.missing for o in outcomes)
    assert len(made.planned) == len(set(made.planned))
    assert found.unseen == 0


@given(sources(), st.integers(1, 3))
def test_a_search_that_is_cut_short_tells_how_good_what_it_missed_can_be(
    made: Made, most: int
) -> None:
    made.limit = 0
    found = search(made, 0, most)
    assert len(made.planned) <= most
    missed = [cost[0] for each, cost in made.costs.items() if each not in made.planned]
    if found.unseen:
        assert found.unseen_s <= min(missed)
    else:
        assert found.best and all(found.outcomes[0].step_s <= seconds for seconds in missed)


@given(sources())
def test_a_search_whose_time_is_over_ends_with_the_first_that_fits(made: Made) -> None:
    found = search(made, made.limit, 1000, until=0.0)
    fitting = [cost for cost in made.all.values() if not made.limit or cost[1] <= made.limit]
    assert sum(outcome.fits for outcome in found.outcomes) == bool(fitting)
    assert found.late
    missed = [cost[0] for each, cost in made.costs.items() if each not in made.planned]
    if found.best and found.unseen and not made.limit:
        assert found.unseen_s <= min(missed)


def test_of_those_nearly_as_fast_the_simplest_is_the_best() -> None:
    plain, sharded = (Candidate(Branch((("data", 2),), 1, 1), zero=zero) for zero in (0, 1))
    slow = Candidate(Branch((("data", 2),), 1, 2))
    costs = {plain: (100.9, 5), sharded: (100.0, 4), slow: (102.0, 1)}
    found = search(Made(costs, {}, 0), 0, 10)
    assert [outcome.candidate for outcome in found.outcomes] == [sharded, plain, slow]
    assert found.best and found.best.candidate == plain


def test_a_whole_plan_goes_before_what_few_blocks_tell() -> None:
    """Until it turns out that it does not fit."""
    few = [
        Outcome(Candidate(Branch((("data", 2),), 1, count)), seconds, extrapolated=True)
        for count, seconds in ((1, 10.0), (2, 11.0), (4, 12.0))
    ]
    found = PlacementResult(outcomes=tuple(few))
    assert found.best is few[0]
    slower = Outcome(few[0].candidate, 11.5)
    whole = found.instead(few[0], slower).best
    assert whole and not whole.extrapolated and whole.estimate is few[0]
    lacking = found.instead(few[0], Outcome(few[0].candidate, 10.0, missing=5))
    assert lacking.best is few[1]
