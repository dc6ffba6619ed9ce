"""What is released: a wheel and a source archive that are whole, and a run from the wheel."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("conf", "engine", "launcher", "models", "recipes", "testing")
KINDS = {".py", ".yaml", ".json", ".typed", ".html", ".js", ".css"}
LEFT_OUT = shutil.ignore_patterns(
    ".*", "build", "dist", "docs", "tests", "*.egg-info", "__pycache__"
)


def call(*command: object, cwd: Path, **environ: str) -> str:
    """Run Python; return what it prints."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both archives, made of the tree as it stands."""
    tree = tmp_path_factory.mktemp("release") / "tree"
    shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
    call("-m", "build", "--no-isolation", "--outdir", tree.parent / "dist", cwd=tree)
    return tree.parent / "dist"


@pytest.mark.processes
def test_both_archives_are_ready_for_an_index(built: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    names = sorted(each.name for each in built.iterdir())
    assert names == [f"flowrun-{version}-py3-none-any.whl", f"flowrun-{version}.tar.gz"]
    call("-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.processes
def test_the_wheel_has_every_file_that_the_program_reads(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        packed = {name.removeprefix("flowrun/") for name in wheel.namelist()}
    tree = {
        file.relative_to(ROOT).as_posix()
        for top in TOPS
        for file in (ROOT / top).rglob("*")
        if file.suffix in KINDS
    }
    assert len(tree) > 500
    assert tree - packed == set()
    assert {name for name in packed if name.startswith(("tests/", "docs/", "build/"))} == set()


@pytest.mark.processes
def test_a_recipe_trains_from_the_wheel(built: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    wheel = next(built.glob("*.whl"))
    call("-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    where = "import flowrun.launcher.cli as cli; print(cli.__file__)"
    assert call("-c", where, cwd=tmp_path, PYTHONPATH=str(site)).startswith(str(site))
    run = ("-m", "flowrun.launcher.cli", "recipe=mlp_hybrid", "train.steps=2", "hydra.run.dir=run")
    call(*run, cwd=tmp_path, PYTHONPATH=str(site))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["steps"], report["ranks"]) == (2, 2)
