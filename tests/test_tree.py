"""The tree tells the story: a folder imports only folders that come before it."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from support.checks.cycles import cycles

ROOT = Path(__file__).resolve().parents[1]
# One line a level: folders of a level do not import each other, nor those of a later level.  A file
# at the top of engine/ or launcher/ has a level of its own.
ENGINE = (
    ("errors", "torch_internals"),
    ("ir",),
    ("hardware", "runtime/process"),
    ("ops/math",),
    ("ops/shapes", "ops/nn", "ops/flow"),
    ("ops/experts",),
    ("ops",),
    ("boxing", "strategy"),
    ("ops/proof", "actors", "capture/patches", "capture/rewrites"),
    ("capture/in_python",),
    ("capture", "cost", "verify"),
    ("capture/check", "passes"),
    ("passes/layout", "passes/update"),
    ("passes/search", "passes/stages"),
    ("lowering", "rehearsal"),
    ("pipeline", "trace"),
    ("runtime/transport", "compile", "runtime/kernels/cpu"),
    ("runtime/kernels", "plan_updates"),
    ("runtime/inductor", "runtime/rank"),
    ("runtime/drivers",),
    ("runtime/calibration",),
)
LAUNCHER = (
    ("terminal", "platforms"),
    ("urls",),
    ("data",),
    ("data/corpus", "recipe"),
    ("model/hugging_face",),
    ("model", "store"),
    ("text",),
    ("job", "listeners"),
    ("report", "ranks"),
    ("supervise/life",),
    ("supervise/hosts",),
    ("supervise/hands",),
    ("supervise", "place"),
    ("commands",),
    ("page",),
    ("run",),
    ("bench",),
    ("command_line",),
    ("cli",),
)
BENCH = "launcher/bench"
# thin: names that users know
PUBLIC_NAMES = {"launcher/multirun.py"}
# an op may carry rows of its own, which speak of ops: types alone
TYPES_ALONE = set[tuple[str, str]]()
MOST_FILES = 14
MODEL = "a file of models/ is read alone, as a user's own model is"
# type names that several modules define, and why
SHARED_TYPE_NAMES = dict.fromkeys(("Attention", "Block", "Embed", "FeedForward", "Head"), MODEL)
FILES = sorted(file for top in ("engine", "launcher") for file in (ROOT / top).rglob("*.py"))


TOPS = ("engine", "launcher", "models", "testing")
ALL_FILES = sorted(file for top in TOPS for file in (ROOT / top).rglob("*.py"))


def level_of(file: str) -> int:
    """The level of a file, by its folder, or by its own name at the top; -1: it has none."""
    top, _, rest = file.partition("/")
    levels = {"engine": ENGINE, "launcher": LAUNCHER}.get(top, ())
    folder = rest.removesuffix(".py")
    while folder and not any(folder in level for level in levels):
        folder = folder.rpartition("/")[0]
    found = next((k for k, level in enumerate(levels) if folder in level), -1)
    return found + (len(ENGINE) if top == "launcher" and found >= 0 else 0)


def imported(file: Path) -> set[str]:
    """Files of flowrun that a file imports, wherever in it."""
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


def room_of(file: str) -> str:
    """Its folder; the bench, with its peers and foreseen figures, is one."""
    return BENCH if file.startswith(f"{BENCH}/") else file.rpartition("/")[0]


def back_arrows(file: Path) -> list[str]:
    """What a file imports though it comes later, or beside it in another folder."""
    name, found = file.relative_to(ROOT).as_posix(), []
    for target in imported(file):
        outside = target.startswith(("models/", "testing/", "conf/"))
        if (outside and not name.startswith("engine/")) or (name, target) in TYPES_ALONE:
            continue
        rooms = [room_of(path) for path in (name, target)]
        same = rooms[0] == rooms[1] not in ("engine", "launcher")
        if not same and not 0 <= level_of(target) < level_of(name):
            found.append(f"{name} imports {target}")
    return found


def test_a_file_imports_only_what_comes_before_it() -> None:
    files = [file for file in FILES if file.relative_to(ROOT).as_posix() not in PUBLIC_NAMES]
    assert [arrow for file in files for arrow in back_arrows(file)] == []


def test_a_planted_back_arrow_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = tmp_path / "engine" / "ir" / "planted.py"
    planted.parent.mkdir(parents=True)
    planted.write_text("from flowrun.engine.cost.live import x\nimport flowrun.launcher.run\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert len(back_arrows(planted)) == 2


def arrows(files: list[Path]) -> dict[str, set[str]]:
    """What each file imports of the others: at its top, in a function, or for types alone."""
    names = {file.relative_to(ROOT).as_posix(): file for file in files}
    return {name: imported(file) & (names.keys() - {name}) for name, file in names.items()}


def test_no_files_import_each_other() -> None:
    assert cycles(arrows(ALL_FILES)) == []


@pytest.mark.parametrize(
    "text",
    [
        "from flowrun.engine.boxing.crossing import cross",
        "def f():\n    from flowrun.engine.boxing import crossing",
        "if TYPE_CHECKING:\n    import flowrun.engine.boxing.crossing",
    ],
    ids=["at the top", "in a function", "for types"],
)
def test_a_planted_cycle_is_seen(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxing, crossing = (
        tmp_path / "engine" / "boxing" / f"{name}.py" for name in ("boxing", "crossing")
    )
    boxing.parent.mkdir(parents=True)
    boxing.write_text(text)
    crossing.write_text("from flowrun.engine.boxing.boxing import steps\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    names = {f"engine/boxing/{name}.py" for name in ("boxing", "crossing")}
    assert cycles(arrows([boxing, crossing])) == [names]


def test_every_folder_of_the_tree_has_a_level() -> None:
    for file in FILES:
        name = file.relative_to(ROOT).as_posix()
        assert file.name == "__init__.py" or level_of(name) >= 0 or name in PUBLIC_NAMES, name


def test_a_folder_has_few_files() -> None:
    """Those of tests, too."""
    tests = (ROOT / "tests").rglob("*.py")
    files = [file for file in (*FILES, *tests) if file.name not in ("__init__.py", "conftest.py")]
    crowded = {
        str(folder): count
        for folder, count in Counter(f.parent for f in files).items()
        if count > MOST_FILES
    }
    assert crowded == {}


def test_every_folder_begins_with_its_map() -> None:
    """It names each file and folder that is there, and no other file."""
    for file in [*FILES, *(ROOT / "models").rglob("__init__.py")]:
        if file.name != "__init__.py" or len(list(file.parent.glob("*.py"))) < 2:
            continue
        words = ast.get_docstring(ast.parse(file.read_text())) or ""
        there = {f"{each.parent.name}/" for each in file.parent.glob("*/__init__.py")}
        there |= {each.name for each in file.parent.glob("*.py")} - {"__init__.py"}
        assert [name for name in sorted(there) if name not in words] == [], file
        named = set(re.findall(r"(?<![\w/])\w+\.py", words))
        assert sorted(named - there) == [], file


def test_tests_mirror_the_tree() -> None:
    for top in ("engine", "launcher", "models"):
        for test in (ROOT / "tests" / top).rglob("test_*.py"):
            folder = test.parent.relative_to(ROOT / "tests")
            assert (ROOT / folder).is_dir(), f"{test}: no folder {folder}"


def test_no_two_files_share_a_name() -> None:
    counts = Counter(file.name for file in ALL_FILES if file.name != "__init__.py")
    assert {name for name, count in counts.items() if count > 1} == set()


def types_of(file: Path) -> set[str]:
    """Names of the classes and type aliases of a module, without a leading underscore."""
    tree = ast.parse(file.read_text())
    found = {node.name.lstrip("_") for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id.lstrip("_"), ast.unparse(node.value)
            is_type = name.istitle() or (name[:1].isupper() and not name.isupper())
            if is_type and not value.startswith(("TypeVar", "torch.Tensor")):
                found.add(name)
    return found


def test_no_two_modules_define_a_type_of_one_name() -> None:
    modules: dict[str, list[str]] = {}
    for file in ALL_FILES:
        for name in types_of(file):
            modules.setdefault(name, []).append(file.relative_to(ROOT).as_posix())
    twice = {name: files for name, files in modules.items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in SHARED_TYPE_NAMES} == {}
    assert set(SHARED_TYPE_NAMES) <= set(twice), "a name in the list occurs once by now"
