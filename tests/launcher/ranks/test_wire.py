import json
from typing import Any

import pytest

from flowrun.launcher.ranks.rank_events import Failure, FileWritten, RankEnded, Reason, StepDone
from flowrun.launcher.ranks.wire import Notice, decode, encode
from flowrun.launcher.supervise.hosts.words import Ready
from flowrun.launcher.supervise.life import events as ev
from support.runs.plain_host import plain_host

HOST = plain_host("a", recipe={"optim.lr": "0.1"})
SENT: tuple[Notice, ...] = (
    StepDone(3, {"loss": 1.5, "each": [1.0, 2.0]}, 0.1, {"waited_s": 0.0}),
    FileWritten(4, "rank_0", (10, 20)),
    RankEnded(0, {"notes": [["x", 1, 2]]}),
    ev.FromHost(1, Failure(Reason("rank 1", "no"))),
    ev.HaltOffered(0, "SIGTERM", 4, 1),
    ev.Asked("SIGTERM"),
    Ready(HOST),
    ev.StartFound(ev.StartPoint(3, "snapshot", 0)),
)


@pytest.mark.parametrize("sent", SENT, ids=lambda sent: type(sent).__name__)
def test_a_message_comes_back_as_it_was(sent: Notice) -> None:
    assert decode(encode(sent)) == sent


def change(sent: Notice, **fields: Any) -> str:
    return json.dumps({**json.loads(encode(sent)), **fields})


@pytest.mark.parametrize(
    "frame",
    [
        "[]",
        "7",
        '{"is": "os.system"}',
        "[" * 100_000,
        change(SENT[0], step="3"),
        change(SENT[0], step=True),
        change(SENT[0], more=1),
        change(SENT[1], written=[1]),
        change(SENT[3], event={"is": "Failure"}),
        change(SENT[6], host={**json.loads(encode(SENT[6]))["host"], "recipe": 5}),
        change(SENT[6], host=None),
    ],
)
def test_what_is_no_message_is_refused(frame: str) -> None:
    with pytest.raises(ValueError):
        decode(frame)
