"""The words that a seat gives a command: hosts of one run have one folder, others their own."""

from pathlib import Path

import pytest

from flowrun.launcher.command_line.seats import take_seat

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_LOCALID": "0",
}
FOLDERS = {
    "one run": ((), {"slurm/17.0"}),
    "local": (("launch=local",), {"slurm/17.0"}),
    "a sweep": (("optim.lr=0.1,0.2",), {"slurm/17.0"}),
    "separate": (("launch.nnodes=1",), {"slurm/17.0_0", "slurm/17.0_1"}),
    "virtual": (("launch=virtual",), {""}),
}


def folders(monkeypatch: pytest.MonkeyPatch, *words: str) -> set[str]:
    """What both hosts call the folder of a sweep."""
    found = set()
    for host in ("0", "1"):
        for key, value in {**STEP, "SLURM_NODEID": host, "SLURM_PROCID": host}.items():
            monkeypatch.setenv(key, value)
        given = dict(text.split("=") for text in take_seat(words, None))
        found.add(given.get("hydra.sweep.dir", "").removeprefix("multirun/"))
    return found


@pytest.mark.parametrize(("words", "expected"), FOLDERS.values(), ids=FOLDERS)
def test_hosts_of_one_run_have_one_folder(
    words: tuple[str, ...], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folders(monkeypatch, "recipe=gpt_hybrid", *words) == expected


def test_the_recipe_says_whether_hosts_train_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "alone.yaml"
    file.write_text(f"{(RECIPES / 'gpt_hybrid.yaml').read_text()}\nlaunch: {{nnodes: 1}}\n")
    assert folders(monkeypatch, f"recipe={file}") == {"slurm/17.0_0", "slurm/17.0_1"}
