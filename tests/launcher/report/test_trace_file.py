import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flowrun.engine.trace.trace import TURN, Need
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.report.trace_file import in_words, title
from flowrun.launcher.run import run
from support.runs.command import Command, run_folder

TRACED = 2


def traced(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def check(folder: Path, ranks: int) -> None:
    """What every trace of the recipe `small` must be."""
    events = traced(folder)
    plan = (folder / "plan.txt").read_text().splitlines()
    named = {
        f"{title(words[3])} (actor {words[1]})"
        for words in (line.split() for line in plan)
        if words and words[0] == "actor"
    }
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["name"] == "thread_name" and event["tid"]:
            assert event["args"]["name"] in named
    for slices in rows.values():
        for (_, end), (begin, _) in pairwise(sorted(slices)):
            assert end <= begin + 0.01  # the last digit that is written
    acts = [e for e in events if e["ph"] == "X" and e["tid"] and e["pid"] < ranks]
    assert {e["args"]["step"] for e in acts} == {2, 3}
    first = [e for e in acts if e["args"]["step"] == 3 and e["pid"] == 0]
    assert {f"{e['name']} (actor {e['tid'] - 1})" for e in first} == named
    assert any("waited_for" in e["args"] for e in acts)


def test_what_an_actor_does_is_said_in_words() -> None:
    assert title("blocks.0.mlp.forward.2.11") == "blocks.0.mlp, forward"
    assert title("blocks.2-3.weight_grad.0.1") == "blocks.2-3, weight gradient"
    assert title("all_reduce.tensor.head.backward") == "all-reduce over tensor: head, backward"
    assert title("send.blocks.1.0to1.forward") == "send, stage 0 to 1: blocks.1, forward"
    assert title("batch") == "batch"


def test_an_act_may_wait_for_its_turn_in_each_queue(place: Path) -> None:
    plan = Job(load(["recipe=small", "hardware=h100"]), values=False).training.plan
    turns = [in_words(plan, Need(TURN, queue, (0, 0))) for queue, _ in enumerate(plan.queues)]
    assert [turn.partition(" after")[0] for turn in turns] == [
        "its turn in the order of axis tensor",
        "its turn in the order of all communication",
    ]


def test_the_trace_of_a_virtual_cluster(place: Path) -> None:
    run(load(["recipe=small", "launch=virtual", f"engine.trace={TRACED}"]), place / "out")
    check(place / "out", ranks=2)


def test_the_foreseen_step_stands_beside_the_measured(place: Path) -> None:
    run(load(["recipe=small", "launch=virtual", f"engine.trace={TRACED}"]), place / "out")
    events = [e for e in traced(place / "out") if e["ph"] == "X" and e["tid"]]
    measured = [e for e in events if e["pid"] == 0 and e["args"]["step"] == 3]
    foreseen = [e for e in events if e["pid"] > 1]
    assert {e["name"] for e in foreseen} == {e["name"] for e in measured}
    assert min(e["ts"] for e in foreseen) >= min(e["ts"] for e in measured)


def test_arrows_lead_from_the_act_that_sends_to_the_one_that_receives(place: Path) -> None:
    keys = ("placement.stages=2", "launch=virtual", f"engine.trace={TRACED}")
    run(load(["recipe=small", *keys]), place / "out")
    events = traced(place / "out")
    acts = [e for e in events if e["ph"] == "X" and e["tid"]]

    def act_at(arrow: dict[str, Any]) -> dict[str, Any]:
        (found,) = (
            e
            for e in acts
            if all(e[key] == arrow[key] for key in ("pid", "tid"))
            and e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"]
        )
        return found

    begins = {e["id"]: act_at(e) for e in events if e["ph"] == "s"}
    ends = {e["id"]: act_at(e) for e in events if e["ph"] == "f"}
    assert begins.keys() == ends.keys()
    pairs = [(begins[key], ends[key]) for key in begins]
    assert {(a["pid"], b["pid"]) for a, b in pairs} == {(0, 2), (1, 3), (2, 0), (3, 1)}
    for sent, received in pairs:
        assert sent["name"].replace("send", "receive") == received["name"]
        assert sent["args"]["step"] == received["args"]["step"]
        assert sent["args"].get("micro_batch") == received["args"].get("micro_batch")
    for phase in ("forward", "backward"):  # of two micro-batches, by two ranks of a stage
        assert sum(a["args"]["phase"] == phase for a, _ in pairs) == 2 * 2 * TRACED


def test_without_a_trace_nothing_is_written(place: Path) -> None:
    run(load(["recipe=small", "launch=virtual"]), place / "out")
    assert not (place / "out" / "trace.json").exists()


@pytest.mark.processes
def test_processes_write_one_trace_and_where_a_step_went(place: Path) -> None:
    ended = Command(
        place, "recipe=small", f"engine.trace={TRACED}", run_folder(place / "out")
    ).end()
    assert (ended.status, ended.err) == (0, "")
    assert "where a step went" in ended.out
    check(place / "out", ranks=2)
    report = json.loads((place / "out" / "report.json").read_text())
    for time in report["step_times"]:
        parts = [value for key, value in time.items() if key.endswith("_s") and key != "step_s"]
        assert sum(parts) == pytest.approx(time["step_s"])
        assert min(parts) >= 0
    assert [time["rank"] for time in report["step_times"]] == [0, 1]
