"""Real processes: how a run on one host ends, well or badly, and what it leaves behind."""

import signal
from pathlib import Path

import pytest

from support.runs.command import Command, losses, run_folder

pytestmark = pytest.mark.processes

ENDLESS = "train.steps=1000000"
RUNS = {"shared": "launch=local", "gloo": "launch.transport=gloo", "virtual": "launch=virtual"}


def test_a_run_that_python_starts_ends_with_status_0_and_no_word_on_stderr(place: Path) -> None:
    ended = Command(place, "recipe=small", fresh=True).end()
    assert (ended.status, ended.err) == (0, "")


def test_processes_train_like_the_virtual_cluster(place: Path) -> None:
    """Bit for bit through shared memory: both sum in order of the members.  Not a word is said of
    an end that goes well.
    """
    for run, launch in RUNS.items():
        ended = Command(place, "recipe=small", launch, run_folder(place / run)).end()
        assert (ended.status, ended.err) == (0, "")
    local, gloo, virtual = (losses(place / run) for run in RUNS)
    assert len(local) == 4
    assert local == virtual
    assert gloo == pytest.approx(virtual, rel=1e-6)


@pytest.mark.thorough
def test_each_job_of_a_sweep_has_processes_of_its_own(place: Path) -> None:
    swept = ("train.steps=1,2", f"hydra.sweep.dir={place / 'sweep'}")
    ended = Command(place, "-m", "recipe=small", *swept).end()
    assert (ended.status, ended.err) == (0, "")
    assert [len(losses(place / "sweep" / str(k))) for k in range(2)] == [1, 2]


def test_what_a_run_left_can_be_exported_and_its_layouts_verified(place: Path) -> None:
    assert Command(place, "recipe=small", run_folder(place / "out")).end().status == 0
    weights = Command(place, "export", "out", "--to", "all.safetensors").end()
    assert (weights.status, (place / "all.safetensors").stat().st_size > 0) == (0, True)
    compared = Command(place, "verify", "recipe=small").end()
    assert compared.status == 0, compared.out
    assert compared.out.count(" same") == 10


def test_threads_of_compute_survive_the_fork(place: Path) -> None:
    large = ("model.hidden=4096", "train.batch_size=32", "train.steps=2")
    ended = Command(place, "recipe=small", "launch.threads=2", *large).end()
    assert (ended.status, ended.err) == (0, "")


@pytest.mark.parametrize(
    "group",
    [pytest.param(False, marks=pytest.mark.thorough), True],
    ids=["the launcher alone", "the terminal's group"],
)
def test_ctrl_c_ends_every_process_with_status_130(place: Path, group: bool) -> None:
    command = Command(place, "recipe=small", ENDLESS)
    command.until("step 0")
    ended = command.signal(signal.SIGINT, group)
    assert (ended.status, ended.err) == (130, "stopped\n")


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [(signal.SIGINT, 130, "stopped\n"), (signal.SIGTERM, 75, "stopped by SIGTERM\n")],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_run_that_has_begun_nothing_ends_at_once(
    place: Path, number: int, status: int, said: str
) -> None:
    command = Command(place, "recipe=small", "+data.talk=true", ENDLESS)
    command.until("data set made")
    ended = command.signal(number)
    assert (ended.status, ended.err) == (status, said)


def test_a_launcher_that_is_killed_leaves_no_worker(place: Path) -> None:
    command = Command(place, "recipe=small", ENDLESS)
    command.until("step 0")
    assert command.listens_at() == {"127.0.0.1"}  # nobody on the network reaches a run on one host
    ended = command.signal(signal.SIGKILL)
    assert ended.status == -signal.SIGKILL


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "raise",
            "rank 1, actor batch\n"
            "  ValueError: sample 40 is not there\n"
            "  item 47 of the data set\n"
            "  samples.py:29 in __getitem__: break_down(self.fail)\n"
            '  samples.py:36 in break_down: raise ValueError("sample 40 is not there")\n',
        ),
        (
            "kill",
            "rank 1\n  the process was killed by SIGKILL, "
            "most likely by the kernel because memory ran out.\n",
        ),
        pytest.param(
            "exit", "rank 1\n  the process ended with exit status 7.\n", marks=pytest.mark.thorough
        ),
    ],
    ids=["an exception", "a signal", "an exit"],
)
def test_the_rank_that_failed_is_blamed_once(place: Path, how: str, said: str) -> None:
    command = Command(place, "recipe=small", ENDLESS, f"+data.fail={how}", run_folder(place / "o"))
    command.until("step 0")
    ended = command.end(within=5)
    assert (ended.status, ended.err) == (1, said)
    assert losses(place / "o")  # the steps that were done stay
    assert not (place / "o" / "report.json").exists()
    logs = [(place / "o" / "logs" / f"rank_{k}.log").read_text() for k in range(2)]
    assert [text.split(", process")[0][20:] for text in logs] == ["rank 0 of 2", "rank 1 of 2"]
    assert ("ValueError: sample 40 is not there" in logs[1]) == (how == "raise")
    assert f"note: what each rank printed, with its traceback: {place / 'o' / 'logs'}/" in ended.out
