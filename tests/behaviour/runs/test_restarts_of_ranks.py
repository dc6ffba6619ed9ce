"""Ranks that die are started again (launch.restarts), and the run ends as if nothing had been."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command import Command, losses, run_folder, workplace

pytestmark = pytest.mark.processes

RUN = ("recipe=small", "train.steps=12", "train.save_every=2", "optim=adamw")
WEIGHTS = "weights.safetensors"


def test_a_rank_that_is_killed_begins_again_and_changes_no_bit(tmp_path: Path) -> None:
    place = workplace(tmp_path)
    whole, killed = place / "whole", place / "killed"
    assert Command(place, *RUN, run_folder(whole)).end().status == 0
    again = ("+data.fail=kill once", "launch.restarts=1")
    ended = Command(place, *RUN, *again, run_folder(killed)).end()
    assert (ended.status, ended.err) == (0, "")
    assert "note: rank 1: the process was killed by SIGKILL" in ended.out
    assert ended.out.count("Restart 1 of 1 from step") == 1
    lines = (killed / "restarts.jsonl").read_text().splitlines()
    assert [json.loads(line)["where"] for line in lines] == ["rank 1"]
    assert json.loads((killed / "report.json").read_text())["restarts"] == 1
    assert losses(killed) == losses(whole)  # no step is there twice
    assert (killed / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


def test_a_rank_that_is_killed_each_time_ends_the_run(tmp_path: Path) -> None:
    place = workplace(tmp_path)
    always = ("recipe=small", "+data.fail=kill", "launch.restarts=1", run_folder(place / "out"))
    ended = Command(place, *always, "train.steps=1000").end()
    assert ended.status == 1
    assert ended.err.startswith("rank 1\n  the process was killed by SIGKILL")
    assert len((place / "out" / "restarts.jsonl").read_text().splitlines()) == 1
