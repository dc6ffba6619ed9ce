"""What the documentation site shows is made by commands: its pictures, its screens, its pages of
recipe keys and commands.
"""

import dataclasses
import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrun.launcher.cli import COMMANDS, main
from flowrun.launcher.recipe.schema import RecipeSchema

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "make"))

import command_help  # noqa: E402
import pictures  # noqa: E402
import recipe_keys  # noqa: E402
import screens  # noqa: E402
from field_docs import with_attributes  # noqa: E402


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_what_the_engine_says(name: str) -> None:
    drawn = str(pictures.PICTURES[name]())
    assert (pictures.FOLDER / f"{name}.svg").read_text() == drawn, "python docs/make/pictures.py"


SCREENS = [screen for screen in screens.screens() if not screen.slow]


def commands() -> list[Any]:
    """Commands whose screens pages show; those that start processes are marked."""
    names = dict.fromkeys(screen.run for screen in SCREENS)
    return [
        pytest.param(name, marks=() if " plan " in name else pytest.mark.processes)
        for name in names
    ]


@pytest.mark.parametrize("command", commands())
def test_a_screen_is_what_the_command_prints(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", screens.COLUMNS)
    with pytest.raises(SystemExit):
        main(shlex.split(command)[1:])
    printed = capfd.readouterr()
    for screen in SCREENS:
        if screen.run == command:
            shown = screen.shown(printed.out + printed.err)
            assert screens.alike(shown) == screens.alike(screen.text), (
                f"python docs/make/screens.py --write {screen.page.relative_to(ROOT)}"
            )


def test_a_screen_that_tells_something_else_is_seen() -> None:
    lines = screens.alike(
        "foreseen 1.9 ms, all-gather over data\nnote: 4 ranks share 2 cores of this host\n"
    )
    assert lines == ["foreseen #, all-gather over data"]
    assert lines != screens.alike("foreseen 2.2 ms, all-reduce over data\n")


def test_every_recipe_key_has_a_meaning_and_a_type() -> None:
    page = recipe_keys.page()
    for dotted, (cls, _) in recipe_keys.sections().items():
        for key in recipe_keys.keys(cls, dotted):
            assert key.meaning and key.type, key
    assert all(f"`{field.name}`" in page for field in dataclasses.fields(RecipeSchema))
    known = {
        key.name
        for at, (cls, _) in recipe_keys.sections().items()
        for key in recipe_keys.keys(cls, at)
    }
    assert set(recipe_keys.UNITS) <= known


def test_every_command_has_its_help_on_the_page() -> None:
    page = command_help.page()
    assert all(f"## flowrun {name}\n" in page for name in COMMANDS)


def test_every_command_stands_on_the_page_of_commands() -> None:
    page = (ROOT / "docs" / "how_to" / "commands.md").read_text()
    assert [name for name in COMMANDS if name != "run" and f"| `flowrun {name}`" not in page] == []


def test_fields_that_a_docstring_explains_become_a_table() -> None:
    text = "A link.\n\nlatency_s: seconds.  hops, size: numbers,\n    each.\n\nRaises nothing."
    assert with_attributes(text, ["latency_s", "hops", "size"]).split("\n\n") == [
        "A link.",
        "Raises nothing.",
        "Attributes:\n    latency_s: seconds.\n    hops: numbers, each.\n    size: numbers, each.",
    ]


@pytest.mark.parametrize(
    "script", sorted((ROOT / "docs").rglob("*.py")), ids=lambda file: file.stem
)
def test_a_script_of_the_pages_finds_what_it_imports(script: Path) -> None:
    spec = importlib.util.spec_from_file_location(f"script_{script.stem}", script)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
