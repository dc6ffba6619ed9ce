"""What the pages tell a reader to write composes: every `flowrun` command and every piece of YAML.

Nothing is built and nothing runs, so files and classes of the reader's own need not be there.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from flowrun.engine.errors import RecipeError
from flowrun.launcher.bench.runs import round_of
from flowrun.launcher.bench.suite import Suite, load_suite
from flowrun.launcher.cli import COMMANDS
from flowrun.launcher.recipe.compose import load, spell

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
USUAL = "defaults: [/model: gpt_tiny, /data: text, /optim: adamw, /launch: local]\n"
OF_A_RUN = "recipe=gpt_hybrid"  # what a run folder of the pages may have trained
REFUSED = "exit status 2"  # said behind a command that is to fail


def blocks(text: str, language: str) -> list[str]:
    """Fenced code."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> Iterator[str]:
    """Of shell code, one a line or behind `&&`; and those between backticks that name a recipe and
    leave nothing out.
    """
    for line in "".join(blocks(text, "bash")).replace("\\\n", " ").splitlines():
        yield from (part.strip() for part in line.split("&&"))
    for quoted in re.findall(r"`(flowrun [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if "recipe=" in quoted and not re.search("…|that/", quoted):
            yield " ".join(quoted.split())


def snippets(text: str) -> Iterator[str]:
    """Pieces of a recipe, made whole.  Indented ones are of `optim`; lines that give one key again
    are alternatives.
    """
    for block in blocks(text, "yaml"):
        keys = re.findall(r"^(\w+):", block, re.MULTILINE)
        for piece in [block] if len(set(keys)) == len(keys) else block.splitlines(keepends=True):
            whole = f"optim:\n{piece}" if piece.startswith(" ") else piece
            yield whole if "defaults:" in whole else USUAL + whole


COMMANDS_OF_PAGES = [
    pytest.param(line, id=f"{page.stem}: {line.partition(' #')[0].strip()}")
    for page in PAGES
    for line in commands(page.read_text())
    if re.match(r"\S*flowrun ", line)
]
SNIPPETS = [
    pytest.param(snippet, id=f"{page.stem} {k}")
    for page in PAGES
    for k, snippet in enumerate(snippets(page.read_text()))
]


def test_there_is_something_to_compose() -> None:
    assert len(COMMANDS_OF_PAGES) > 20 and len(SNIPPETS) > 10


def composed(line: str) -> None:
    """Compose what a command would; a sweep, every combination."""
    _, *given = shlex.split(line, comments=True)
    command = given.pop(0) if given[0] in COMMANDS else "run"
    if "--save-recipe" in given:
        at = given.index("--save-recipe")
        del given[at : at + 2]
    overrides = [text for text in given if "=" in text.removeprefix("--")]
    assert set(given) - set(overrides) <= {"-m"} or command in ("resume", "export", "calibrate"), (
        line
    )
    if command == "calibrate" and overrides:
        load(overrides)
        return
    if command in ("recipes", "export", "calibrate"):
        assert not overrides
        return
    if command == "bench":
        suite, _ = load_suite(overrides)
        if isinstance(suite, Suite):
            recipes = {run.overrides for run in round_of(suite)}
        else:  # every row: launcher/bench/foreseen
            recipes = {table.rows[0].overrides for table in suite.tables}
        for each in recipes:
            load(list(each))
        return
    if command == "resume":
        overrides.insert(0, OF_A_RUN)
    parsed = OverridesParser.create().parse_overrides(spell(overrides))
    choices = [
        list(each.sweep_string_iterator())
        if each.is_sweep_override()
        else [each.get_value_string()]
        for each in parsed
    ]
    assert "-m" in given or all(len(each) == 1 for each in choices), line
    keys = [text.partition("=")[0] for text in spell(overrides)]
    for values in product(*choices):
        load([f"{key}={value}" for key, value in zip(keys, values, strict=True)])


@pytest.mark.parametrize("line", COMMANDS_OF_PAGES)
def test_a_command_composes(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if REFUSED in line:
        with pytest.raises(RecipeError):
            composed(line)
    else:
        composed(line)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_piece_of_yaml_composes(
    snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "snippet.yaml").write_text(snippet)
    load(["recipe=snippet.yaml"])
