from dataclasses import replace

import pytest

from flowrun.engine.actors.plan import BOX, SEND, Actor, BoxWork, Plan, TransferWork
from flowrun.engine.boxing.boxing import BoxingStep
from flowrun.engine.ir.graph import FORWARD, LogicalGraph
from flowrun.engine.ir.placement import Placement
from flowrun.engine.ir.sbp import B, P
from flowrun.engine.rehearsal.link_traffic import LinkTraffic

INSIDE, ACROSS, THERE, BACK = range(4)


def two_stages(taken: float = 0.0) -> Plan:
    """A collective inside of a node and one across, and messages between the stages."""
    box = BoxWork((BoxingStep(0, P, B),), ())
    inside = Actor(
        INSIDE, "inside", BOX, 0, phase=FORWARD, per_step=False, work=box, level=0, taken=taken
    )
    there = replace(inside, id=THERE, kind=SEND, work=TransferWork(0, 0, 1, ()), level=1, taken=0.0)
    back = replace(there, id=BACK, stage=1, work=TransferWork(1, 1, 0, ()))
    actors = (inside, replace(inside, id=ACROSS, level=1), there, back)
    placements = (Placement((("data", 2),), (0, 1)), Placement((("data", 2),), (2, 3)))
    return Plan(
        placements=placements,
        axes=("data",),
        graph=LogicalGraph((), {}),
        actors=actors,
        registers=(),
        micro_batches=1,
    )


def starts(*actors: int) -> list[float]:
    """When each begins that wants its links from the first moment, for 2 seconds."""
    flights = LinkTraffic(two_stages(), quantum=1.0)
    return [flights.take(actor, 0.0, 2.0) for actor in actors]


@pytest.mark.parametrize(
    ("actors", "begin"),
    [
        ((INSIDE, ACROSS), [0, 0]),
        ((INSIDE, INSIDE), [0, 2]),
        ((THERE, BACK), [0, 0]),
        ((THERE, THERE), [0, 2]),
        ((THERE, ACROSS), [0, 2]),
        ((ACROSS, THERE, ACROSS), [0, 0, 4]),
        ((INSIDE, THERE, INSIDE), [0, 0, 2]),
    ],
    ids=[
        "levels",
        "one level",
        "directions",
        "one direction",
        "a collective takes both",
        "messages overtake",
        "messages of another level",
    ],
)
def test_what_shares_a_link_queues(actors: tuple[int, ...], begin: list[float]) -> None:
    assert starts(*actors) == begin


@pytest.mark.parametrize(
    ("begins", "longer"),
    [(0.0, 1.0), (1.0, 0.5), (2.0, 0.0), (3.0, 0.0)],
    ids=["all the time", "half", "behind it", "long after"],
)
def test_communication_takes_its_share_of_compute_that_runs_beside(
    begins: float, longer: float
) -> None:
    flights = LinkTraffic(two_stages(taken=0.5), quantum=1 / 4)
    flights.take(INSIDE, 0.0, 2.0)
    flights.computes(0, begins)
    assert flights.longer(0, begins + 4.0) == longer
    assert flights.longer(0, begins + 4.0 + longer) == 0.0


@pytest.mark.parametrize(("taken", "end"), [(1.0, 7.0), (0.5, 5.0)], ids=["all", "half"])
def test_what_makes_an_act_longer_goes_on_beside_it(taken: float, end: float) -> None:
    """An act of 3 seconds beside a flight of 4: a core that copies all itself does one after the
    other; at half speed 2 of the 3 are done when the flight ends.
    """
    flights = LinkTraffic(two_stages(taken), quantum=1 / 4)
    flights.take(INSIDE, 0.0, 4.0)
    flights.computes(0, 0.0)
    assert 3.0 + flights.longer(0, 3.0) == end


@pytest.mark.parametrize("taken", [1.0, 0.5])
def test_two_flights_at_once_take_what_one_takes(taken: float) -> None:
    """Of an act of 3 seconds, beside flights of 4 on two levels."""

    def longer(*actors: int) -> float:
        flights = LinkTraffic(two_stages(taken), quantum=1 / 4)
        for actor in actors:
            flights.take(actor, 0.0, 4.0)
        flights.computes(0, 0.0)
        return flights.longer(0, 3.0)

    assert longer(INSIDE, ACROSS) == longer(INSIDE)


def test_what_begins_while_an_act_is_longer_makes_it_longer_still() -> None:
    flights = LinkTraffic(two_stages(taken=1.0), quantum=1 / 4)
    flights.take(INSIDE, 0.0, 2.0)
    flights.computes(0, 0.0)
    assert flights.longer(0, 4.0) == 2.0
    flights.take(INSIDE, 5.0, 0.5)
    assert flights.longer(0, 6.0) == 0.5
    assert flights.longer(0, 6.5) == 0.0


def test_what_a_flight_is_spared_frees_its_links_and_takes_no_less_of_compute() -> None:
    """Of 4 seconds, a quarter of them compute's, 2 are not waited this time."""
    flights = LinkTraffic(two_stages(taken=0.25), quantum=1 / 4)
    flights.take(INSIDE, 0.0, 4.0, spared=2.0)
    flights.computes(0, 0.0)
    assert flights.longer(0, 8.0) == 1.0
    assert flights.take(INSIDE, 0.0, 1.0) == 2.0
