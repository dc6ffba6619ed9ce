"""The actor protocol: invariants, values and registers, with acts and messages in any order.

The plans and their simulation are in support/plans/small_plans.py.
"""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowrun.engine.actors.protocol import (
    ActorSpec,
    Port,
    Ring,
    Token,
    can_act,
    counts,
    idle,
    missing,
    one_at,
    state_of,
    violations,
    wire,
)
from support.plans.small_plans import Edge, Fault, Simulation, SmallPlan, small_plans


class AnyOrder(RuleBasedStateMachine):
    """Hypothesis chooses the plan and what happens next."""

    simulation: Simulation

    @initialize(plan=small_plans())
    def start(self, plan: SmallPlan) -> None:
        self.simulation = Simulation(plan)

    @precondition(lambda self: self.simulation.ready())
    @rule(pick=st.integers(0, 1000))
    def begin_an_act(self, pick: int) -> None:
        ready = self.simulation.ready()
        self.simulation.begin(ready[pick % len(ready)])

    @precondition(lambda self: self.simulation.running)
    @rule(pick=st.integers(0, 1000))
    def end_an_act(self, pick: int) -> None:
        running = self.simulation.running
        self.simulation.end(running[pick % len(running)])

    @precondition(lambda self: self.simulation.messages)
    @rule(pick=st.integers(0, 1000))
    def deliver_a_message(self, pick: int) -> None:
        self.simulation.deliver(pick % len(self.simulation.messages))

    @rule()
    def wait(self) -> None:
        """So that there is a rule when all is done."""

    @invariant()
    def the_invariants_hold(self) -> None:
        """Credits between 0 and slots; nothing returned that was not received."""
        assert not self.simulation.broken()

    @invariant()
    def who_cannot_act_has_a_reason(self) -> None:
        assert not self.simulation.unreasoned()

    @invariant()
    def no_token_is_lost_on_the_way(self) -> None:
        """Between two ends, and under way from one to the other, are as many as there are slots."""
        simulation = self.simulation
        actual = [counts(*pair) for pair in zip(simulation.specs, simulation.states, strict=True)]
        for spec in simulation.specs:
            for k, port in enumerate(spec.ports):
                there = simulation.specs[port.other.to]
                (j,) = (j for j in range(len(there.ports)) if one_at(j) == port.other.tokens)
                under_way = map(
                    simulation.messages.count, (port.other, Token(spec.actor, one_at(k)))
                )
                assert actual[spec.actor][k] + actual[there.actor][j] + sum(under_way) == port.slots

    def teardown(self) -> None:
        """Whatever happened so far, the rest ends, with the right values."""
        if hasattr(self, "simulation"):
            self.simulation.drain(lambda _: 0)
            self.simulation.check_end()


AnyOrder.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
TestAnyOrder = AnyOrder.TestCase


# ---- planted faults are found --------------------------------------------------------------------

# Reader 1 reads register 0 of actor 0, 4 micro-batches, one slot.
CHAIN = SmallPlan(2, 1, (Edge(0, (1,), 1, False), Edge(1, (2,), 1, True)), 4, 1)
VERSION, CREDIT = Token(1, one_at(0)), Token(0, one_at(0))
FAULTS: dict[str, tuple[Fault, str]] = {
    "a credit is returned twice": (
        lambda sent: [*sent, *(token for token in sent if token == CREDIT)],
        "2 tokens of 1 for register",
    ),
    "a version is announced twice": (
        lambda sent: [*sent, *(token for token in sent if token == VERSION)],
        "2 tokens of 1 for register",
    ),
    "a credit is returned before its act": (
        lambda sent: [*sent, CREDIT] if VERSION in sent else sent,
        "2 tokens of 1 for register",
    ),
    "no credit is returned": (
        lambda sent: [token for token in sent if token != CREDIT],
        r"waits for \(\('credit', 0\),\)",
    ),
}


@pytest.mark.parametrize(("fault", "story"), list(FAULTS.values()), ids=list(FAULTS))
def test_a_faulty_protocol_does_not_pass(fault: Fault, story: str) -> None:
    with pytest.raises(AssertionError, match=story):
        for seed in range(20):
            simulation = Simulation(CHAIN, fault)
            simulation.drain(random.Random(seed).randrange)
            simulation.check_end()


def test_one_credit_more_than_there_are_buffers_loses_a_version() -> None:
    roomy = replace(CHAIN, edges=(replace(CHAIN.edges[0], slots=2), CHAIN.edges[1]))
    with pytest.raises(AssertionError, match=r"version \d lost, \d is there"):
        for seed in range(20):
            simulation = Simulation(CHAIN)
            simulation.specs = Simulation(roomy).specs
            simulation.states = Simulation(roomy).states
            simulation.drain(random.Random(seed).randrange)


def test_the_chain_without_a_fault_passes() -> None:
    for seed in range(20):
        simulation = Simulation(CHAIN)
        simulation.drain(random.Random(seed).randrange)
        simulation.check_end()


def test_a_state_beyond_the_protocol_is_a_violation() -> None:
    port = Port(2, fills=True, slots=1, every=1, start=1, other=Token(8, one_at(0)))
    spec = ActorSpec(7, (port,), limit=9)
    actual = [
        violations(spec, state_of(1, [2]), running=False),
        violations(spec, state_of(0, [0]), running=True),
        violations(spec, state_of(1, [-1]), running=False),
    ]
    wanted = (f"actor 7: {n} tokens of 1 for register 2" for n in (2, 0, -1))
    assert actual == [(fact,) for fact in wanted]
    assert violations(spec, state_of(1, [0]), running=False) == ()


# ---- one fact each -------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 0x8000), max_size=5), st.integers(0, 1))
def test_a_state_is_its_counts_of_tokens(tokens: list[int], own: int) -> None:
    ports = (Port(0, fills=True, slots=1, every=1, start=1, other=Token(0, 1)),) * len(tokens)
    spec, state = ActorSpec(0, ports, limit=1), state_of(own, tokens)
    assert counts(spec, state) == tuple(tokens)
    assert idle(state) == bool(own)
    assert can_act(spec, state) == all((own, *tokens))


def test_an_actor_waits_for_every_input_and_every_credit() -> None:
    rings = (Ring(1, 8, (0,), 1), Ring(2, 9, (0,), 1), Ring(3, 0, (9,), 1))
    spec = wire({0: 1, 8: 1, 9: 1}, rings, steps=9)[0]
    assert missing(spec, state_of(1, (1, 0, 0))) == (("input", 2), ("credit", 3))
    assert not can_act(spec, state_of(1, (1, 0, 0)))
    assert can_act(spec, state_of(1, (1, 1, 1)))


def test_registers_between_the_same_two_actors_share_the_tokens_of_the_smallest() -> None:
    rings = (Ring(0, 0, (1,), 3), Ring(1, 0, (1, 2), 2), Ring(2, 0, (1,), 1, per_step=True))
    specs = wire({0: 4, 1: 1, 2: 4}, rings, steps=1)
    assert [port.register for port in specs[1].ports] == [1, 2]
    assert [(port.register, port.other) for port in specs[0].ports] == [
        (1, Token(1, one_at(0))),
        (1, Token(2, one_at(0))),
        (2, Token(1, one_at(1))),
    ]
