import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from flowrun.engine.runtime.transport.inbox import Inbox


@pytest.fixture
def inbox() -> Iterator[Inbox[int]]:
    with closing(Inbox[int]()) as made:
        yield made


def test_items_come_in_the_order_put(inbox: Inbox[int]) -> None:
    for item in range(3):
        inbox.put(item)
    assert not inbox.empty()
    assert [inbox.get() for _ in range(3)] == [0, 1, 2]
    assert inbox.empty()


def test_a_sleeper_wakes_for_every_item_of_other_threads(inbox: Inbox[int]) -> None:
    def put(first: int) -> None:
        for item in range(first, first + 500):
            inbox.put(item)

    threads = [threading.Thread(target=put, args=(first,)) for first in (0, 500)]
    for thread in threads:
        thread.start()
    assert sorted(inbox.get() for _ in range(1000)) == list(range(1000))
    for thread in threads:
        thread.join()
    assert inbox.empty()


def test_a_sleeper_wakes_for_a_descriptor_and_handles_it_itself(inbox: Inbox[int]) -> None:
    here, there = socket.socketpair()
    with here, there:
        inbox.watch(here.fileno(), lambda: inbox.put(here.recv(1)[0]))
        threading.Thread(target=there.send, args=(b"\x07",)).start()
        assert inbox.get() == 7
        there.send(b"\x08")
        assert not inbox.empty()
        assert inbox.get() == 8


def test_what_is_forgotten_is_not_handled(inbox: Inbox[int]) -> None:
    here, there = socket.socketpair()
    with here, there:
        inbox.watch(here.fileno(), lambda: inbox.put(1))
        inbox.forget(here.fileno())
        there.send(b"!")
        assert inbox.empty()
