"""The actor protocol: invariants, values and registers, with acts and messages in any order.

The plans and their simulation are in support/small_plans.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowrun.engine.protocol import (
    ActorSpec,
    ActorState,
    Done,
    Input,
    Message,
    Output,
    Ready,
    Returned,
    can_act,
    credits,
    initial_state,
    launch,
    missing,
    step,
    violations,
)
from support.small_plans import Edge, Simulation, SmallPlan, small_plans


class AnyOrder(RuleBasedStateMachine):
    """Hypothesis chooses the plan and what happens next."""

    simulation: Simulation

    @initialize(plan=small_plans())
    def start(self, plan: SmallPlan) -> None:
        """A plan, with nothing done."""
        self.simulation = Simulation(plan)

    @precondition(lambda self: self.simulation.ready())
    @rule(pick=st.integers(0, 1000))
    def begin_an_act(self, pick: int) -> None:
        """Of any actor that can act."""
        ready = self.simulation.ready()
        self.simulation.begin(ready[pick % len(ready)])

    @precondition(lambda self: self.simulation.running())
    @rule(pick=st.integers(0, 1000))
    def end_an_act(self, pick: int) -> None:
        """Of any that run."""
        running = self.simulation.running()
        self.simulation.end(running[pick % len(running)])

    @precondition(lambda self: self.simulation.messages)
    @rule(pick=st.integers(0, 1000))
    def deliver_a_message(self, pick: int) -> None:
        """Of any under way."""
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
        """And who has none can act."""
        assert not self.simulation.unreasoned()

    @invariant()
    def no_version_is_lost_on_the_way(self) -> None:
        """What a reader has received, and what is under way to it, is what was published."""
        simulation = self.simulation
        for k, edge in enumerate(simulation.plan.edges):
            every = simulation.plan.every(edge.producer, edge)
            published = edge.initial + simulation.states[edge.producer].acts // every
            for reader in edge.readers:
                spec = simulation.specs[reader]
                at = [port.register for port in spec.inputs].index(k)
                on_the_way = simulation.messages.count(Ready(reader, k))
                assert simulation.states[reader].received[at] + on_the_way == published

    def teardown(self) -> None:
        """Whatever happened so far, the rest ends, with the right values."""
        if hasattr(self, "simulation"):
            self.simulation.drain(lambda _: 0)
            self.simulation.check_end()


AnyOrder.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAnyOrder = AnyOrder.TestCase


# ---- planted faults are found --------------------------------------------------------------------

# Reader 1 reads register 0 of actor 0, 4 micro-batches, one slot.
CHAIN = SmallPlan(2, 1, (Edge(0, (1,), 1, False), Edge(1, (2,), 1, True)), 4, 1)
Fault = Callable[[Message, tuple[Message, ...]], tuple[Message, ...]]


def _returned_twice(message: Message, sent: tuple[Message, ...]) -> tuple[Message, ...]:
    return sent + tuple(m for m in sent if isinstance(m, Returned))


def _told_twice(message: Message, sent: tuple[Message, ...]) -> tuple[Message, ...]:
    return sent + tuple(m for m in sent if isinstance(m, Ready))


def _returned_when_received(message: Message, sent: tuple[Message, ...]) -> tuple[Message, ...]:
    """The credit goes back before the act that reads."""
    if isinstance(message, Ready) and message.register == 0:
        return (Returned(0, 0, 1),)
    return tuple(m for m in sent if m != Returned(0, 0, 1))


def _never_returned(message: Message, sent: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(m for m in sent if not isinstance(m, Returned))


FAULTS = {
    "a credit is returned twice": (_returned_twice, "2 credits of 1 for register"),
    "a version is announced twice": (_told_twice, "version 1 lost, 0 is there"),
    "a credit is returned before its act": (_returned_when_received, r"version \d lost, \d is"),
    "no credit is returned": (_never_returned, r"waits for \(\('credit', 0\),\)"),
}


@pytest.mark.parametrize(("fault", "story"), list(FAULTS.values()), ids=list(FAULTS))
def test_a_faulty_protocol_does_not_pass(fault: Fault, story: str) -> None:
    def faulty(
        spec: ActorSpec, state: ActorState, message: Message, producers: dict[int, int]
    ) -> tuple[ActorState, tuple[Message, ...]]:
        new, sent = step(spec, state, message, producers)
        return new, fault(message, sent)

    with pytest.raises(AssertionError, match=story):
        for seed in range(20):
            simulation = Simulation(CHAIN, faulty)
            simulation.drain(random.Random(seed).randrange)
            simulation.check_end()


def test_the_chain_without_a_fault_passes() -> None:
    for seed in range(20):
        simulation = Simulation(CHAIN)
        simulation.drain(random.Random(seed).randrange)
        simulation.check_end()


def test_a_state_beyond_the_protocol_is_a_violation() -> None:
    spec = ActorSpec(7, (Input(1),), (Output(2, 1, (8,)),))
    assert violations(spec, ActorState(0, False, (0,), ((1,),))) == (
        "actor 7: 2 credits of 1 for register 2",
    )
    assert violations(spec, ActorState(2, False, (1,), ((2,),))) == (
        "actor 7: returned more of register 1 than it received",
    )


# ---- one fact each -------------------------------------------------------------------------------


def test_an_actor_waits_for_every_input_and_every_credit() -> None:
    spec = ActorSpec(0, (Input(1), Input(2)), (Output(3, 1, (9,)),))
    waiting = ActorState(1, False, (2, 1), ((0,),))
    assert missing(spec, waiting) == (("input", 2), ("credit", 3))
    assert not can_act(spec, waiting)
    assert can_act(spec, ActorState(1, False, (2, 2), ((1,),)))


def test_the_last_reader_gives_the_slot_back() -> None:
    spec = ActorSpec(0, (), (Output(3, 1, (8, 9)),))
    state = ActorState(1, False, (), ((0, 0),))
    for reader, free in ((8, 0), (9, 1)):
        state, sent = step(spec, state, Returned(0, 3, reader), {})
        assert (credits(spec, state, 0), sent) == (free, ())


def test_a_sum_over_micro_batches_takes_one_slot_and_is_announced_with_the_last() -> None:
    spec = ActorSpec(0, (), (Output(3, 1, (9,), every=3),))
    state = initial_state(spec)
    for act in range(3):
        assert can_act(spec, state)
        state, sent = step(spec, launch(state), Done(0), {})
        assert sent == ((Ready(9, 3),) if act == 2 else ())
        assert credits(spec, state, 0) == 0


def test_a_weight_is_returned_after_the_last_micro_batch_only() -> None:
    spec = ActorSpec(0, (Input(5, every=2),), ())
    state = initial_state(spec, {5: 1})
    state, sent = step(spec, launch(state), Done(0), {5: 1})
    assert sent == ()
    state, sent = step(spec, launch(state), Done(0), {5: 1})
    assert sent == (Returned(1, 5, 0),)
    assert missing(spec, state) == (("input", 5),)


def test_an_update_waits_until_nobody_reads_the_weight_any_more() -> None:
    spec = ActorSpec(1, (), (Output(5, 1, (0,), initial=1),))
    state = initial_state(spec)
    assert missing(spec, state) == (("credit", 5),)
    state, _ = step(spec, state, Returned(1, 5, 0), {5: 1})
    assert can_act(spec, state)


def test_an_actor_at_its_limit_does_not_act() -> None:
    spec = ActorSpec(0, (), (), limit=1)
    assert can_act(spec, initial_state(spec))
    assert not can_act(spec, ActorState(1, False, (), ()))
