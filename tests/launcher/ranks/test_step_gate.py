import random
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrun.launcher.ranks.step_gate import StepGate

AHEAD = 3  # steps that a rank may have begun and not done: readers are ahead of updates


@dataclass
class SimulatedRank:
    """A rank that begins steps as its gate allows, and does them as its peers do."""

    host: int
    rank: int
    done: int
    refused: bool = False
    ended: bool = False
    rests: list[int] = field(default_factory=list)


class SimulatedRun:
    """Ranks of several hosts, and launchers that halt them, in any order of what may happen."""

    def __init__(self, hosts: int, ranks: int, steps: int, first: int) -> None:
        self.steps = steps
        self.gates = [
            StepGate([0] * (2 + 2 * ranks), threading.Lock(), first) for _ in range(hosts)
        ]
        self.ranks = [SimulatedRank(h, r, first) for h in range(hosts) for r in range(ranks)]
        self.frozen: set[int] = set()

    def begun(self, rank: SimulatedRank) -> int:
        return self.gates[rank.host].of_rank(rank.rank).begun

    def possible(self) -> list[SimulatedRank]:
        return [rank for rank in self.ranks if not rank.ended and self._acts(rank)]

    def _acts(self, rank: SimulatedRank) -> list[str]:
        begun, out = self.begun(rank), []
        if rank.done < begun and all(self.begun(peer) > rank.done for peer in self.ranks):
            out.append("do")
        if rank.host in self.frozen:
            return out
        if not rank.refused and begun < min(self.steps, rank.done + AHEAD):
            out.append("ask")
        if rank.refused and rank.done == begun:
            out.append("rest")
        return out

    def act(self, rank: SimulatedRank, choose: random.Random) -> None:
        gate = self.gates[rank.host].of_rank(rank.rank)
        match choose.choice(self._acts(rank)):
            case "do":
                rank.done += 1
            case "ask":
                rank.refused = not gate.may_begin(gate.begun + 1)
            case "rest":
                rank.rests.append(rank.done)
                rank.refused, rank.ended = False, not gate.go_on()

    def some(self, choose: random.Random) -> None:
        for _ in range(choose.randrange(6 * len(self.ranks))):
            if possible := self.possible():
                self.act(choose.choice(possible), choose)

    def drain(self, choose: random.Random) -> None:
        while possible := self.possible():
            self.act(choose.choice(possible), choose)

    def halt(self, ends: bool, choose: random.Random) -> int:
        """Freeze all hosts, one after the other, and open them; return the step of the halt."""
        while not all(gate.is_clear for gate in self.gates):
            self.act(choose.choice(self.possible()), choose)
        for host in choose.sample(range(len(self.gates)), len(self.gates)):
            assert self.gates[host].freeze()
            self.frozen.add(host)
            self.some(choose)
        halt = max(gate.begun for gate in self.gates)
        for host in choose.sample(range(len(self.gates)), len(self.gates)):
            self.gates[host].open(halt if halt < self.steps else None, ends)
            self.frozen.remove(host)
            self.some(choose)
        return halt


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 12), st.integers(0, 4), st.integers(0, 3),
    st.booleans(), st.randoms(use_true_random=False),
)  # fmt: skip
def test_all_ranks_rest_after_one_step_at_whatever_moment_they_are_halted(
    hosts: int, ranks: int, steps: int, first: int, saves: int, ends: bool, choose: random.Random
) -> None:
    run = SimulatedRun(hosts, ranks, first + steps, first)
    halts = []
    for last in [False] * saves + [True] * ends:
        run.some(choose)
        halts.append(run.halt(last, choose))
    run.drain(choose)
    end = halts[-1] if ends else run.steps
    assert {(rank.done, run.begun(rank)) for rank in run.ranks} == {(end, end)}
    rests = dict.fromkeys(step for step in halts if first < step < run.steps)
    for rank in run.ranks:
        assert [step for step in dict.fromkeys(rank.rests) if step > first] == list(rests)
        assert rank.ended == (ends and end < run.steps)


def test_a_halt_that_is_not_the_latest_step_begun_stops_a_rank_for_ever() -> None:
    choose = random.Random(0)
    run = SimulatedRun(1, 2, 8, 0)
    fast, slow = run.ranks
    for _ in range(2):
        assert run.gates[0].of_rank(fast.rank).may_begin(run.begun(fast) + 1)
    assert run.gates[0].freeze()
    run.gates[0].open(1, ends=True)
    run.drain(choose)
    assert not fast.ended
    assert (run.begun(fast), run.begun(slow)) == (2, 1)


def test_a_gate_whose_lock_a_killed_rank_holds_is_not_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flowrun.launcher.ranks.step_gate._PATIENCE_S", 0.0)
    gate = StepGate.make_shared(2, first=0)
    gate.lock.acquire()
    assert not gate.freeze()
