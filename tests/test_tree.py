"""The tree tells the story: a folder imports only folders that come before it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# One line a level: folders of a level do not import each other, nor those of a later level.
LEVELS = (
    ("errors", "own_files", "user_code", "ir", "runtime/process"),
    ("hardware", "ops"),
    ("ops/expansions", "boxing", "strategy"),
    ("proof", "actors", "capture/rewrites"),
    ("capture", "cost"),
    ("capture/check", "passes"),
    ("passes/layout", "passes/update"),
    ("passes/search",),
    ("passes/stages",),
    ("pipeline", "lowering", "rehearsal"),
    ("trace",),
    ("runtime/transport", "compile"),
    ("runtime/kernels",),
    ("runtime/inductor", "runtime/rank"),
    ("runtime/drivers",),
    ("runtime/calibration",),
)
# an op may carry rows of its own, which speak of ops: types alone
TYPES_ALONE = {("ir/graph.py", "ops/table.py")}
MOST_FILES = 14
WIDE = {"ops": "one family of ops a file"}
FILES = sorted((ROOT / "engine").rglob("*.py"))


def level_of(file: str) -> int:
    """The level of a file of engine/, by its folder, or by its own name at the top."""
    folder = file.rpartition("/")[0] or file.removesuffix(".py")
    while folder and not any(folder in level for level in LEVELS):
        folder = folder.rpartition("/")[0]
    return next((k for k, level in enumerate(LEVELS) if folder in level), -1)


def imported(file: Path) -> set[str]:
    """Files of engine/ that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names if name.name.startswith("flowrun.")]
            found |= {name.removeprefix("flowrun.").replace(".", "/") + ".py" for name in names}
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flowrun."):
            base = str(node.module).removeprefix("flowrun.").replace(".", "/")
            for name in node.names:
                inner = ROOT / base / f"{name.name}.py"
                found.add(f"{base}/{name.name}.py" if inner.exists() else f"{base}.py")
    return found


def back_arrows(file: Path) -> list[str]:
    """What a file imports though it comes later, or beside it in another folder."""
    name, found = file.relative_to(ROOT / "engine").as_posix(), []
    for target in imported(file):
        other = target.removeprefix("engine/")
        same = name.rpartition("/")[0] == other.rpartition("/")[0] != ""
        comes_before = target.startswith("engine/") and level_of(other) < level_of(name)
        if not same and not comes_before and (name, other) not in TYPES_ALONE:
            found.append(f"{name} imports {target}")
    return found


def test_a_file_imports_only_what_comes_before_it() -> None:
    assert [arrow for file in FILES for arrow in back_arrows(file)] == []


def test_a_planted_back_arrow_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = tmp_path / "engine" / "ir" / "planted.py"
    planted.parent.mkdir(parents=True)
    planted.write_text("from flowrun.engine.cost.live import x\nimport flowrun.launcher.run\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert len(back_arrows(planted)) == 2


def test_every_folder_has_a_level_and_few_files() -> None:
    for folder in {file.parent for file in FILES if file.parent != ROOT / "engine"}:
        name = folder.relative_to(ROOT / "engine").as_posix()
        files = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
        assert not files or level_of(f"{name}/x.py") >= 0, name
        assert len(files) <= MOST_FILES or name in WIDE, name


def test_every_folder_begins_with_its_map() -> None:
    for file in FILES:
        if file.name == "__init__.py" and len(list(file.parent.glob("*.py"))) > 2:
            assert ast.get_docstring(ast.parse(file.read_text())), file
