import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from hydra._internal.hydra import Hydra

from flowrun.engine.errors import ArgumentError, FlowrunError, PlanError, RunError, SbpError
from flowrun.launcher import cli
from flowrun.launcher.cli import main
from flowrun.launcher.recipe.hydra_source import recipe_names
from flowrun.launcher.report.sweep_table import PLOT, TABLE, Comparison
from support.runs.workplace import End

Runs = list[tuple[Any, Path]]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Recipes and folders that were run, by a stand-in that fails where the seed says so."""
    seen: Runs = []
    errors: dict[int, BaseException] = {
        1: SbpError("aten.mm in head", "no row."),
        2: RunError("rank 1, actor f", "it broke."),
        3: PlanError("actor f", "deadlock."),
        4: KeyboardInterrupt(),
        5: KeyError("x"),
        6: ArgumentError("path", "x does not exist.", "Write a file that exists."),
    }

    def run(recipe: Any, folder: Path, progress: Any = None) -> Any:
        seen.append((recipe, folder))
        if error := errors.get(recipe.train.seed):
            raise error
        measured = {"step_s": 0.002, "sent_bytes": 4096, "peak_bytes": {"0": 1e6}}
        return SimpleNamespace(
            ranks=recipe.num_ranks,
            last_loss=1.25,
            validation={"loss": 1.5},
            tokens_per_s=1e4,
            measured=measured,
            foreseen={"step_s": 0.001, "sent_bytes": 4096, "peak_bytes": {"0": 2e6}},
        )

    module = SimpleNamespace(run=run, plan=lambda recipe, *_: f"plan of {recipe.name}")
    show = lambda value: f"{value:g}"  # noqa: E731
    progress = SimpleNamespace(Progress=lambda: None, seconds=show, size=show)
    monkeypatch.setitem(sys.modules, "flowrun.launcher.run", module)
    monkeypatch.setitem(sys.modules, "flowrun.launcher.report.progress", progress)
    return seen


PRINTED = {
    "--help": "flowrun",
    "": "flowrun init",
    "run --help": "flowrun",
    "plan -h": "flowrun",
    "verify -h": "flowrun",
    "recipes -h": "flowrun",
    "--version": "flowrun 0.",
    "recipes": "pipeline and tensor parallelism together",
    "plan recipe=gpt_dp": "plan of gpt_dp\n",
    "recipe=gpt_dp model.depth=7 --cfg job --package model": "depth: 7",
}


@pytest.mark.parametrize(("words", "said"), PRINTED.items(), ids=PRINTED)
def test_what_runs_nothing_prints_and_ends_well(
    end: End, runs: Runs, words: str, said: str
) -> None:
    status, out, _ = end(*words.split())
    assert (status, said in out, runs) == (0, True, [])


def test_ctrl_c_before_a_command_begins_is_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = typer.Typer()
    other.callback()(lambda: None)

    @other.command()
    def plan() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", other)
    with pytest.raises(SystemExit) as ended:
        main(["plan"])
    assert (ended.value.code, capsys.readouterr().err) == (130, "stopped\n")


def test_run_is_the_default_command(end: End, runs: Runs) -> None:
    assert end("recipe=mlp_hybrid", "train.steps=3")[0] == 0
    assert [recipe.name for recipe, _ in runs] == ["mlp_hybrid"]


def test_a_run_has_a_folder_with_what_hydra_composed(end: End, runs: Runs, workplace: Path) -> None:
    end("recipe=mlp_hybrid", "hydra.run.dir=here")
    assert runs[0][1] == workplace / "here"
    assert (workplace / "here" / ".hydra" / "config.yaml").is_file()


@pytest.mark.parametrize("folder", ["", "lr=0.1,wd=[0]"], ids=["here", "a folder of any name"])
def test_a_run_is_repeated_under_another_launcher(
    end: End, runs: Runs, workplace: Path, folder: str
) -> None:
    end("recipe=gpt_dp", "hydra.run.dir=first")
    file = workplace / folder / "recipe.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(runs[0][0].to_yaml())
    assert end(f"recipe={file}", "launch=virtual")[0] == 0
    assert [recipe.launch.name for recipe, _ in runs] == ["local", "virtual"]


STATUSES = {
    "train.seed=1": 2,  # of SBPs
    "train.seed=2": 1,  # of the run
    "train.seed=3": 2,  # of the plan
    "train.seed=4": 130,  # Ctrl-C
    "-m train.seed=0,1": 0,
    "-m train.seed=0,2": 1,
    "-m train.seed=1,3": 2,
}


@pytest.mark.parametrize(("words", "status"), STATUSES.items(), ids=STATUSES)
def test_the_exit_status_is_that_of_the_worst(
    end: End, runs: Runs, words: str, status: int
) -> None:
    ended, out, err = end("recipe=gpt_dp", *words.split())
    assert ended == status and "Traceback" not in err
    assert words.startswith("-m") or all(line.endswith(" …") for line in out.splitlines())


def test_ctrl_c_while_the_commands_are_built_is_no_traceback(
    end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(typer.main, "get_command", press)
    assert end("recipe=gpt_dp") == (130, "", "stopped\n")


CATCHES_ALL = """
import signal, sys
from contextlib import suppress
from flowrun.launcher import cli

