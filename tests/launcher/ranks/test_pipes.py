import os
import threading

from flowrun.launcher.ranks.rank_events import Remarked
from flowrun.launcher.ranks.wire import EventReader, EventSender, Notice


def test_a_message_cut_short_by_a_kill_ends_that_pipe_alone() -> None:
    reader, writer = os.pipe()
    came = EventReader(reader)
    EventSender(writer).send(Remarked("whole"))
    os.write(writer, b'{"is":"Remarked","te')  # then death
    assert list(came.read()) == [Remarked("whole")]
    os.close(writer)
    assert list(came.drain()) == [] and came.ended
    came.close()


def test_an_event_larger_than_the_pipe_comes_whole_and_nobody_waits_for_a_part() -> None:
    reader, writer = os.pipe()
    came, sent = EventReader(reader), [Remarked("first"), Remarked("x" * 300_000)]
    assert list(came.read()) == []  # nothing is there, and it returns
    thread = threading.Thread(target=lambda: [*map(EventSender(writer).send, sent)])
    thread.start()
    found: list[Notice] = []
    while len(found) < 2:
        found += came.read()
    thread.join()
    assert found == sent
    os.close(writer)
    came.close()
