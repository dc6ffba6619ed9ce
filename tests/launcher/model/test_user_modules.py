import importlib
import importlib.util
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.model import user_modules
from flowrun.launcher.model.targets import find

LIBRARY = str(Path(pytest.__file__).parent / "imports.py")  # a file among what is installed
NAMES = ("xlib", "modx", "own", "inner", "scipy", "fractions", "shape_of_things")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    before = [*sys.meta_path], [*sys.path], [*user_modules.FOLDERS], dict(sys.modules)
    for name in NAMES:
        sys.modules.pop(name, None)
    yield tmp_path
    sys.meta_path[:], sys.path[:], user_modules.FOLDERS[:] = before[:3]
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.modules.update({name: before[3][name] for name in NAMES if name in before[3]})
    vars(user_modules)["_HIDDEN"].clear()


def library(text: str) -> CodeType:
    return compile(text, LIBRARY, "exec")


@pytest.mark.parametrize("init", ["", "__init__.py", "kernels.py"])
@pytest.mark.parametrize(
    "text",
    [
        "import xlib",
        "from xlib.language import x",
        "__import__('importlib').import_module('xlib')",
        "__import__('importlib.util').util.find_spec('xlib') or [][0]",
        "name = 'xli'; __import__('importlib.util').util.find_spec(name + 'b') or [][0]",
    ],
)
def test_a_folder_of_the_users_is_not_the_library_of_its_name(
    here: Path, init: str, text: str
) -> None:
    (here / "xlib").mkdir()
    if init:
        (here / "xlib" / init).write_text("x = 1\n")
    user_modules.make_importable(str(here))
    with pytest.raises((ImportError, IndexError)):
        exec(library(text), {})


def test_the_users_code_imports_what_lies_beside_the_recipe(here: Path) -> None:
    (here / "inner").mkdir()
    (here / "inner" / "parts.py").write_text("class Part: pass\n")
    (here / "own.py").write_text("from inner.parts import Part\ndef make(): return Part()\n")
    assert type(find("own.make", "model._target_")()) is find("inner.parts.Part", "model._target_")


def test_a_library_that_is_given_a_name_finds_the_users_module(here: Path) -> None:
    (here / "own.py").write_text("class Kept: pass\n")
    kept = pickle.dumps(find("own.Kept", "data._target_")())
    del sys.modules["own"]
    assert type(pickle.loads(kept)).__name__ == "Kept"
    del sys.modules["own"]
    given: dict[str, object] = {"name": "own"}
    exec(library("import importlib; made = importlib.import_module(name)"), given)
    assert given["made"] is sys.modules["own"]


def test_a_module_that_hides_an_installed_one_is_used_and_noted(here: Path) -> None:
    (here / "fractions.py").write_text("class Net: pass\n")
    assert find("fractions.Net", "model._target_").__module__ == "fractions"
    (note,) = user_modules.note_hidden()
    assert note.startswith("module fractions is fractions.py, which hides the installed one (/")


def test_a_folder_behind_an_installed_module_is_named_with_its_file(here: Path) -> None:
    (here / "fractions").mkdir()
    with pytest.raises(RecipeError, match=r"'Net' \(/\S+fractions.py, not fractions of this"):
        find("fractions.Net", "model._target_")
    (here / "math.py").write_text("class Net: pass\n")
    with pytest.raises(RecipeError, match=r"'Net' \(.*, not math.py of this folder"):
        find("math.Net", "model._target_")


def test_the_working_directory_is_not_on_the_path(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "modx").mkdir()
    monkeypatch.syspath_prepend(str(here))
    user_modules.make_importable(str(here))
    assert str(here) not in sys.path
    assert importlib.util.find_spec("modx") is not None  # this test is code of a user