def catch(*given, **named):
    with suppress(BaseException):
        signal.raise_signal({number})

cli.app, cli._check_words = catch, id
cli.heap.reexec_with_tunables = lambda: None
sys.argv = ["flowrun", "recipe=gpt_dp"]
cli.main()
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_before_a_run_begins_cannot_be_lost(number: int, status: int) -> None:
    """An import may catch whatever is raised within."""
    code = CATCHES_ALL.format(number=int(number))
    ended = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (status, b""), ended.stderr
    assert ended.stderr.startswith(b"stopped")


STRUCK_AT_THE_END = """
import signal, sys, threading
from flowrun.launcher import cli
threading._register_atexit(signal.raise_signal, signal.SIGINT)
sys.argv = ["flowrun", "--version"]
cli.main()
"""


def test_ctrl_c_while_python_shuts_down_shows_no_traceback() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STRUCK_AT_THE_END], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (130, "stopped\n")
    assert ended.stdout.startswith("flowrun ")


def test_a_traceback_is_shown_where_it_is_asked_for(
    end: End, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWRUN_TRACEBACK", "1")
    with pytest.raises(FlowrunError):
        main(["recipe=gpt_dp", "train.seed=1"])


def test_multirun_ends_with_one_table(end: End, runs: Runs) -> None:
    status, out, _ = end("-m", "recipe=gpt_dp,gpt_hybrid", "train.steps=2,4", "launch=virtual")
    assert status == 0 and len(runs) == 4
    assert out.count("tokens/s") == 1
    first = next(line for line in out.splitlines() if line.startswith("  0"))
    numbers = "2 1.2500 1.5000 10,000 2.0 ms 1.0 ms 1.0 MB 2.0 MB 4.1 kB"
    assert first.split() == ["0", "gpt_dp", "train.steps=2", *numbers.split()]


def test_a_recipe_is_composed_once(end: End, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    composed, usual = [], Hydra.compose_config

    def compose_config(hydra: Hydra, *given: Any, **named: Any) -> Any:
        composed.append(named["overrides"])
        return usual(hydra, *given, **named)

    monkeypatch.setattr(Hydra, "compose_config", compose_config)
    end("recipe=gpt_dp", "launch=virtual")
    assert len(composed) == len(runs) == 1


@pytest.mark.parametrize("words", ["recipe=gpt_dp hydra.mode=MULTIRUN", "recipe=own.yaml"])
def test_a_mode_that_is_set_makes_a_sweep(
    end: End, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    own = recipe_names()["gpt_dp"].read_text() + "hydra: {mode: MULTIRUN}\n"
    Path("own.yaml").write_text(own)
    end(*words.split(), "train.steps=2,4", "launch=virtual")
    assert len(runs) == 2


def test_multirun_leaves_a_csv_and_a_plot(end: End, runs: Runs, tmp_path: Path) -> None:
    sweep = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    end("-m", "recipe=gpt_dp", "train.micro_batches=1,5", "launch=virtual", sweep)
    with (tmp_path / "sweep" / TABLE).open(encoding="utf-8") as file:
        ran, skipped = csv.DictReader(file)
    assert (ran["status"], ran["train.micro_batches"], ran["step_s"]) == ("ran", "1", "0.002")
    assert (ran["foreseen_peak_bytes"], ran["reason"]) == ("2000000.0", "")
    assert (skipped["status"], skipped["step_s"]) == ("skipped", "")
    assert "cannot be divided" in skipped["reason"]
    plot = (tmp_path / "sweep" / PLOT).read_bytes()
    assert plot.startswith(b"\x89PNG")


def test_a_refused_job_is_a_row_and_no_failure_and_the_others_run(end: End, runs: Runs) -> None:
    status, out, err = end("-m", "recipe=gpt_dp", "train.micro_batches=1,5", "train.seed=0,1")
    assert status == 0 and len(runs) == 2 and err == ""
    assert "cannot be divided" in out and "skipped: aten.mm in head: no row." in out
    assert "failed: rank 1, actor f: it broke." in end("-m", "recipe=gpt_dp", "train.seed=0,2")[1]


def test_a_job_that_failed_in_the_queue_failed(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it was waited for."""

    class Queued:
        job, waits = 7, True

        def outcome(self) -> Any:
            return RunError("job 7", "it was out of memory.")

    monkeypatch.setattr("flowrun.launcher.run.run", lambda *_: Queued())
    assert end("-m", "recipe=gpt_dp", "train.seed=0,1")[0] == 1
    status, _, err = end("recipe=gpt_dp")
    assert status == 1 and "out of memory" in err


def test_pins_can_be_swept(end: End, runs: Runs) -> None:
    assert end("-m", "recipe=gpt_tp", "sbp.blocks.*.mlp.fc1.weight.tensor=S(0),B")[0] == 0
    pins = [{pin.pattern: str(pin.sbp) for pin in recipe.pins} for recipe, _ in runs]
    assert [each["blocks.*.mlp.fc1.weight"] for each in pins] == ["S(0)", "B"]


def test_values_in_brackets_are_shown(end: End, runs: Runs) -> None:
    out = end("-m", "recipe=gpt_dp", "engine.blocking=[],[data]")[1]
    assert out.count("engine.blocking=[data]") == 2  # the rule before the job, and the table


def test_a_fault_of_flowruns_own_ends_in_one_message(runs: Runs, end: End, tmp_path: Path) -> None:
    arguments = ("recipe=gpt_dp", "train.seed=5", f"hydra.run.dir={tmp_path}")
    status, _, said = end(*arguments)
    assert status == 1
    assert "a bug in flowrun (test_cli.py:" in said
    assert "KeyError: 'x'" in said and "Traceback" not in said


def test_a_wrong_argument_of_an_object_is_no_bug(runs: Runs, end: End, tmp_path: Path) -> None:
    status, _, said = end("recipe=gpt_dp", "train.seed=6", f"hydra.run.dir={tmp_path}")
    assert status == 2
    assert said.endswith("path\n  x does not exist.\n  Write a file that exists.\n")


def test_no_arguments_say_what_to_do_next(end: End) -> None:
    status, out, _ = end()
    assert status == 0
    assert "flowrun recipe=gpt_hybrid" in out and "flowrun init" in out
    assert all(len(line) <= 100 for line in out.splitlines())


@pytest.mark.parametrize("seeds", ["0,4", "0,1"], ids=["in a job", "behind one"])
def test_ctrl_c_in_a_sweep_prints_the_jobs_that_ran(
    seeds: str, end: End, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seeds == "0,1":
        stop = signal.default_int_handler
        monkeypatch.setattr(Comparison, "on_job_end", lambda *_, **__: stop(2, None))
    status, out, err = end("-m", "recipe=gpt_dp", f"train.seed={seeds}", "launch=virtual")
    assert status == 130 and "stopped" in err
    assert "train.seed=0" in out and "1.2500" in out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_asks_for_commands(shell: str) -> None:
    asked = {
        "_FLOWRUN_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "flowrun pl",
        "COMP_CWORD": "1",
        "_TYPER_COMPLETE_ARGS": "flowrun pl",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    command, environment = [sys.executable, "-m", "flowrun.launcher.cli"], os.environ | asked
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert "plan" in done.stdout and "sample" not in done.stdout
