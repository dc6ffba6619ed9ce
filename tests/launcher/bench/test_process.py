import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from flowrun.launcher.bench.process import _reason, execute
from flowrun.launcher.bench.suite import Peer, Run, make
from flowrun.launcher.recipe.compose import load
from support.runs.command import Command, run_folder

SUITE = """\
defaults: [base]
name: tiny
recipe: gpt_bench
rounds: 1
steps: 3
warmup: 1
overrides:
  - model.vocabulary=256
  - model.width=16
  - model.depth=2
  - data.length=8
  - data.max_bytes=10000
  - train.batch_size=8
settings: {pages kept: null}
experiments:
  data:
    flowrun: [placement.axes.data=2]
    peers:
      DDP: {kind: ddp}
"""


def peer(kind: str, *overrides: str, ranks: int = 1) -> Run:
    common = ("recipe=mlp_data_parallel", "train.steps=2", "eval.batches=0")
    given = {"overrides": (*common, *overrides), "ranks": ranks, "peer": Peer(kind)}
    return Run(experiment="x", side="peer", **given)


def test_a_run_is_read_as_it_was_written() -> None:
    cut = Peer("pipeline", units=("a", "b"), cut=(1,))
    run = replace(peer("single", "a=1"), peer=cut, environment={"b": "c"})
    assert make(Run, json.loads(json.dumps(asdict(run))), "run") == run


OF_TORCH = "a step\n[rank0]: Traceback\n[rank0]: torch.x.DistError: gone\n"
OF_A_RANK = "rank 1, actor a\n  IndexError: out of range\n  file.py:3\n"
OF_A_RECIPE = "a step\ncommand line  a = b\n  a is wrong.\n  Try c.\n"


@pytest.mark.parametrize(
    ("printed", "status", "reason"),
    [
        (OF_TORCH, 1, "torch.x.DistError: gone"),
        (OF_A_RANK, 1, "IndexError: out of range"),
        (OF_A_RECIPE, 1, "command line  a = b a is wrong. Try c."),
        ("", 3, "exit status 3"),
        ("", -9, "was killed by SIGKILL"),
        ("terminate called\n  what():  gone\n", -6, "was killed by SIGABRT after 'what():  gone'"),
    ],
    ids=["torch", "a rank of flowrun", "a recipe", "silence", "a signal", "C++"],
)
def test_the_reason_is_what_names_the_error(
    printed: str, status: int, reason: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text(printed)
    assert _reason(log, status) == f"{reason} ({log})"


@pytest.mark.thorough
@pytest.mark.processes
def test_why_a_run_failed_is_its_own_words(tmp_path: Path) -> None:
    sample = execute(peer("single", "optim.clip_norm=1.0"), tmp_path, timeout_s=60)
    assert sample.problem.startswith("ValueError: a peer of the bench knows no optim.clip_norm")
    assert str(tmp_path) in sample.problem and sample.step_s == ()


@pytest.mark.processes
def test_a_run_that_does_not_end_is_ended(tmp_path: Path) -> None:
    """The other rank never comes."""
    sample = execute(peer("single", ranks=1), tmp_path, timeout_s=0.0)
    assert sample.problem == "no end within 0 s (suite.timeout_s)"


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[str, ...]:
    """The words of a bench of SUITE, which leaves its folder `out`."""
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "tiny.yaml").write_text(SUITE)
    return ("bench", "suite=tiny", "--config-dir", str(tmp_path), run_folder(tmp_path / "out"))


@pytest.mark.processes
def test_a_bench_from_the_command_line(tiny: tuple[str, ...], tmp_path: Path) -> None:
    """Both sides train the same, and the folder has it all."""
    ended = Command(tmp_path, *tiny).end(within=120)
    assert ended.status == 0, ended.out + ended.err
    tree = json.loads((tmp_path / "out" / "bench.json").read_text())
    ours, ddp = tree["lines"]
    assert ours["median_s"] > 0 and ours["peak_bytes"] > 0 and ours["sent_bytes"] > 0
    assert ddp["ratio"] > 0 and ddp["peak_bytes"] > 0 and ddp["agree"] is True
    assert (tmp_path / "out" / "bench.svg").is_file()


@pytest.mark.thorough
@pytest.mark.processes
def test_copies_train_at_once_and_count_together(tmp_path: Path) -> None:
    """A step is the mean of both, the work is theirs together."""
    overrides = ("recipe=mlp_data_parallel", "train.steps=3", "eval.batches=0", "train.save=false")
    given = Run(experiment="x", overrides=overrides, ranks=2, copies=2)
    sample = execute(given, tmp_path, timeout_s=60)
    assert not sample.problem
    files = [tmp_path / f"copy{k}" / "metrics.jsonl" for k in range(2)]
    steps = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    means = [(a["step_s"] + b["step_s"]) / 2 for a, b in zip(*steps, strict=True)]
    assert list(sample.step_s) == means
    assert sample.work == 2 * load(list(overrides)).train.batch_size


_INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from flowrun.launcher.bench import process

signal.signal(signal.SIGINT, signal.default_int_handler)
os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGINT))
command = [sys.executable, "-c", "import signal; signal.pause()"]
try:
    run = process.Run(experiment="", overrides=(), ranks=1)
    process._run([(command, {})], run, Path("."), 60)
except KeyboardInterrupt:
    print("heard")
"""


@pytest.mark.processes
def test_ctrl_c_while_a_process_is_started_is_heard_and_ends_it(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.stdout == "heard\n", ran.stderr


@pytest.mark.processes
def test_ctrl_c_ends_what_runs_and_shows_what_is_done(
    tiny: tuple[str, ...], tmp_path: Path
) -> None:
    bench = Command(tmp_path, *tiny)
    bench.until("run 1/2")  # has ended: a peer runs, or is about to
    ended = bench.signal(signal.SIGINT)
    assert ended.status == 130, ended.out + ended.err
    table = [line.split() for line in ended.out.splitlines() if line.startswith("  ")]
    assert [line[0] for line in table[1:]] == ["flowrun", "DDP,"]
    assert float(table[1][1]) > 0 and table[2][-1] == "-"
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in left if any(str(tmp_path) in word for word in line or ())]
