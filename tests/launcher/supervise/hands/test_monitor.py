"""launch.monitor: the answers of a real process beside a run."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.error import HTTPError

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.run_folders.answer import METRICS, find_health
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.schema import Launch
from flowrun.launcher.report.progress import Progress
from flowrun.launcher.store.checkpoint import lock_run_folder
from flowrun.launcher.supervise.hands.monitor import monitoring


def make_run(folder: Path) -> Path:
    """A run's folder after two steps, an evaluation and a restart."""
    recipe = {"name": 'gpt "a"', "train": {"steps": 5}, "launch": {"nnodes": 1}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    lines = [
        {"step": 0, "loss": 3.0, "lr": 0.1, "tokens_per_s": 10.0, "memory_bytes": 7e6},
        {"step": 1, "loss": None, "lr": 0.1, "tokens_per_s": 12.0},
        {"step": 1, "validation": {"loss": 2.5, "accuracy": None}},
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "restarts.jsonl").write_text("{}\n")
    return folder


def ask(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{address}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


@contextmanager
def answered(folder: Path, monitor: int | str = 0) -> Iterator[str]:
    """The address at which questions are answered."""
    console = Console(record=True, width=200, file=io.StringIO())
    with monitoring(Launch(monitor=monitor), folder, Progress(console)):
        yield console.export_text().partition("/metrics")[0]


@pytest.mark.processes
def test_a_run_is_answered_for_while_it_lives(tmp_path: Path) -> None:
    with answered(tmp_path) as address:
        assert ask(address, "/healthz") == (200, "planning\n")
        assert ask(address, "/metrics") == (200, "")
        make_run(tmp_path)  # as a run before has left it: this one plans still
        assert ask(address, "/healthz") == (200, "planning\n")
        (tmp_path / ".lease").write_text("{}")
        with lock_run_folder(tmp_path, 1):
            assert ask(address, "/healthz")[0] == 200
            text = ask(address, "/metrics")[1]
        assert ask(address, "/healthz")[0] == 503  # nobody holds the folder: it died
        assert ask(address, "/nothing")[0] == 404
    found = {
        sample.name: (sample.value, sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    run = {"run": 'gpt "a"'}
    assert found["flowrun_up"] == (1, run)
    assert found["flowrun_steps_done"] == (2, run)
    assert found["flowrun_steps_asked"] == (5, run)
    assert found["flowrun_restarts_total"] == (1, run)
    assert found["flowrun_memory_bytes"] == (7e6, run)
    assert found["flowrun_tokens_per_second"] == (12, run)
    assert found["flowrun_validation"] == (2.5, {**run, "metric": "loss"})
    assert "flowrun_loss" not in found  # the last loss was not finite
    assert {f"flowrun_{name}" for name in METRICS} >= {*found}


@pytest.mark.processes
def test_a_socket_is_for_its_user_and_one_that_was_left_is_free(tmp_path: Path) -> None:
    path = tmp_path / "run.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # and never listens, as a run that was killed leaves it
    with answered(tmp_path, f"unix:{path}") as address:
        assert (address, path.stat().st_mode & 0o777) == (f"unix:{path}", 0o600)
        connection = HTTPConnection("run")
        with socket.socket(socket.AF_UNIX) as connection.sock:
            connection.sock.connect(str(path))
            connection.request("GET", "/healthz")
            assert connection.getresponse().read() == b"planning\n"
        with pytest.raises(RecipeError, match="File exists"), answered(tmp_path, f"unix:{path}"):
            pass
    assert not path.exists()


def test_an_address_that_is_taken_is_refused_by_its_key(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = rf"launch\.monitor\n.*{port}: Address already in use"
        with pytest.raises(RecipeError, match=said), answered(tmp_path, port):
            pass


@pytest.mark.parametrize("address", ["here", "host:port", "unix:", "70000", "x unix:a"])
def test_what_is_not_an_address_is_refused(address: str) -> None:
    with pytest.raises(RecipeError, match="is not an address"):
        load(["recipe=mlp_hybrid", f"launch.monitor='{address}'"])


def test_a_launcher_that_is_stuck_is_not_healthy(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / ".lease").write_text("{}")
    with lock_run_folder(tmp_path, 1):
        assert find_health(tmp_path)[0] == 200
        os.utime(tmp_path / ".lease", (0, 0))
        status, text = find_health(tmp_path)
    assert status == 503
    assert re.match(r"stuck: the launcher has said nothing for \d+ s", text)


@pytest.mark.processes
def test_answers_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from flowrun.launcher.recipe.schema import Launch\n"
        "from flowrun.launcher.report.progress import Progress\n"
        "from flowrun.launcher.supervise.hands.monitor import monitoring\n"
        "with monitoring(Launch(monitor=0), Path(sys.argv[1]), Progress()):\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        address = launcher.stdout.readline().partition("/metrics")[0]
        assert ask(address, "/healthz")[0] == 200
        launcher.send_signal(signal.SIGKILL)
        assert (
            launcher.stdout.read() == ""
        )  # the answering process has its other end, and has ended
    with pytest.raises(OSError, match="refused"):
        ask(address, "/healthz")
