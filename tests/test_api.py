"""`import flowrun`: what the command line does, from Python."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import flowrun

SMALL = ["train.steps=2", "engine.cache=false", "launch=virtual"]


def test_importing_flowrun_imports_neither_torch_nor_hydra() -> None:
    code = "import flowrun, sys; print({'torch', 'hydra'} & {*sys.modules})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "set()"


def test_a_package_knows_its_version() -> None:
    assert flowrun.__version__ == importlib.metadata.version("flowrun")
    with pytest.raises(AttributeError, match="has no attribute 'versoin'"):
        _ = flowrun.versoin


def test_a_recipe_is_composed_planned_and_trained(tmp_path: Path) -> None:
    recipe = flowrun.compose("mlp_hybrid", SMALL)
    assert recipe == flowrun.compose("mlp_hybrid", SMALL)
    planned = flowrun.plan(recipe)
    assert str(planned).startswith("mlp_hybrid: 2 ranks")
    assert planned.training.rehearsal.step_s > 0
    report = flowrun.run(recipe, folder=tmp_path / "run")
    assert report.steps == 2
    assert (tmp_path / "run" / "report.json").exists()


def test_a_run_without_a_folder_goes_where_the_command_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flowrun.run("mlp_data_parallel", ["train.steps=1", *SMALL[1:]])
    (made,) = (tmp_path / "outputs").glob("*/*_mlp_data_parallel")
    assert (made / "metrics.jsonl").exists()


def test_a_mistake_is_one_error_with_a_place() -> None:
    with pytest.raises(flowrun.FlowrunError, match="Did you mean 'mlp_hybrid'"):
        flowrun.plan("mlp_hybird")
    with pytest.raises(TypeError, match=r"give them to flowrun\.compose"):
        flowrun.plan(flowrun.compose("mlp_hybrid"), ["train.steps=1"])


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a smaller recipe, in one process."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).resolve().parents[1] / "docs" / "reference" / "python.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    shorter = {"gpt_hybrid": "mlp_hybrid", "train.steps=20": 'train.steps=2", "launch=virtual'}
    for long, short in shorter.items():
        assert long in code
        code = code.replace(long, short)
    exec(code, {})
    assert (tmp_path / "runs" / "gpt" / "report.json").exists()
