"""Ranks that die are started again (launch.restarts), and the run ends as if nothing had been."""

import json
from pathlib import Path

import pytest

from support.runs.command import Command, losses, run_folder

pytestmark = pytest.mark.processes

RUN = ("recipe=small", "train.steps=12", "train.save_every=4", "optim=adamw")
WEIGHTS = "weights.safetensors"


def test_a_rank_that_is_killed_begins_again_and_changes_no_bit(place: Path) -> None:
    whole, killed = place / "whole", place / "killed"
    assert Command(place, *RUN, run_folder(whole)).end().status == 0
    again = ("+data.fail=kill once", "launch.restarts=1")
    ended = Command(place, *RUN, *again, run_folder(killed)).end()
    assert (ended.status, ended.err) == (0, "")
    assert "note: rank 1: the process was killed by SIGKILL" in ended.out
    assert ended.out.count("Restart 1 of 1 from step") == 1
    (line,) = map(json.loads, (killed / "restarts.jsonl").read_text().splitlines())
    assert (line["where"], line["source"]) == ("rank 1", "snapshot")
    assert json.loads((killed / "report.json").read_text())["restarts"] == 1
    assert losses(killed) == losses(whole)  # no step is there twice
    begun = (killed / "logs" / "rank_1.log").read_text()
    assert begun.count("rank 1 of 2, process") == 2  # the log of the first is still there
    assert (killed / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


@pytest.mark.thorough
def test_where_a_rank_is_killed_each_time_the_run_goes_on_with_fewer(place: Path) -> None:
    always = ("+data.fail=kill always", "launch.restarts=1", "launch.min_ranks=1")  # rank 1 dies
    ended = Command(place, *RUN, *always, run_folder(place / "out")).end()
    assert (ended.status, ended.err) == (0, "")
    last = (place / "out" / "restarts.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["ranks"] == 1
    assert json.loads((place / "out" / "report.json").read_text())["ranks"] == 1
    whole = Command(place, *RUN, "launch=virtual", run_folder(place / "whole")).end()
    assert whole.status == 0
    assert losses(place / "out") == pytest.approx(losses(place / "whole"), rel=1e-4)
