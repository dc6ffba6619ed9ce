"""flowrun top --serve: a real server, whose page follows a run."""

import json
import signal
import socket
import subprocess
import urllib.request
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.page.serve_page import serve_page
from support.runs.command import FLOWRUN


def add_step(folder: Path, step: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": 1.0, "step_s": 0.1}) + "\n")


def steps_of(events: Any) -> str:
    """How far the run is, by the next event."""
    line = next(line for line in islice(events, 200) if line.startswith(b"data: "))
    figures = json.loads(line.removeprefix(b"data: "))["runs"][0]["figures"]
    return next(each["measured"] for each in figures if each["name"] == "steps")


@pytest.mark.processes
def test_a_browser_gets_the_page_and_then_what_is_new(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: mine\ntrain: {steps: 9}\nlaunch: {nnodes: 1}\n")
    add_step(tmp_path, 0)
    command = [*FLOWRUN, "top", str(tmp_path), "--serve", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        address = serving.stdout.readline().split()[0]
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                page = answer.read().decode()
            assert "connect-src 'self'" in page and 'new EventSource("events")' in page
            with urllib.request.urlopen(f"{address}events", timeout=60) as events:
                assert steps_of(events) == "1 of 9"
                add_step(tmp_path, 1)
                assert steps_of(events) == "2 of 9"
        finally:
            serving.send_signal(signal.SIGINT)
    assert serving.returncode == 130


@pytest.mark.parametrize("address", ["here", "unix:run.sock", "0.0.0.0:8080"])
def test_what_a_browser_cannot_open_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(RecipeError, match="Write a port: 8080"):
        serve_page(tmp_path, address, print)


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(RecipeError, match="Address already in use"):
            serve_page(tmp_path, port, print)
